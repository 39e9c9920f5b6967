"""FAULT ends by itself: who has a sticky error gets ``hang.fault`` to leave, then is signalled.

A server in FAULT refuses all new clients on every GPU it serves until every client that it listed has exited; one that
ignores its error blocks the GPU without end (recording 02, R4). All listed clients are alike: the log often names the
wrong culprit (recording 03, Q3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core import ladder
from mpsagent.core.ladder import LadderMemory
from mpsagent.core.model import Server, Status
from mpsagent.core.world import World

RULE = "hang.fault"
FORCE_AFTER = 2.0
"""Seconds after the last sticky client's end until a server that is still in FAULT is shut down by force. Recovery took
60 ms (recording 02, R4)."""
FORCE_AGAIN = 30.0


@dataclass(frozen=True, slots=True)
class FaultsMemory:
    """By server: since when it is in a fault that has been reported, when nobody sticky was left, whether it was asked,
    and when it may be forced (again). ``starts``: by client with a sticky error, the start time of its process."""

    seen: Mapping[int, float] = field(default_factory=dict)
    clear_since: Mapping[int, float] = field(default_factory=dict)
    asked: frozenset[int] = frozenset()
    force_at: Mapping[int, float] = field(default_factory=dict)
    starts: Mapping[int, int] = field(default_factory=dict)


def decide(
    world: World, memory: FaultsMemory, ladders: LadderMemory, now: float
) -> tuple[FaultsMemory, LadderMemory, list[act.Action], float | None]:
    todo: list[act.Action] = []
    wakes: list[float] = []
    seen, clear = dict(memory.seen), dict(memory.clear_since)
    asked, force_at = memory.asked, dict(memory.force_at)
    listed = {pid for server in world.state.servers.values() for pid in server.sticky}
    starts = {pid: start for pid, start in memory.starts.items() if pid in listed}
    for pid in list(seen):
        server = world.state.servers.get(pid)
        if server is None or server.status is not Status.FAULT:
            todo.append(_over(pid, server))
            del seen[pid]
            clear.pop(pid, None)
            force_at.pop(pid, None)
            asked = asked - {pid}
    for server in world.state.servers.values():
        if server.status is not Status.FAULT or server.fault_since is None:
            continue
        if server.pid not in seen:
            seen[server.pid] = server.fault_since
            todo.append(_report(server))
        for pid in server.sticky:
            if pid in world.processes:
                starts.setdefault(pid, world.processes[pid].start)
        sticky = [p for p in server.sticky if p in world.processes and world.processes[p].start == starts[p]]
        due = server.fault_since + world.policy.hang_fault
        if sticky:
            clear.pop(server.pid, None)
            if now < due:
                wakes.append(due)
                continue
            ladders = _signal(world, ladders, server, sticky, starts, now)
            continue
        since = clear.setdefault(server.pid, now)
        if now < since + FORCE_AFTER:
            wakes.append(since + FORCE_AFTER)
        elif server.pid not in asked:
            asked |= {server.pid}
            reason = f"server {server.pid} is still in FAULT though its sticky clients have gone: ask it"
            todo.append(act.Reconcile(servers=(server.pid,), reason=reason, rule=RULE))
            wakes.append(now + FORCE_AFTER)
        elif now < (at := force_at.get(server.pid, since + 2 * FORCE_AFTER)):
            wakes.append(at)
        else:
            force_at[server.pid] = now + FORCE_AGAIN
            wakes.append(now + FORCE_AGAIN)
            reason = f"server {server.pid} does not leave FAULT though its sticky clients have gone"
            enforce = world.policy.enforce_hang
            todo.append(act.ShutdownServer(server=server.pid, force=True, reason=reason, rule=RULE, enforce=enforce))
    new = FaultsMemory(seen, clear, asked, force_at, starts)
    return new, ladders, todo, min(wakes, default=None)


def _signal(
    world: World, ladders: LadderMemory, server: Server, sticky: list[int], starts: Mapping[int, int], now: float
) -> LadderMemory:
    if not world.policy.enforce_hang:
        return ladders
    for pid in sticky:
        client = world.state.clients.get(pid)
        uid = client.uid if client is not None and client.uid is not None else server.uid
        if uid is None or not world.rules(uid).enforce_hang:
            continue
        ladders = ladder.begin(
            world, ladders, pid, uid, server.pid, now,
            reason=f"server {server.pid} is in FAULT and client {pid} ignores its error", rule=RULE, section="hang",
            start=starts[pid], signals_only=True,
        )  # fmt: skip
    return ladders


def _report(server: Server) -> act.Report:
    listed = ", ".join(str(pid) for pid in server.sticky) or "none listed"
    reason = f"server {server.pid} of user {server.uid} is in FAULT and refuses new clients; sticky: {listed}"
    return act.Report(kind="fault", reason=reason, rule=RULE, uid=server.uid, server=server.pid)


def _over(pid: int, server: Server | None) -> act.Report:
    how = "is ACTIVE again" if server is not None and server.status is Status.ACTIVE else "has ended"
    return act.Report(kind="fault.over", reason=f"server {pid} {how} after its fault", rule=RULE, server=pid)


def note(memory: FaultsMemory, outcome: act.Outcome) -> FaultsMemory:
    action = outcome.action
    if isinstance(action, act.ShutdownServer) and action.server in memory.force_at and not outcome.ok:
        return replace(memory, force_at={**memory.force_at, action.server: outcome.at + FORCE_AFTER})
    return memory
