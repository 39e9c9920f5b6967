"""A client that is stopped in the middle of its hand-over holds up every other one: between the daemon's answer and the
client's own handshake with its server MPS answers nothing at all (measured on an H100 with driver 580).

So it is resumed, again and again, and killed when that does not help: it has nothing yet that could be lost, and it is
the one that the gate is handing over, known by its pidfd.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpsagent.core import actions as act
from mpsagent.core.hangs import PROMISE
from mpsagent.core.rule import Decision
from mpsagent.core.view import View

KILL_AFTER = 5.0
"""Seconds."""
RESUME_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Memory:
    """By connection: since when its process is seen stopped, and when it was resumed last."""

    stopped: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    killed: frozenset[int] = frozenset()


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    queue = view.state.held
    handing = [queue[one] for one in sorted(queue.handing) if queue[one].peer.pid in view.state.stopped]
    if not handing:
        return Decision(Memory())
    todo: list[act.Action] = []
    stopped: dict[int, tuple[float, float]] = {}
    killed = memory.killed & {h.connection for h in handing}
    wakes: list[float] = []
    enforce = view.policy.enforce
    for held in handing:
        since, resumed = memory.stopped.get(held.connection, (now, float("-inf")))
        due = since + KILL_AFTER
        what = f"process {held.peer.pid} of user {held.uid} is stopped in the middle of its hand-over"
        number = None
        if held.connection in killed:
            pass
        elif now >= due:
            number, killed = signal.SIGKILL, killed | {held.connection}
        elif now >= resumed + RESUME_EVERY:
            number, resumed = signal.SIGCONT, now
        if number is not None:
            todo.append(
                act.SignalHeld(
                    connection=held.connection, pid=held.peer.pid, start=held.peer.start, uid=held.uid,
                    signal=int(number), reason=f"{what}, which holds up everybody: {number.name}", rule=PROMISE,
                    enforce=enforce,
                )
            )  # fmt: skip
        stopped[held.connection] = (since, resumed)
        wakes.append(min(due, resumed + RESUME_EVERY) if held.connection not in killed else now + RESUME_EVERY)
    return Decision(Memory(stopped, killed), tuple(todo), wake=max(min(wakes), now + 0.01))
