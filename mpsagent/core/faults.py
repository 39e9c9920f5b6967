"""FAULT ends by itself: a client with a sticky error gets ``timeouts.fault_recovery`` to leave, then is signalled.

A server in FAULT refuses all new clients on every GPU it serves until every client that it listed has exited; one that
ignores its error blocks the GPU without end (recording 02, R4). All listed clients are alike: the log often names the
wrong culprit (recording 03, Q3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.model import Server, Status
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View

RULE = "timeouts.fault_recovery"
FORCE_AFTER = 2.0
"""Seconds after the last sticky client's end until a server that is still in FAULT is shut down by force. Recovery took
60 ms (recording 02, R4)."""
FORCE_AGAIN = 30.0


@dataclass(frozen=True, slots=True)
class Memory:
    """By server: since when it has had no sticky client left, whether it was asked, when it may be forced (again)."""

    clear_since: Mapping[int, float] = field(default_factory=dict)
    asked: frozenset[int] = frozenset()
    force_at: Mapping[int, float] = field(default_factory=dict)


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    wakes: list[float] = []
    servers = {pid: one for pid, one in view.state.servers.items() if one.status is Status.FAULT}
    clear = {pid: at for pid, at in memory.clear_since.items() if pid in servers}
    force_at = {pid: at for pid, at in memory.force_at.items() if pid in servers}
    asked = memory.asked & servers.keys()
    for server in servers.values():
        if server.fault_since is None or not server.fault_confirmed:  # a log alone says so: MPS is being asked
            continue
        sticky = [view.state.clients[pid] for pid in server.sticky if pid in view.state.clients]
        due = server.fault_since + view.policy.hang_fault
        if sticky:
            clear.pop(server.pid, None)
            if now < due:
                wakes.append(due)
            else:
                reason = f"it has not ended after the fault of server {server.pid}"
                requests += [EndClient.of(c, reason, RULE, "timeouts", hook=False, signals_only=True) for c in sticky]
            continue
        since = clear.setdefault(server.pid, now)
        # whose error it is the log has not said, or they are on another GPU
        if view.state.working_on(server) or not view.synced:
            since = max(since, due)
        if now < since + FORCE_AFTER:
            wakes.append(since + FORCE_AFTER)
        elif server.pid not in asked:
            asked |= {server.pid}
            reason = f"server {server.pid} is still in FAULT, though its clients with a sticky error have gone: ask MPS"
            todo.append(act.Reconcile(servers=(server.pid,), reason=reason, rule=RULE))
            wakes.append(now + FORCE_AFTER)
        elif now < (at := force_at.get(server.pid, since + 2 * FORCE_AFTER)):
            wakes.append(at)
        elif server.pid not in force_at or view.policy.enforce:  # a step that is only reported is reported once
            force_at[server.pid] = now + FORCE_AGAIN
            wakes.append(now + FORCE_AGAIN)
            todo.append(_force(view, server))
    return Decision(Memory(clear, asked, force_at), tuple(todo), tuple(requests), wake=min(wakes, default=None))


def _force(view: View, server: Server) -> act.ShutdownServer:
    left = [str(pid) for pid in server.sticky]
    others = f" (MPS lists some that the gate has not seen: {', '.join(left)})" if left else ""
    reason = f"server {server.pid} does not leave FAULT, though its clients with a sticky error have gone{others}"
    return act.ShutdownServer(server=server.pid, force=True, reason=reason, rule=RULE, enforce=view.policy.enforce)


def note(memory: Memory, done: act.Done) -> Memory:
    action = done.action
    if isinstance(action, act.ShutdownServer) and action.server in memory.force_at and not done.ok:
        return replace(memory, force_at={**memory.force_at, action.server: done.at + FORCE_AFTER})
    return memory
