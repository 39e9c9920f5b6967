"""Verification: the limits that a server said it started with are compared with its first client's.

The gate sets and reads back the limits in the same transaction as the hand-over (recording 08, G8), so this is a check
of MPS itself and of changes by others, not a mechanism: nothing is killed and nothing corrected, because the next
hand-over sets everything anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.model import Server
from mpsagent.core.rule import Decision
from mpsagent.core.view import View, same_limits
from mpsagent.mps.units import limits_words

FIRST = 5.0
"""Seconds from Ready in which a client is one of those that the server was started for."""
PROMISE = "promise 1: every client gets exactly its policy"


@dataclass(frozen=True, slots=True)
class Memory:
    """``seen``: servers that have been held against the policy; ``differs``: servers that started with other limits;
    ``begun``: when this agent looked first."""

    seen: frozenset[int] = frozenset()
    differs: frozenset[int] = frozenset()
    begun: float | None = None


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    servers = view.state.servers
    seen, differs = memory.seen & servers.keys(), memory.differs & servers.keys()
    begun = now if memory.begun is None else memory.begun
    todo: list[act.Action] = []
    for server in servers.values():
        if server.ready is not None and server.ready < begun:  # its first client may have gone with the earlier agent
            seen |= {server.pid}
        if server.pid in seen or not server.reported or server.ready is None or not view.limits_enforced:
            continue
        clients = view.state.clients_of(server.pid)
        given = [one.limits for one in clients if one.since <= server.ready + FIRST and one.limits is not None]
        if clients and not given:  # its first ones have gone
            seen |= {server.pid}
        if not given:  # its first client's hand-over is not finished, or it serves no client
            continue
        seen |= {server.pid}
        # Of two that came at once the second may stand in the log before the first (world, hour, seed 479974238).
        first = (one for one in view.state.working_on(server) if one.since <= server.ready + FIRST)
        ok = any(
            same_limits(server.limits, one)
            for one in (*given, *(one.limits for one in first if one.limits is not None))
        )
        if not ok:
            differs |= {server.pid}
        todo.append(_report(server, limits_words(given[0].as_json()), ok))
    return Decision(Memory(seen, differs, begun), tuple(todo))


def _report(server: Server, wanted: str, ok: bool) -> act.Report:
    said = limits_words(server.limits.as_json())
    if ok:
        reason, kind = f"server {server.pid} started with {said}", "limits.verified"
    else:
        reason = f"server {server.pid} started with {said}; its first client was handed over with {wanted}"
        kind = "limits.mismatch"
    return act.Report(kind=kind, reason=reason, rule=PROMISE, uid=server.uid, server=server.pid)
