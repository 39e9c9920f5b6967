"""What every rule is: ``decide(view, memory, now) -> Decision``, and ``note(memory, done) -> memory`` where it matters
how an action ended.

A rule keeps its own memory and nothing else. What it needs of another rule it asks for by a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from mpsagent.core.actions import Action
from mpsagent.core.model import Client
from mpsagent.core.transitions import Transition
from mpsagent.policy.keys import KEYS

M = TypeVar("M", covariant=True)
_OF_TURNS = frozenset(key.name for key in KEYS if key.section == "turn")
Section = Literal["limits", "turn", "timeouts", "order"]
"""Whose policy it is: with its enforcement off the request is dropped. ``order``: a person asked for it."""


def of_turns(rule: str) -> bool:
    """Return whether a rule's key is one of ``[turn]``; a user or group may be called turn."""
    words = rule.split(".")
    return words[-2:-1] == ["turn"] and words[-1] in _OF_TURNS


class Reason(NamedTuple):
    """Why users wait, by the rule that holds them: ``word`` for programs, ``text`` for people. ``known``: processes
    that have passed may have further contexts; ``until``: it is over by itself then."""

    word: str
    text: str
    known: bool = False
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndClient:
    """A request to the ladder. ``start`` tells the process from a later one with its pid; ``signals_only``: nothing is
    left to protect (a fault, a server that has gone), or the time for asking is over; ``hook``: run the policy's
    program first."""

    pid: int
    start: int
    uid: int
    reason: str
    rule: str
    section: Section
    signals_only: bool = False
    hook: bool = False

    @classmethod
    def of(cls, one: Client, reason: str, rule: str, section: Section, *, hook: bool = True, **how: bool) -> EndClient:
        return cls(
            pid=one.pid, start=one.peer.start, uid=one.uid, reason=reason, rule=rule, section=section, hook=hook, **how
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision(Generic[M]):
    """``wake``: when to decide again at the latest, None when only an input can change anything."""

    memory: M
    actions: tuple[Action, ...] = ()
    requests: tuple[EndClient, ...] = ()
    transitions: tuple[Transition, ...] = ()
    wake: float | None = None
