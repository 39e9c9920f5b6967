"""Clients that the gate has not seen: they came through another process of a user's (a relay, a sandbox; recording 12,
H1). Once MPS and the kernel have said twice who that is, the gate is told. They count, pause and end as all others do;
the gate could not hold them, so who may not work now is ended: whom the policy denies, who comes in another user's turn
or at another user's own control daemon, and the youngest beyond ``max_clients`` and a total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.bounds import surplus
from mpsagent.core.inputs import Seen
from mpsagent.core.model import LOGS_EARLY, Client
from mpsagent.core.rule import Decision, EndClient, Section
from mpsagent.core.view import View
from mpsagent.mps.limits import Limits
from mpsagent.policy.policy import Rules
from mpsagent.policy.shares import Share
from mpsagent.wire.link import Found

Wrong = tuple[Client, str, str, Section]
"""Why it may not work now, and by which rule."""


BEYOND_FOR = 1.0
"""Seconds for which a user has had too many before one is ended: the gate gives a place on in the moment in which its
process ends, and the agent may hear of who got it before it hears of that end."""
RULE = "a client that MPS lists and the gate has not seen counts, too"


@dataclass(frozen=True, slots=True)
class Memory:
    """``told``: all clients that were seen until then have been reported to the gate; ``beyond``: since when a client
    is too many; ``gate``: the gate (pid and time of the link) to which ``clients`` (pid and start time) were reported,
    which it had not named."""

    told: float = float("-inf")
    beyond: Mapping[int, float] = field(default_factory=dict)
    gate: tuple[int, float] | None = None
    clients: frozenset[tuple[int, int]] = frozenset()


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    fresh = _confirmed(view, memory.told)
    count = [
        act.TellGate(
            message=_found(view, pid, one, since),
            reason=f"MPS lists process {pid}, which the gate has not seen",
            rule=RULE,
        )
        for pid, (one, since) in fresh.items()
    ]
    memory = _gate_of(view, memory)
    unnamed = _unnamed(view, memory)
    count += [
        act.TellGate(
            message=_known_client(view, one), rule=RULE,
            reason=f"process {one.pid} of user {one.uid} is a client, and the gate has not said so",
        )
        for one in unnamed
    ]  # fmt: skip
    unseen = any(one.unseen for one in view.state.clients.values())
    wrong, crowd = (list(_wrong(view)), {each[0].pid: each for each in _crowd(view)}) if unseen else ([], {})
    beyond = {pid: memory.beyond.get(pid, now) for pid in crowd}
    later = [since + BEYOND_FOR for since in beyond.values() if now < since + BEYOND_FOR]
    wrong += [each for pid, each in crowd.items() if now >= beyond[pid] + BEYOND_FOR]
    requests = tuple(
        EndClient.of(one, f"{why}; client {one.pid} came through another process", rule, section)
        for one, why, rule, section in wrong
    )
    memory = replace(
        memory, told=max((one.at for one, _ in fresh.values()), default=memory.told), beyond=beyond,
        clients=memory.clients | {(one.pid, one.peer.start) for one in unnamed},
    )  # fmt: skip
    return Decision(memory, tuple(count), requests, wake=min(later, default=None))


def note(memory: Memory, done: act.Done) -> Memory:
    """Forget a message that the gate did not read, so that it is sent again."""
    if done.ok or not isinstance(done.action, act.TellGate) or not isinstance(done.action.message, Found):
        return memory
    return replace(memory, clients=memory.clients - {(done.action.message.pid, done.action.message.start)})


def _gate_of(view: View, memory: Memory) -> Memory:
    """Return the memory for the present gate: another gate, or another link, gets everything again."""
    gate = view.state.gate
    told = None if gate is None else (gate.pid, gate.since)
    return memory if memory.gate == told else replace(memory, gate=told, clients=frozenset())


def _unnamed(view: View, memory: Memory) -> list[Client]:
    """Return the clients that the present gate has not named, though it reported that it has named all: its descriptor
    store was lost, for example because gate and agent were stopped, or mpsagent was removed and installed again."""
    if not view.synced:
        return []
    clients = view.state.clients.values()
    mine = [one for one in clients if one.at_gate is None and one.detached is None]
    return [one for one in mine if (one.pid, one.peer.start) not in memory.clients]


def _known_client(view: View, one: Client) -> Found:
    most = None if one.most_memory is None else Limits(memory=one.most_memory)
    return Found(one.pid, one.uid, one.peer.start, one.limits, view.name, most, one.connections, view.shares)


def _confirmed(view: View, told: float) -> dict[int, tuple[Seen, float]]:
    """Return the processes that are no clients yet and were seen after ``told``, and since when MPS has each."""
    state = view.state
    found = ((pid, server.attached[pid]) for server in state.servers.values() for pid in state.strangers(server))
    mine = [(pid, one) for pid, one in found if one.confirmed]
    return {pid: (one.seen, one.since) for pid, one in mine if one.seen is not None and one.seen.at > told}


def _found(view: View, pid: int, seen: Seen, since: float) -> Found:
    """Return the client with the limits of the process that it came through, as MPS has set them: a process that passed
    the gate before and that no server names, of this user if there is one. If there is none, or several with different
    limits, they are unknown."""
    carriers = [one for one in view.state.clients.values() if view.state.server_of(one.pid) is None]
    carriers = [one for one in carriers if one.since < since + LOGS_EARLY]
    carriers = [one for one in carriers if one.uid == seen.uid] or carriers
    given = [one.limits for one in carriers]
    limits = given[0] if given and all(one == given[0] for one in given) else None
    memory = [one.most_memory for one in carriers]
    most = None if limits is None or any(one != memory[0] for one in memory) else memory[0]
    of_it = None if most is None else Limits(memory=most)
    return Found(pid, seen.uid, seen.start, limits, view.name, of_it, own=view.shares)


def _wrong(view: View) -> Iterator[Wrong]:
    for uid, unseen in _unseen(view):
        rules, turn = view.rules(uid), view.turn
        if rules.access == "deny":
            rule = rules.origin("access").key
            yield from ((one, view.denial(uid), rule, "limits") for one in unseen)
        elif view.user not in (None, uid):
            why, rule = f"this control daemon is user {view.user}'s own", view.instance_rule("sharing")
            yield from ((one, why, rule, "turn") for one in unseen)
        elif view.sharing == "turns" and turn is not None and turn.uid != uid and uid not in view.suspended:
            rule = rules.origin("turn.time_limit").key
            late = (one for one in unseen if _came_late(view, one))
            yield from ((one, f"it is the turn of user {turn.uid}", rule, "turn") for one in late)


def _unseen(view: View) -> Iterator[tuple[int, list[Client]]]:
    for uid in filter(view.identified, view.state.users()):
        found = [one for one in view.state.clients_of_user(uid) if one.unseen and one.detached is None]
        if found:
            yield uid, found


def _came_late(view: View, client: Client) -> bool:
    """Since this gate is there. Who was at work before is taken over as it is."""
    gate, server = view.state.gate, view.state.server_of(client.pid)
    since = client.since if server is None else server.attached[client.pid].since
    return gate is not None and since > gate.since


def _crowd(view: View) -> Iterator[Wrong]:
    several = (bound for _, unseen in _unseen(view) for one in unseen for bound in view.bounds(one.peer))
    for name, (whose, mine) in {name: (whose, mine) for name, whose, mine in several}.items():
        yield from _too_many(view, name, whose, [one for one in mine if one.detached is None])


def _too_many(view: View, name: str, whose: Rules | Share, mine: list[Client]) -> Iterator[Wrong]:
    """Yield clients of a user or a job that do not fit in addition to the older ones. A client without a context takes
    no room. Unknown limits never end a client."""
    there = [one for one in mine if one.pid not in view.ending and view.state.server_of(one.pid) is not None]
    there.sort(key=lambda one: (one.unseen, one.since, one.pid))
    for client, why, rule in surplus(name, whose, there, lambda one: one.limits, view.state.devices):
        if client.unseen:
            yield client, why, rule, "limits"
