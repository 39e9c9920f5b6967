"""Servers that were started for a dead client.

A client that dies while it waits (a user's Ctrl-C) stays in MPS's pending list. Its user's server is started for it all
the same, waits for it for ever, takes no other client, and the control daemon hangs on it as soon as somebody else is
to be served: conformance scenarios X1, X15 and X18. SIGKILL of that server frees the daemon, and who waits is served
0.5 s later with the limits that were armed meanwhile (X16).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core.world import World

PROMISE = "promise 4: a fault, a hang or a crash ends by itself"
AGAIN = 2.0
"""Seconds until a server that is still there is killed once more."""


@dataclass(frozen=True, slots=True)
class OrphansMemory:
    """``killed``: server pid and when, as pairs."""

    killed: tuple[tuple[int, float], ...] = ()


def decide(world: World, memory: OrphansMemory, now: float) -> tuple[OrphansMemory, list[act.Action], float | None]:
    todo: list[act.Action] = []
    killed: dict[int, float] = dict(memory.killed)
    stuck = [server for server in world.state.servers.values() if server.stuck_since is not None]
    for server in stuck:
        if now < killed.get(server.pid, float("-inf")) + AGAIN:
            continue
        killed[server.pid] = now
        reason = f"server {server.pid} of user {server.uid} waits for ever for a client that died in the queue"
        todo.append(act.KillServer(server=server.pid, reason=reason, rule=PROMISE, enforce=world.policy.enforce_hang))
    kept = tuple((server.pid, killed[server.pid]) for server in stuck)
    wake = min((at + AGAIN for _, at in kept), default=None)
    return (memory if kept == memory.killed else replace(memory, killed=kept)), todo, wake
