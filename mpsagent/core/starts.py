"""Servers that do not start: back off, give up, say why.

MPS tries six times for a waiting client and then drops it (drivers 470 to 550 without a GPU, recording 09); asked again
at once it would go on for ever: 274 starts and 4,414 lines in 11 s, watched. So who waits is held, and after a few
rounds turned away with the reason; later connections are tried again from time to time.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.rule import Decision
from mpsagent.core.view import View

RULE = "promise 4: a fault, a hang or a crash ends by itself"
ROUND = 6
"""Starts that MPS itself tries for one waiting client."""
ROUNDS = 3
"""Rounds until waiting clients are turned away."""
PAUSE_MOST = 60.0


@dataclass(frozen=True, slots=True)
class Memory:
    """``counted``: starts that have been counted; ``rounds``: how often starting has failed for a client; ``until``:
    not tried before; ``given_up``: why clients are refused."""

    counted: int = 0
    rounds: int = 0
    until: float | None = None
    given_up: str | None = None


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    failure = view.state.start_failure
    if failure is None or failure.count == 0 or view.elsewhere:
        return Decision(Memory())
    todo: list[act.Action] = []
    if failure.count < memory.counted:
        memory = Memory()
    # A line alone turns no client away: each round is a hand-over that the gate saw fail, too.
    if failure.count >= memory.counted + ROUND and view.state.failed_handovers > memory.rounds:
        memory = _failed(memory, failure.count, failure.last, failure.reason)
        if memory.given_up is not None:
            todo.append(act.Report(kind="server.given_up", reason=memory.given_up, rule=RULE))
    if memory.until is not None and now >= memory.until:  # one more round, for who comes now
        memory = Memory(memory.counted, memory.rounds)
    return Decision(memory, tuple(todo), wake=memory.until)


def _failed(memory: Memory, count: int, at: float, reason: str) -> Memory:
    rounds = memory.rounds + 1
    pause = min(2.0 ** (rounds - 1), PAUSE_MOST)
    why = None
    if rounds >= ROUNDS:
        said = reason or "it gives no reason; see server.log"
        why = f"MPS's servers do not start ({count} times in a row): {said}"
        pause = PAUSE_MOST
    return Memory(count, rounds, at + pause, why)
