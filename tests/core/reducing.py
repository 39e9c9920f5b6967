"""Inputs to state, one and many, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from mpsagent.core import inputs as inp
from mpsagent.core.model import State
from mpsagent.core.reduce import reduce
from mpsagent.mps import events as ev

KINDS = [one for one in vars(ev).values() if isinstance(one, ev.What)]
"""All that a line may mean."""


def apply(state: State, event: inp.Input) -> State:
    return reduce(state, event)[0]


def apply_all(state: State, events: Sequence[inp.Input]) -> State:
    for event in events:
        state = apply(state, event)
    return state
