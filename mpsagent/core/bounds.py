"""The bounds of users and jobs in the gate's table: their use, and the clients beyond them that the gate could not
hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from mpsagent.core import memory_use
from mpsagent.core.admission import NEXT, total_places
from mpsagent.core.model import Client, Held
from mpsagent.core.rule import Reason
from mpsagent.core.view import View
from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.mps.units import limit_text
from mpsagent.policy.policy import Rules
from mpsagent.policy.shares import Share
from mpsagent.wire.link import User

NAMED_PIDS = 3
"""Processes that a reason names."""
BOUNDS = "max_contexts", "max_clients", "total"
"""Words of the reasons for which a user waits for the user's own places, not for others' places."""
Surplus = tuple[Client, str, str]
"""A client, why it is beyond its bound, and the key of the bound."""


def surplus(
    name: str, whose: Rules | Share, clients: Iterable[Client], limits: Callable[[Client], Limits | None],
    devices: Sequence[Device],
) -> Iterator[Surplus]:  # fmt: skip
    """Yield the clients that do not fit in addition to earlier ones, by ``max_clients`` and by ``whose`` totals.
    Limits that are not known (None) count in no total, and clients that have made no context nowhere."""
    most, total, count, fitting = whose.max_clients, whose.total(devices), 0, list[Limits]()
    for client in filter(attrgetter("counts"), clients):
        its = limits(client)
        if most is not None and count >= most:
            reason = f"{name} may have {most} client{'s' * (most != 1)} at a time ({whose.place('max_clients')})"
            yield client, reason, whose.key("max_clients")
        elif total is not None and its is not None and not total.fits(fitting, its):
            key = "total_active_threads" if whose.total_memory is None else "total_memory_limit"
            yield client, f"{name} has its total in use ({whose.place(key)})", whose.key(key)
        else:
            count += 1
            fitting += [] if its is None else [its]


class BoundUse(NamedTuple):
    """Use of the server's places. ``contexts``: of each user; ``full``: all places are taken."""

    table: Mapping[int, User]
    contexts: dict[int, int]
    full: Reason | None


def use_of(view: View) -> BoundUse:
    contexts, full = view.contexts(), None
    if view.full:
        most = sorted(contexts.items(), key=lambda one: -one[1])
        whose = [f"{count} context{'s' * (count > 1)} of user {uid}" for uid, count in most[:3]]
        others = [f"{sum(count for _, count in most[3:])} of others"] if most[3:] else []
        full = Reason("full", f"the server is full: {', '.join([*whose, *others])}")
    table = {} if view.sent is None else view.sent[1].users
    return BoundUse(table, contexts, full)


def bound(view: View, uid: int, line: Sequence[Held], use: BoundUse) -> Reason | None:
    """Return the reason for which the gate does not hand over the next connection of a user in the table."""
    user, mine = use.table.get(uid), [one for one in view.state.clients_of_user(uid) if one.counts]
    if user is not None and user.max_contexts is not None and use.contexts.get(uid, 0) >= (most := user.max_contexts):
        text = f"this user may have {most} context{'s' * (most > 1)} on a server at a time"
        place = view.rules(uid).place("max_contexts")
        return Reason("max_contexts", f"{text} ({place}){_only_its_own(uid, mine)}")
    full = use.full
    if full is not None and {one for one, count in use.contexts.items() if count} == {uid}:
        full = full._replace(text=full.text + _only_its_own(uid, mine))
    new = next((one for one in line if _needs_room(view, one)), None)
    if new is None:
        return full or Reason(NEXT.word, "a further CUDA context of a client is next")
    first = f"process {new.peer.pid} has no context yet, and its first one waits: " if new.of_client else ""
    for name, whose, clients in view.bounds(new.peer) if view.rules(uid).enforce else ():
        who, limit = "this user" if isinstance(whose, Rules) else name, whose.max_clients
        if limit is not None and len(clients) >= limit:
            count = "1 process" if limit == 1 else f"{limit} processes"
            text = f"{first}{who} may have {count} at a time ({whose.place('max_clients')})"
            return Reason("max_clients", text + _only_its_own(uid, clients))
        total, more = whose.total(view.state.devices) or Total(), view.limits_of(new.peer)
        used = [memory_use.counted(view.state, client) or view.limits_of(client.peer) for client in clients]
        if not total.fits((), more):
            where = total_places(whose)
            return Reason("total", f"no process of {who} fits in its total ({where}): run mpsagent-cli policy check")
        if not total.fits(used, more):
            text = f"{first}{who}'s total is in use: {_total_text(total, used, more)} ({total_places(whose)})"
            return Reason("total", text + _only_its_own(uid, clients))
    if full is None and line[0].failed is not None:
        return Reason("handover_failed", f"could not be handed over to MPS, and is tried again: {line[0].failed}")
    return full


def _needs_room(view: View, held: Held) -> bool:
    """Return whether a held connection needs room as that of a new process does."""
    client = view.state.clients.get(held.peer.pid) if held.of_client else None
    return not held.of_client or (client is not None and not client.counts)


def _only_its_own(uid: int, clients: Sequence[Client]) -> str:
    """Return what to do if a user's processes wait only for these processes of the same user; else nothing."""
    if not clients or any(one.uid != uid for one in clients):
        return ""
    pids = [str(one.pid) for one in sorted(clients, key=lambda one: (one.since, one.pid))]
    more = f" and {len(pids) - NAMED_PIDS} more" if len(pids) > NAMED_PIDS else ""
    names = f"process{'es' * (len(pids) > 1)} {', '.join(pids[:NAMED_PIDS])}{more}"
    return f"; only this user's own {names} can make room: wait, or run mpsagent-cli terminate {pids[0]}"


def _total_text(total: Total, used: Sequence[Limits], more: Limits) -> str:
    parts = []
    if total.threads is not None:
        needs = total.used([more])
        parts.append(f"{total.used(used):g} of {total.threads:g} % of threads, the next process needs {needs:g}")
        if needs > more.threads:
            parts[-1] += f" (its limit is {more.threads:g}, but MPS gives no process less)"
    for device, most in sorted(total.memory.items()):
        has_bytes = sum(one.memory.get(device, 0) for one in used)
        has_text, its = (limit_text(size) if size else "0" for size in (has_bytes, more.memory.get(device, 0)))
        parts.append(f"{has_text} of {limit_text(most)} on device {device}, the next process needs {its}")
    return "; ".join(parts)
