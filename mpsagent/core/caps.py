"""The bounds of a user's clients in addition to their limits: how long they run, how idle they are while other users
wait, and the end of a client that MPS does not hold to its limits. The gate bounds the number of clients (see
:mod:`mpsagent.core.admission`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.bounds import BOUNDS, Surplus, bound, surplus, use_of
from mpsagent.core.full_server import kept_out
from mpsagent.core.inputs import Lifts
from mpsagent.core.model import Client, Over
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import duration_text, limit_text
from mpsagent.policy.policy import Rules

NEARLY_FULL = 0.8
ALL = 100.0
"""Percent: no thread limit, so nothing that could be passed."""
PATIENCE = 10.0
"""Seconds in sum for which a client may be beyond its limits before it is ended for that."""
VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


@dataclass(frozen=True, slots=True)
class Memory:
    """``warned``: servers whose clients came near the most that a server takes (48 since Volta; recording 02);
    ``beyond``: clients that were reported as beyond their limits, and by which means; ``lifting``: processes
    whose environment was reported."""

    warned: frozenset[int] = frozenset()
    beyond: frozenset[tuple[int, str]] = frozenset()
    lifting: frozenset[int] = frozenset()


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    wakes: list[float] = []
    warned = memory.warned & view.state.servers.keys()
    for server in view.state.servers.values():
        without = {client.pid for client in view.state.clients.values() if not client.counts}
        taken = sum(one.places for pid, one in server.attached.items() if pid not in without)
        full = taken >= NEARLY_FULL * server.max_clients
        if full and server.pid not in warned:
            reason = f"server {server.pid} has {taken} of at most {server.max_clients} contexts"
            todo.append(act.Report(kind="clients.nearly_full", reason=reason, rule="built-in", server=server.pid))
        warned = warned | {server.pid} if full else warned - {server.pid}
    told = frozenset(one for one in memory.beyond if one[0] in view.state.clients)
    for client, means, reason in beyond(view):
        if (client.pid, means) not in told:
            told |= {(client.pid, means)}
            rule = view.rules(client.uid).origin("on_limit_exceeded").key
            todo.append(act.Report(kind="client.unlimited", reason=reason, rule=rule, uid=client.uid, pid=client.pid))
    lifting = memory.lifting & view.state.lifts.keys()
    for pid in view.state.lifts.keys() - lifting:
        uid, words = lifted(view, pid)
        lifting |= set() if uid is None else {pid}
        if words:
            reason = (
                f"process {pid} of user {uid}: {words}; mpsagent-cli env prints an environment that keeps the limits"
            )
            todo.append(act.Report(kind="client.environment", reason=reason, rule="built-in", uid=uid, pid=pid))
    of_users: dict[int, list[Client]] = {uid: [] for uid in filter(view.identified, view.state.users())}
    for client in view.state.clients.values():
        if client.uid in of_users:
            of_users[client.uid].append(client)
    for uid, clients in of_users.items():
        ends, at = _over(view, uid, tuple(clients), now)
        wakes += at
        requests += [EndClient.of(client, reason, rule, "limits") for client, reason, rule in ends]
    out = kept_out(view)
    if out is not None and out.client is not None and out.due is not None:
        if now >= out.due:
            rule = view.rules(out.client.uid).origin("turn.time_limit").key
            reason = f"user {out.client.uid} has most places of a full server, and user {out.uid} has waited for one"
            requests.append(EndClient.of(out.client, reason, rule, "turn"))
        else:
            wakes.append(out.due)
    fresh = Memory(warned, told, lifting)
    return Decision(fresh, tuple(todo), tuple(requests), wake=min(wakes, default=None))


def beyond(view: View) -> list[tuple[Client, str, str]]:
    """Clients that are beyond their limits now, each with the limit and what it does."""
    state, found = view.state, list[tuple[Client, str, str]]()
    for pid in sorted(state.over.keys() | (state.lifts.keys() & state.clients.keys())):
        client, one, lifts = state.clients[pid], state.over.get(pid), state.lifts.get(pid, Lifts())
        if not view.identified(client.uid):
            continue
        if one is not None and one.now:
            found.append((client, "memory", _uses(client, one, lifts)))
        if lifts.threads and client.limits is not None and client.limits.threads < ALL:
            found.append((client, "threads", _passing(client)))
    return found


def _uses(client: Client, one: Over, lifts: Lifts) -> str:
    who, used, given = f"client {client.pid} of user {client.uid}", limit_text(one.used), limit_text(one.limit)
    has = f"{who} uses {used} on device {one.device}, and was given {given}"
    return has if lifts.memory is None else f"{has}: its environment has {VARIABLE}={lifts.memory}"


def _passing(client: Client) -> str:
    may = f"client {client.pid} of user {client.uid} may use all multiprocessors, whatever its thread limit"
    return f"{may}: its environment asks for partitioning by context"


def lifted(view: View, pid: int) -> tuple[int | None, str]:
    """The user of a process that is held or was let in, and which of its limits its environment takes away, in words;
    empty for none. :func:`beyond` names clients with partitioning by context."""
    state, lifts, client = view.state, view.state.lifts[pid], view.state.clients.get(pid)
    peer = client.peer if client is not None else next((one.peer for one in state.held.of((pid, lifts.start))), None)
    if peer is None or not view.identified(peer.uid):
        return None, ""
    limits = view.limits_of(peer) if client is None else client.limits
    if limits is None:
        return peer.uid, ""
    if lifts.memory is not None and limits.memory:
        return peer.uid, f"its environment may take its memory limit away ({VARIABLE}={lifts.memory})"
    if client is None and lifts.threads and limits.threads < ALL:
        return peer.uid, "its environment asks for partitioning by context, which takes its thread limit away"
    return peer.uid, ""


def _over(
    view: View, uid: int, clients: tuple[Client, ...], now: float
) -> tuple[list[tuple[Client, str, str]], list[float]]:
    """Clients to end, each with reason and rule, and when the next one is due."""
    rules = view.rules(uid)
    ends: list[tuple[Client, str, str]] = []
    wakes: list[float] = []
    if not rules.enforce:
        ends += _would_be_held(view, rules, uid, clients)
    rule = rules.origin("on_limit_exceeded").key
    for client in [one for one in clients if one.pid in view.state.lifts or one.pid in view.state.over]:
        lifts, one = view.state.lifts.get(client.pid, Lifts()), view.state.over.get(client.pid)
        if rules.over_limits != "report" and one is not None and one.now and one.seconds >= PATIENCE:
            ends.append((client, _uses(client, one, lifts), rule))
        limits = client.limits if rules.enforce else rules.limits(view.state.devices)
        limited = limits is not None and limits.threads < ALL
        if rules.over_limits == "terminate" and lifts.threads and limited:
            if now >= client.since + PATIENCE:
                ends.append((client, _passing(client), rule))
            else:
                wakes.append(client.since + PATIENCE)
    if rules.max_runtime is not None:
        rule = rules.origin("max_runtime").key
        for client in clients:
            if view.state.waits_for_context(client):
                continue  # it cannot work
            since = client.since if client.counted is None else client.counted
            due = since + rules.max_runtime
            if now >= due:
                ends.append((client, f"client {client.pid} has run {duration_text(now - since)}", rule))
            else:
                wakes.append(due)
    if rules.idle_timeout is None or view.state.drain is not None:  # in a drain it would make room for no one
        return ends, wakes
    frozen = any(client.frozen is not None for client in clients)  # then it holds nothing
    if clients and not frozen and _place_wanted(view, uid):
        idle = [_idle(view, client, by_gpu=rules.idle_by == "gpu") for client in clients]
        known = [seconds for seconds in idle if seconds is not None]
        # each of them idle: the user holds the GPU for nothing
        if len(known) == len(idle) and min(known) >= rules.idle_timeout:
            rule = rules.origin("idle_timeout").key
            text = f"user {uid} holds the GPU with idle clients ({duration_text(min(known))}) while others wait"
            ends += [(client, text, rule) for client in clients]
    return ends, wakes


def _place_wanted(view: View, uid: int) -> bool:
    """Return whether another user waits for a place that the clients of this user hold, and for nothing else."""
    if (view.elsewhere or view.outgoing) and view.policy.sharing == "per-user":  # each user has its own control daemon
        return view.short
    others = [other for other in view.waiting() if other != uid]
    if not view.together or not others:
        return bool(others)
    use = use_of(view)
    bounds = (bound(view, other, view.state.held.line(other), use) for other in others)
    return any(why is None or why.word not in BOUNDS for why in bounds)


def _idle(view: View, client: Client, *, by_gpu: bool) -> float | None:
    """For how many seconds a client was idle at the last look; what it has done since then is not known. None: it was
    at work, or that is not known either."""
    if not by_gpu:
        return view.state.cpu_idle.get(client.pid)
    since, worked = client.use.idle_since, view.state.worked
    return None if since is None or worked is None else worked.at - since


def _would_be_held(view: View, rules: Rules, uid: int, clients: tuple[Client, ...]) -> Iterator[Surplus]:
    """Yield the clients of a user whom the gate would hold or refuse if the policy were enforced for that user."""
    if rules.access == "deny":
        yield from ((client, view.denial(uid), rules.key("access")) for client in clients)
        return
    mine = sorted(clients, key=lambda one: one.since)
    yield from surplus(f"user {uid}", rules, mine, lambda one: _own_limits(view, one), view.state.devices)
    most = view.most_contexts(rules)
    if mine and most is not None and view.contexts()[uid] > most:
        youngest = [one for one in mine if one.counts][-1]
        place = rules.place("max_contexts")
        reason = f"user {uid} may have {most} context{'s' * (most != 1)} at a time ({place})"
        yield youngest, reason, rules.key("max_contexts")
    jobs = {share.job: share for one in mine if (share := view.share(one.peer)) is not None and share.bounds}
    for job, share in jobs.items():
        its = [one for one in view.state.clients.values() if (of := view.share(one.peer)) is not None and of.job == job]
        its.sort(key=lambda one: one.since)
        for late in surplus(share.whose, share, its, lambda one: _own_limits(view, one), view.state.devices):
            if late[0].uid == uid:
                yield late


def _own_limits(view: View, client: Client) -> Limits:
    """Return the limits that a client would have if the policy were enforced."""
    rules, share, devices = view.rules(client.uid), view.share(client.peer), view.state.devices
    return rules.limits(devices) if share is None else rules.limits_within(share, devices)
