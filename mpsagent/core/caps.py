"""What a user's clients may do beside their limits: how many, how long, and how idle while others wait."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core import ladder
from mpsagent.core.ladder import LadderMemory
from mpsagent.core.model import Client, Server
from mpsagent.core.world import World
from mpsagent.mps.units import duration_text

NEARLY_FULL = 0.8


@dataclass(frozen=True, slots=True)
class CapsMemory:
    warned: frozenset[int] = frozenset()
    """Servers whose clients came near the most that a server takes (48 since Volta; recording 02)."""
    reported: frozenset[int] = frozenset()
    """Clients that would have been ended, were the rule enforced."""


def decide(
    world: World, memory: CapsMemory, ladders: LadderMemory, now: float
) -> tuple[CapsMemory, LadderMemory, list[act.Action], float | None]:
    todo: list[act.Action] = []
    wakes: list[float] = []
    warned = memory.warned & world.state.servers.keys()
    reported = memory.reported & world.state.clients.keys()
    for server in world.state.servers.values():
        clients = world.clients(server)
        full = len(clients) >= NEARLY_FULL * server.max_clients
        if full and server.pid not in warned:
            reason = f"server {server.pid} has {len(clients)} of at most {server.max_clients} clients"
            todo.append(
                act.Report(
                    kind="clients.nearly_full", reason=reason, rule="built-in", uid=server.uid, server=server.pid
                )
            )
        warned = warned | {server.pid} if full else warned - {server.pid}
        if server.uid is None or server.uid == world.parked_uid:
            continue
        ends, at = _over(world, server, clients, now)
        wakes += at
        enforce = world.rules(server.uid).enforce_limits
        for client, reason, rule in ends:
            if enforce:
                ladders = ladder.begin(
                    world,
                    ladders,
                    client.pid,
                    server.uid,
                    server.pid,
                    now,
                    reason=reason,
                    rule=rule,
                    section="limits",
                    hook=True,
                )
            elif client.pid not in reported:
                reported |= {client.pid}
                todo.append(
                    act.Report(
                        kind="client.over", reason=reason, rule=rule, uid=server.uid, server=server.pid, pid=client.pid
                    )
                )
    if (warned, reported) != (memory.warned, memory.reported):
        memory = replace(memory, warned=warned, reported=reported)
    return memory, ladders, todo, min(wakes, default=None)


def _over(
    world: World, server: Server, clients: tuple[Client, ...], now: float
) -> tuple[list[tuple[Client, str, str]], list[float]]:
    """Clients to end, each with reason and rule, and when the next one is due."""
    assert server.uid is not None
    rules = world.rules(server.uid)
    ends: list[tuple[Client, str, str]] = []
    wakes: list[float] = []
    if rules.max_clients is not None and len(clients) > rules.max_clients:
        rule = rules.origin("max_clients").key
        for client in sorted(clients, key=lambda c: (c.since, c.pid))[rules.max_clients :]:
            ends.append((client, f"user {server.uid} has more than {rules.max_clients} clients", rule))
    if rules.max_runtime is not None:
        rule = rules.origin("max_runtime").key
        for client in clients:
            due = client.since + rules.max_runtime
            if now >= due:
                ends.append((client, f"client {client.pid} has run {duration_text(now - client.since)}", rule))
            else:
                wakes.append(due)
    if rules.idle_timeout is not None and clients and world.others_waiting(server):
        idle = [p.cpu_idle_since for c in clients if (p := world.processes.get(c.pid)) is not None]
        known = [since for since in idle if since is not None]
        if len(known) == len(idle) and known:  # each of them idle: the user holds the GPU for nothing
            due = max(known) + rules.idle_timeout
            rule = rules.origin("idle_timeout").key
            if now >= due:
                idle_for = duration_text(now - max(known))
                text = f"user {server.uid} holds the GPU with idle clients ({idle_for}) while others wait"
                ends += [(client, text, rule) for client in clients]
            else:
                wakes.append(due)
    return ends, wakes
