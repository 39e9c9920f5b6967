"""Maintenance: no new user is served, and running work ends by itself or at a time.

MPS starts a server for whoever is first in its pending list, so the one means against new users that it offers is
``quit -t N``: from then on new clients fail with MPS_CONNECTION_FAILED, who waits is refused, running work goes on for
N seconds and is then ended by force (recording 02, R10). The control daemon is not started again before the drain ends
(``hangs``). A ``quit`` cannot be taken back: after an early resume service comes back once it is over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core.turns import Turn, TurnsMemory
from mpsagent.core.world import World
from mpsagent.mps.units import duration_text

RULE = "drain"
FOREVER = 86400
"""Seconds that MPS is told when running work may take as long as it wants: it wants a number."""
AGAIN = 5.0
"""Seconds until a ``quit`` that did not get through is sent again."""


@dataclass(frozen=True, slots=True)
class DrainMemory:
    """``since``: the drain that has been reported; ``asked``: its ``quit`` is on its way."""

    since: float | None = None
    asked: bool = False
    again_at: float = float("-inf")
    done: bool = False


def decide(
    world: World, memory: DrainMemory, turns: TurnsMemory, now: float
) -> tuple[DrainMemory, TurnsMemory, list[act.Action], float | None]:
    todo: list[act.Action] = []
    drain, control = world.drain, world.state.control
    if memory.since is not None and (drain is None or drain.since != memory.since):
        todo.append(act.Report(kind="drain.ended", reason="users are served again", rule=RULE))
        memory = DrainMemory()
    if drain is None:
        return memory, turns, todo, None
    if memory.since is None:
        memory = DrainMemory(since=drain.since)
        until = "as long as it takes" if drain.until is None else f"for {duration_text(max(0.0, drain.until - now))}"
        todo.append(act.Report(kind="drain.begun", reason=f"no new user is served; work goes on {until}", rule=RULE))
    if not world.control_alive:
        if not memory.done:
            reason = "nothing runs any more; the control daemon stays down until the drain ends"
            todo.append(act.Report(kind="drain.done", reason=reason, rule=RULE))
            memory = replace(memory, done=True)
        return memory, turns, todo, None
    memory = replace(memory, done=False)
    turns = _leftovers(world, turns)
    if control is None or control.quitting is not None or memory.asked:
        return memory, turns, todo, None
    if now < memory.again_at:
        return memory, turns, todo, memory.again_at
    timeout = FOREVER if drain.until is None else min(FOREVER, max(1, math.ceil(drain.until - now)))
    reason = f"drain: running work has {duration_text(timeout)}"
    todo.append(act.QuitControl(timeout=timeout, reason=reason, rule=RULE))
    return replace(memory, asked=True), turns, todo, None


def _leftovers(world: World, turns: TurnsMemory) -> TurnsMemory:
    """Whoever is a client when its server is ended by force is signalled afterwards, like at the end of a turn."""
    known = {turn.server for turn in turns.leaving}
    new = [
        Turn(server=server.pid, uid=server.uid, since=server.started, section="order")
        for server in world.state.servers.values()
        if server.pid not in known and server.uid is not None and server.uid != world.parked_uid
    ]
    return replace(turns, leaving=(*turns.leaving, *new)) if new else turns


def note(memory: DrainMemory, outcome: act.Outcome) -> DrainMemory:
    action = outcome.action
    if not isinstance(action, act.QuitControl) or action.rule != RULE:
        return memory
    return replace(memory, asked=False, again_at=outcome.at + AGAIN)
