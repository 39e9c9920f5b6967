"""What the rule of turns remembers, and how a turn begins and is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mpsagent.core import transitions as tr
from mpsagent.core.view import Turn, View

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
    """``turn``: who has the GPU; ``closing``: its user is shut out, so that the next one can be let in; ``idle``: it
    has lain idle since, wanted by no other user; ``worked``: a client of this turn has been at work; ``tried``: since
    when the gate has tried to hand its first one over; ``left``: when the user before had it last; ``served``: when the
    last turn of users ended, as far as that counts for the queue; ``suspended``: users whose processes stand, or are
    being frozen, since when; ``shutdown``: the server that is in the next user's
    way; ``quit``: control daemon that was asked to quit, and when."""

    turn: Turn | None = None
    closing: bool = False
    idle: bool = False
    worked: bool = False
    tried: float | None = None
    left: float | None = None
    served: Mapping[int, float] = field(default_factory=dict)
    suspended: Mapping[int, float] = field(default_factory=dict)
    shutdown: Asked | None = None
    quit: tuple[int, float] | None = None
    reported: bool = False


def begin(memory: Memory, uid: int, since: float) -> Memory:
    suspended = {other: at for other, at in memory.suspended.items() if other != uid}
    return Memory(turn=Turn(uid, since), left=memory.left, served=memory.served, suspended=suspended)


def over(view: View, memory: Memory, now: float, *, behind: bool) -> tuple[Memory, list[tr.Transition]]:
    """The turn is over. ``behind``: what its user has waiting is behind all who wait now."""
    assert memory.turn is not None
    uid = memory.turn.uid
    # Also of those who wait no more, for as long as others do, held or paused, who have waited for that turn's end.
    held = view.state.held
    came = min([*(first.since for one in held.users()[:1] if (first := held.first(one))), *memory.suspended.values()],
               default=float("inf"))  # fmt: skip
    served = {other: at for other, at in memory.served.items() if at > came or held.first(other) is not None}
    served = dict(sorted(served.items(), key=lambda one: one[1])[-MOST_SERVED:])
    served = {**served, uid: now} if behind else served
    return Memory(left=now, served=served, suspended=memory.suspended), [ended(memory.turn, now)]


def ended(turn: Turn, now: float) -> tr.TurnEnded:
    return tr.TurnEnded(now, turn.uid, max(0.0, now - turn.since), (turn.ending or turn.pausing) is not None)
