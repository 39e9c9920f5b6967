"""Conditions: what a person is told to look at, and what is no reason to."""

from __future__ import annotations

from dataclasses import replace

from mpsagent.agent.conditions import WAIT_SLACK, Conditions, note_conditions
from mpsagent.core.engine import Core
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Control, Held, StartFailure
from mpsagent.core.queue import Queue
from mpsagent.policy.identity import Identity

USER = 20001


def test_who_has_waited_for_a_whole_turn_does_not_wait_too_long_when_it_is_over() -> None:
    """Seen: for a second after a turn, `status` said that the next user waits longer than the policy says."""
    core, left = Core(), 200.0
    held = Queue().put(Held(1, Peer(10, USER, USER, 1), 100.0))
    control = Control(pid=5, started=1.0, socket="/c", version=13000, proven=True)
    core.state = replace(core.state, control=control, held=held, identities={USER: Identity(USER, "alice")})
    core.memories = replace(core.memories, turns=replace(core.memories.turns, left=left))
    conditions = Conditions()
    for now, expected in ((left + 1.0, 0), (left + WAIT_SLACK + 1.0, 1)):
        note_conditions(conditions, core, now)
        assert len([one for one in conditions.all() if "longer than the policy says" in one.what]) == expected


def test_one_is_not_said_in_the_plural() -> None:
    """It was: "do not start (1 times in a row)"."""
    core, conditions = Core(), Conditions()
    for count, often in ((1, ""), (3, " (3 times in a row)")):
        core.state = replace(core.state, start_failure=StartFailure(count, 99.0, 100.0, "no device"))
        note_conditions(conditions, core, 101.0)
        assert [one.what for one in conditions.all()] == [f"MPS's servers do not start{often}: no device"]
