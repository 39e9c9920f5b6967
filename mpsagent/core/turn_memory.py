"""What the rule of turns remembers, and what it makes of one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Client, Control
from mpsagent.core.rule import EndClient, Reason
from mpsagent.core.view import Phase, Turn, View

AGAIN = 20.0
"""Seconds until a ``quit`` that was not heard of again is repeated: more than any deadline of the front-end."""
MOST_SERVED = 1024
"""Users of whom it is remembered when their last turn ended."""


class Asked(NamedTuple):
    """A server that was asked to make way: ``since`` when, when last, how often."""

    server: int
    since: float
    last: float
    times: int


@dataclass(frozen=True, slots=True)
class Memory:
    """``turn``: the user with the GPU; ``left``: when the user before had it last; ``served``: when the last turn of
    users ended, as the queue counts it; ``suspended``: users whose processes are frozen, or are being frozen, since
    when; ``shutdown``: the server that is in the next user's way; ``quit``: control daemon that was asked to quit, and
    when; ``signalled``: clients that were sent the warning of this turn's end, None: it was only put on record, because
    the turn was not to end; ``waits``: why the next turn does not begin yet."""

    turn: Turn | None = None
    left: float | None = None
    served: Mapping[int, float] = field(default_factory=dict)
    suspended: Mapping[int, float] = field(default_factory=dict)
    shutdown: Asked | None = None
    quit: tuple[int, float] | None = None
    signalled: frozenset[tuple[int, int]] | None = frozenset()
    waits: Reason | None = None


class Moment:
    """What the rule sees now, its memory as it becomes, and what is to be done."""

    def __init__(self, view: View, memory: Memory, now: float) -> None:
        self.view, self.memory, self.now = view, memory, now
        self.actions: list[act.Action] = []
        self.requests: list[EndClient] = []
        self.told: list[tr.Transition] = []

    @property
    def turn(self) -> Turn:
        assert self.memory.turn is not None
        return self.memory.turn

    @property
    def clients(self) -> tuple[Client, ...]:
        """Those of the user whose turn it is."""
        return self.view.state.clients_of_user(self.turn.uid)

    @property
    def works(self) -> bool:
        """A process of the user's is at work, or being handed over."""
        return bool(self.clients) or self.view.state.held.hands_over(self.turn.uid)

    @property
    def wanted(self) -> bool:
        """The GPU is wanted by another than its user."""
        return bool(self.view.others()) or self.view.state.drain is not None or self.view.outdated

    def remember(self, **changes: Any) -> None:
        self.memory = replace(self.memory, **changes)

    def to(self, phase: Phase, **changes: Any) -> None:
        self.remember(turn=replace(self.turn, phase=phase, **changes))

    def report(self, kind: str, reason: str, key: str = "turn.time_limit") -> None:
        rule = self.view.rules(self.turn.uid).origin(key).key
        self.actions.append(act.Report(kind=kind, reason=reason, rule=rule, uid=self.turn.uid))

    def begin(self, uid: int, since: float) -> None:
        suspended = {other: at for other, at in self.memory.suspended.items() if other != uid}
        self.memory = Memory(Turn(uid, since), self.memory.left, self.memory.served, suspended)

    def over(self, *, behind: bool) -> None:
        """The turn is over. ``behind``: what its user has waiting is behind all who wait now."""
        # Also of those who wait no more, for as long as others do, held or paused, who have waited for that turn's end.
        held, memory = self.view.state.held, self.memory
        came = min([*(first.since for one in held.users()[:1] if (first := held.first(one))),
                    *memory.suspended.values()], default=float("inf"))  # fmt: skip
        served = {other: at for other, at in memory.served.items() if at > came or held.first(other) is not None}
        served = dict(sorted(served.items(), key=lambda one: one[1])[-MOST_SERVED:])
        served = {**served, self.turn.uid: self.now} if behind else served
        self.told.append(ended(self.turn, self.view, self.now))
        self.memory = Memory(left=self.now, served=served, suspended=memory.suspended)

    def quit(self, control: Control, timeout: int, reason: str, rule: str) -> float | None:
        """``quit -t N``, and again when that was not heard of; when to look again."""
        if control.quitting is not None:
            return None
        pid, asked = self.memory.quit or (0, 0.0)
        if pid != control.pid or self.now >= asked + timeout + AGAIN:
            self.actions.append(act.QuitControl(timeout=timeout, reason=reason, rule=rule))
            self.remember(quit=(control.pid, asked := self.now))
        return asked + timeout + AGAIN


def ended(turn: Turn, view: View, now: float) -> tr.TurnEnded:
    key = {"pausing": "turn.pause_slice", "ending": "turn.time_limit"}.get(turn.phase)
    why = None if key is None else view.rules(turn.uid).place(key)
    return tr.TurnEnded(now, turn.uid, max(0.0, now - turn.since), key is not None, why)
