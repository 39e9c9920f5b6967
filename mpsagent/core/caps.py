"""What a user's clients may do beside their limits: how long, how idle while other users wait, and whether by their
environment they may pass the thread limit. How many of them there may be is the gate's to keep (see
:mod:`mpsagent.core.admission`)."""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.model import Client
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View
from mpsagent.mps.units import duration_text
from mpsagent.policy.policy import Rules

NEARLY_FULL = 0.8
ALL = 100.0
"""Percent: no thread limit, so nothing that could be passed."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``warned``: servers whose clients came near the most that a server takes (48 since Volta; recording 02);
    ``reported``: clients that would have been ended, were the rule enforced; ``unlimited``: clients of which was said
    that they pass their thread limit."""

    warned: frozenset[int] = frozenset()
    reported: frozenset[int] = frozenset()
    unlimited: frozenset[int] = frozenset()


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    wakes: list[float] = []
    warned = memory.warned & view.state.servers.keys()
    reported = memory.reported & view.state.clients.keys()
    for server in view.state.servers.values():
        full = len(server.attached) >= NEARLY_FULL * server.max_clients
        if full and server.pid not in warned:
            reason = f"server {server.pid} has {len(server.attached)} of at most {server.max_clients} clients"
            todo.append(act.Report(kind="clients.nearly_full", reason=reason, rule="built-in", server=server.pid))
        warned = warned | {server.pid} if full else warned - {server.pid}
    told = memory.unlimited & view.state.clients.keys()
    for client in unlimited(view):
        if client.pid not in told:
            told |= {client.pid}
            rule = view.rules(client.uid).origin("partitioning").key
            reason = _passing(client)
            todo.append(act.Report(kind="client.unlimited", reason=reason, rule=rule, uid=client.uid, pid=client.pid))
    for uid in filter(view.identified, view.state.users()):
        ends, at = _over(view, uid, view.state.clients_of_user(uid), now)
        wakes += at
        for client, reason, rule in ends:
            if view.rules(uid).enforce_limits:
                requests.append(
                    EndClient(
                        pid=client.pid, start=client.peer.start, uid=uid, reason=reason, rule=rule, section="limits",
                        hook=True,
                    )
                )  # fmt: skip
            elif client.pid not in reported:
                reported |= {client.pid}
                reason += "; this is not enforced"
                todo.append(act.Report(kind="client.over", reason=reason, rule=rule, uid=uid, pid=client.pid))
    fresh = Memory(warned, reported, told)
    return Decision(fresh if fresh != memory else memory, tuple(todo), tuple(requests), wake=min(wakes, default=None))


def unlimited(view: View) -> list[Client]:
    """Clients that pass their thread limit, where the policy wants to hear of it."""
    return [
        client for pid in sorted(view.state.unlimited)
        if (client := view.state.clients.get(pid)) is not None and client.limits.threads < ALL
        and view.identified(client.uid) and view.rules(client.uid).partitioning != "allow"
    ]  # fmt: skip


def _passing(client: Client) -> str:
    may = f"client {client.pid} may use all multiprocessors, whatever its thread limit"
    return f"{may}: its environment asks for partitioning by context"


def _over(
    view: View, uid: int, clients: tuple[Client, ...], now: float
) -> tuple[list[tuple[Client, str, str]], list[float]]:
    """Clients to end, each with reason and rule, and when the next one is due."""
    rules = view.rules(uid)
    ends: list[tuple[Client, str, str]] = []
    wakes: list[float] = []
    if not rules.enforce_limits:
        ends += _let_in_all_the_same(rules, uid, clients)
    for client in clients:
        if client.pid in view.state.unlimited and rules.partitioning == "terminate":
            limits = client.limits if rules.enforce_limits else rules.limits(view.state.devices)
            if limits.threads < ALL:
                ends.append((client, _passing(client), rules.origin("partitioning").key))
    if rules.max_runtime is not None:
        rule = rules.origin("max_runtime").key
        for client in clients:
            due = client.since + rules.max_runtime
            if now >= due:
                ends.append((client, f"client {client.pid} has run {duration_text(now - client.since)}", rule))
            else:
                wakes.append(due)
    waiting = view.waiting() if view.state.drain is None else ()  # in a drain it would make room for no one
    frozen = any(client.frozen is not None for client in clients)  # then it holds nothing
    if rules.idle_timeout is not None and clients and not frozen and any(other != uid for other in waiting):
        idle = [view.state.cpu_idle_since.get(c.pid) for c in clients]
        known = [since for since in idle if since is not None]
        if len(known) == len(idle):  # each of them idle: the user holds the GPU for nothing
            due = max(known) + rules.idle_timeout
            rule = rules.origin("idle_timeout").key
            if now >= due:
                idle_for = duration_text(now - max(known))
                text = f"user {uid} holds the GPU with idle clients ({idle_for}) while others wait"
                ends += [(client, text, rule) for client in clients]
            else:
                wakes.append(due)
    return ends, wakes


def _let_in_all_the_same(rules: Rules, uid: int, clients: tuple[Client, ...]) -> list[tuple[Client, str, str]]:
    """Whom the gate would have kept out, were the policy enforced."""
    if rules.access == "deny":
        rule = rules.origin("access").key
        return [(client, f"the policy denies user {uid} MPS", rule) for client in clients]
    most = len(clients) if rules.max_clients is None else rules.max_clients
    rule = rules.origin("max_clients").key
    late = sorted(clients, key=lambda one: one.since)[most:]
    return [(client, f"user {uid} may have {most} client{'s' if most > 1 else ''} at a time", rule) for client in late]


def note(memory: Memory, done: act.Done) -> Memory:
    return memory
