"""Clients that the gate has not seen: they came through another process of a user's (a relay, a sandbox; recording 12,
H1). Once MPS and the kernel have said twice who that is, the gate is told. They count, pause and end as all others do;
the gate could not hold them, so who may not work now is ended: whom the policy denies, who comes in another user's turn
or at another user's own control daemon, and the youngest beyond ``max_clients`` and a total.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mpsagent.core import actions as act
from mpsagent.core.inputs import Seen
from mpsagent.core.model import Client
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
    """``told``: the gate has been told of all that were seen until then; ``beyond``: since when a client is too
    many."""

    told: float = float("-inf")
    beyond: Mapping[int, float] = field(default_factory=dict)


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    fresh = _confirmed(view, memory.told)
    count = tuple(
        act.TellGate(
            message=Found(pid, one.uid, one.start, _limits(view, one.uid), view.name),
            reason=f"MPS lists process {pid}, which the gate has not seen", rule=RULE,
        )
        for pid, one in fresh.items()
    )  # fmt: skip
    unseen = any(one.unseen for one in view.state.clients.values())
    wrong, crowd = (list(_wrong(view)), {each[0].pid: each for each in _crowd(view)}) if unseen else ([], {})
    beyond = {pid: memory.beyond.get(pid, now) for pid in crowd}
    later = [since + BEYOND_FOR for since in beyond.values() if now < since + BEYOND_FOR]
    wrong += [each for pid, each in crowd.items() if now >= beyond[pid] + BEYOND_FOR]
    requests = tuple(
        EndClient.of(one, f"{why}; client {one.pid} came through another process", rule, section)
        for one, why, rule, section in wrong
    )
    memory = Memory(max((one.at for one in fresh.values()), default=memory.told), beyond)
    return Decision(memory, count, requests, wake=min(later, default=None))


def _confirmed(view: View, told: float) -> dict[int, Seen]:
    """Processes that are no clients yet, seen after ``told``."""
    state = view.state
    found = ((pid, server.attached[pid]) for server in state.servers.values() for pid in state.strangers(server))
    return {pid: one.seen for pid, one in found if one.confirmed and one.seen is not None and one.seen.at > told}


def _limits(view: View, uid: int) -> Limits:
    """MPS has set those of the process that it came through: of this user, and one that no server names."""
    carriers = [one for one in view.state.clients.values() if view.state.server_of(one.pid) is None]
    carrier = max(carriers, key=lambda one: (one.uid == uid, one.since), default=None)
    return view.limits(uid).settable() if carrier is None else carrier.limits


def _wrong(view: View) -> Iterator[Wrong]:
    for uid, unseen in _unseen(view):
        rules, turn = view.rules(uid), view.turn
        if rules.access == "deny":
            rule = rules.origin("access").key
            yield from ((one, f"the policy denies user {uid} MPS", rule, "limits") for one in unseen)
        elif view.user not in (None, uid):
            why, rule = f"this control daemon is user {view.user}'s own", view.instance_rule("sharing")
            yield from ((one, why, rule, "switch") for one in unseen)
        elif view.sharing == "turns" and turn is not None and turn.uid != uid and uid not in view.suspended:
            rule = rules.origin("switch.after").key
            late = (one for one in unseen if _came_late(view, one))
            yield from ((one, f"it is the turn of user {turn.uid}", rule, "switch") for one in late)


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
    """Those of a user or a job that do not fit beside the older ones. Who has no context yet takes no room."""
    most, total = whose.max_clients, whose.total(view.state.devices)
    fitting: list[Limits] = []
    for client in sorted(mine, key=lambda one: (one.unseen, one.since, one.pid)):
        if client.pid in view.ending or view.state.server_of(client.pid) is None:
            continue
        crowd = most is not None and len(fitting) >= most
        if client.unseen and crowd:
            s = "" if most == 1 else "s"
            yield client, f"{name} may have {most} client{s} at a time", whose.key("max_clients"), "limits"
        elif client.unseen and total is not None and not total.fits(fitting, client.limits):
            key = "total_threads" if whose.total_memory is None else "total_memory"
            yield client, f"{name} has its total in use", whose.key(key), "limits"
        else:
            fitting.append(client.limits)
