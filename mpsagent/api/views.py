"""From the agent's page to the JSON of the API. Pure: time is an argument, and nothing changes what it is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import mpsagent
from mpsagent.api import shapes
from mpsagent.core import pause_room
from mpsagent.core.model import Client, Held, Server, Use
from mpsagent.core.outside import Outsider
from mpsagent.core.sessions import Session, with_use
from mpsagent.core.view import SHARED_UID, View
from mpsagent.core.words import Names, named
from mpsagent.mps.gpus import GpusSeen
from mpsagent.mps.limits import Device, Limits
from mpsagent.mps.units import iso
from mpsagent.policy import apart
from mpsagent.policy.containers import container
from mpsagent.policy.sharing import exclusive
from mpsagent.snapshot.condition import Condition, problems
from mpsagent.snapshot.page import InstancePage, Page

Json = dict[str, Any]
STATUS_USERS = 100
"""Waiting users that the status names; the queue has all."""
LISTS = ("devices", "servers", "users", "waiting", "outside", "not_guaranteed")
SUMS = ("clients", "waiting_users", "waiting_processes", "outside_processes", "unknown_lines", "foreign_lines")
_Plan = tuple[
    Json, Sequence[tuple[int, Sequence[str], Callable[[Any], Any]]], Sequence[tuple[str, Callable[[Any], Any]]]
]


def row(shape: type, *of: object, names: Names | None = None, **given: Any) -> Json:
    """A shape's fields: what is given, else what the first of these objects that has it says; what none of them has is
    null or left out, as the shape allows. A ``user`` is the name of the ``uid``."""
    nothing, objects, written = _plan(shape, tuple(given), tuple(map(type, of)))
    found = nothing.copy()
    for at, fields, values in objects:
        found.update(zip(fields, values(of[at]), strict=False))
    found.update(given)
    if names is not None and found["uid"] is not None:
        found["user"] = names(found["uid"])
    for name, write in written:
        if (value := found[name]) is not None:
            found[name] = write(value)
    return found


@cache
def _plan(shape: type, given: Sequence[str], of: Sequence[type]) -> _Plan:
    """All fields as nulls, in order; by object what it has of them; and how some are written."""
    nothing: Json = {}
    sources: dict[int, list[str]] = {}
    written = []
    for name, annotation in shape.__annotations__.items():
        kind = str(getattr(annotation, "__forward_arg__", annotation))
        has = (at for at, one in enumerate(of) if hasattr(one, name) or name in getattr(one, "__annotations__", ()))
        at = None if name in given else next(has, None)
        if at is not None:
            sources.setdefault(at, []).append(name)
        elif name not in given and kind.startswith("NotRequired"):
            continue
        elif name not in given and "None" not in kind:
            raise AttributeError(f"{shape.__name__}.{name}: nothing has it")
        nothing[name] = None
        writes: dict[str, Callable[[Any], Any]] = {"Time": when, "Limits": Limits.as_json, "list": list}
        written += [(name, write) for word, write in writes.items() if kind.startswith(word)]
    objects = [(at, fields, attrgetter(*fields, "__class__")) for at, fields in sources.items()]
    return nothing, objects, written


def when(at: float | None) -> str | None:
    return None if at is None else iso(at)


def span(start: float, end: float) -> float:
    """Seconds from start to end, never negative (clocks are set back)."""
    return round(max(0.0, end - start), 3)


# --- servers ----------------------------------------------------------------------------------------------------------


def servers(one: InstancePage, names: Names) -> Iterator[Json]:
    for server in sorted(one.view.state.servers.values(), key=lambda s: (s.started, s.pid)):
        yield _server(one, server, names)


def _server(one: InstancePage, server: Server, names: Names) -> Json:
    view, shared = one.view, server.uid == SHARED_UID and one.view.shared
    passed = sum(1 for pid in server.attached if pid in view.state.clients)
    return row(
        shapes.ServerShape, server, names=lambda uid: None if shared else names(uid), shared=shared,
        wanted=None if server.uid is None or shared else view.limits(server.uid),
        verified=one.checked.get(server.pid), clients=passed, unknown_clients=len(server.attached) - passed,
    )  # fmt: skip


def _holder(view: View) -> Server | None:
    """The server of the user whose turn it is."""
    if view.turn is None:
        return None
    state = view.state
    mine = {client.pid for client in state.clients_of_user(view.turn.uid)}
    found = [one for one in state.servers.values() if one.uid == view.turn.uid or not mine.isdisjoint(one.attached)]
    return max(found, key=lambda one: one.started, default=None)


# --- clients and who waits --------------------------------------------------------------------------------------------


def clients(one: InstancePage, names: Names, now: float) -> Iterator[Json]:
    """Processes that passed the gate, by age, then those that are held there, in order of arrival."""
    state = one.view.state
    serving = {pid: server for server in sorted(state.servers.values(), key=lambda s: s.started)
               for pid in server.attached}  # fmt: skip
    for client in sorted(state.clients.values(), key=lambda c: (c.since, c.pid)):
        yield _client(one, client, serving.get(client.pid), names, now)
    seen: set[tuple[int, int]] = {(c.pid, c.peer.start) for c in state.clients.values()}
    for held in sorted((*state.held.values(), *one.view.never()), key=lambda h: (h.since, h.connection)):
        key = (held.peer.pid, held.peer.start)
        if key not in seen:
            seen.add(key)
            yield _process(
                held, names, now, state="waiting", waited=span(held.since, now), contexts=0, devices=[], unseen=False,
                shared=False, fail_safe=False,
            )  # fmt: skip


def _client(of: InstancePage, one: Client, serving: Server | None, names: Names, now: float) -> Json:
    attachment = None if serving is None else serving.attached[one.pid]
    word, ending = "running", of.view.ending.get(one.pid)
    if ending is not None:
        word = "ending"
    elif one.frozen is not None:
        word = "paused"
    elif serving is not None and one.pid in serving.sticky:
        word = "sticky"
    elif serving is None:
        word = "starting" if one.detached is None else "detached"
    return _process(
        one, names, now, state=word, why=None if ending is None else named(ending.reason, names),
        server=None if serving is None else serving.pid, waited=round(one.waited, 3), paused=one.frozen,
        memory=of.memory.get(one.pid), utilization=one.use.utilization, shared=one.use.shared,
        contexts=0 if attachment is None else len([c for c in attachment.contexts if c]),
        devices=[] if attachment is None else sorted(attachment.devices),
    )  # fmt: skip


def _process(one: Client | Held, names: Names, now: float, **more: Any) -> Json:
    peer = one.peer
    there = container(peer.cgroup)
    return row(
        shapes.ClientShape, peer, one, names=names, command=peer.command or None, seconds=span(one.since, now),
        container=None if there is None else row(shapes.ContainerShape, there), **more,
    )  # fmt: skip


def queue(one: InstancePage, names: Names, now: float) -> Iterator[Json]:
    """Users who wait, in the order in which they are served."""
    for position, who in enumerate(one.waiting, 1):
        yield row(
            shapes.WaitingShape, who, names=names, position=position, clients=who.pids, seconds=span(who.since, now),
            reason=who.why.word, why=named(who.why.text, names), until=who.why.until,
            turn_seconds=None if who.turn is None else span(now, who.turn),
        )  # fmt: skip


def numbered(rows: Iterable[Json]) -> Iterator[Json]:
    """An instance has one queue, also where each user has a lane."""
    return ({**row, "position": position} for position, row in enumerate(rows, 1))


def turn(view: View, memory: Mapping[int, int], names: Names, now: float) -> Json | None:
    """``memory``: bytes of device memory by pid, of those that are known."""
    one = view.turn
    if one is None:
        return None
    mine = view.state.clients_of_user(one.uid)
    used = [memory[client.pid] for client in mine if client.pid in memory]
    rules = view.rules(one.uid)
    return row(
        shapes.TurnShape, one, names=names, seconds=span(one.since, now), processes=len(mine),
        memory=sum(used) if used else None, limits=_each(mine, view.limits(one.uid)),
        ends_in=None if one.ends is None else span(now, one.ends),
        time_limit=rules.switch_after if pause_room.has_to_leave(view, one.uid) else None,
        pause_slice=rules.switch_slice if view.may_pause(one.uid) else None, grace=rules.switch_grace,
        on_expiry=rules.switch_action,
    )  # fmt: skip


def _each(clients: Sequence[Client], now: Limits) -> Limits | None:
    """What each client of a user was let in with, None where that differs; without any, what it would be now."""
    given = [one.limits for one in clients] or [now]
    return given[0] if all(one == given[0] for one in given) else None


def _users(one: InstancePage, names: Names) -> list[Json]:
    """Those with clients, by their first one's age; as many as the status names."""
    found: dict[int, Json] = {}
    for client in sorted(one.view.state.clients.values(), key=lambda c: c.since):
        user = found.get(client.uid)
        if user is None:
            if len(found) >= STATUS_USERS:
                continue
            paused = one.view.suspended.get(client.uid)
            user = row(shapes.UserShape, client, names=names, processes=0, memory=None, paused=paused)
            found[client.uid] = user
        user["processes"] += 1
        used = one.memory.get(client.pid)
        if used is not None:
            user["memory"] = (user["memory"] or 0) + used
    return list(found.values())


# --- GPUs -------------------------------------------------------------------------------------------------------------


def device(one: Device, seen: GpusSeen) -> Json:
    """What CUDA counts, and what NVML said last. A MIG device has its own memory; power, temperature and errors are its
    GPU's."""
    gpu = seen.gpus.get(one.uuid)
    part = None if gpu is None else next((part for part in gpu.parts if part.uuid == one.uuid), None)
    uuid = (gpu.uuid if gpu is not None else None) or one.uuid
    xids = [row(shapes.XidShape, xid) for xid in seen.xids.get(uuid, ())]
    return row(
        shapes.DeviceShape, one, gpu, compute_mode=getattr(gpu, "mode", None),
        memory_used=getattr(part or gpu, "used", None), xids=xids, xids_seen=seen.counts.get(uuid, 0),
        seen=None if gpu is None else seen.at,
    )  # fmt: skip


def _outside(one: Outsider, names: Names) -> Json:
    return row(
        shapes.OutsideShape, one, one.seen, one.facts, names=names, command=one.facts.command or None,
        ends=None if one.ending is None else one.ending.due,
    )  # fmt: skip


# --- one page ---------------------------------------------------------------------------------------------------------


class About(NamedTuple):
    """What the api knows besides the agent's page. ``changes``, ``faults``: the last ones, by instance; ``oldest``,
    ``newest``: of what is on record."""

    names: Names = lambda uid: None
    conditions: Sequence[Condition] = ()
    changes: Mapping[str | None, Session] = {}
    faults: Mapping[str | None, Session] = {}
    oldest: int = 0
    newest: int = 0


def status(page: Page, about: About, now: float) -> Json:
    """Everything that matters, on one page."""
    pages, parts = dict[str, Json](), list[Json]()
    for one in page.instances:
        if one.view.user is not None:
            continue
        users = {user.name: _page(user, page, about, now) for user in users_of(page, one.name)}
        mine = _page(one, page, about, now)
        pages[one.name] = mine = _with_users(mine, users) if mine["mode"]["sharing"] == "per-user" else mine
        parts.append({
            "name": one.name, "log_directory": one.view.policy.log_directory, "environment": dict(one.environment),
            **mine, "daemons": [_user_daemon(*user) for user in users.items()],
        })  # fmt: skip
    wrong = problems(about.conditions)
    first = next(one.view.policy for one in page.instances if one.name in pages)
    return {
        "agent": row(shapes.AgentShape, page, version=mpsagent.__version__, uptime=span(page.started, now)),
        "health": {"ok": not wrong, "problems": [row(shapes.ConditionShape, one) for one in wrong]},
        "gate": _gate([one.view for one in page.instances]),
        "pipe_directory": first.pipe_directory,
        **(_together(pages) if len(pages) > 1 else pages[parts[0]["name"]]),
        "policy": {
            "digest": first.digest or None, "loaded": when(page.policy_loaded),
            "errors": list(page.policy_errors),
        },
        "history": {"oldest": about.oldest, "newest": about.newest},
        "environment": dict(page.environment),
        "instances": parts,
    }  # fmt: skip


def users_of(page: Page, section: str) -> list[InstancePage]:
    """The instances of its users, where it is apart."""
    users = [one for one in page.instances if one.view.user is not None]
    return [one for one in users if one.view.policy.instance == section]


def _page(one: InstancePage, page: Page, about: About, now: float) -> Json:
    """Of one instance."""
    view, state, names = one.view, one.view.state, about.names
    holds, all_servers, drain = _holder(view), list(servers(one, names)), state.drain
    unconfirmed = view.unconfirmed(now)
    change, fault = _last(about.changes, page, one.name), _last(about.faults, page, one.name)
    before = None if change is None else change.more.get("before")
    sure = [c for c in about.conditions if c.bad == "not sure" and (not c.where or one.name in c.where)]
    return {
        "mode": {
            "sharing": view.sharing, "server": "all" if view.shared else "user", "enforced": view.policy.enforce,
            "why": exclusive(view.policy),
        },
        "devices": [device(each, page.gpus) for each in (state.devices if one.devices_known else ())],
        "control": state.control and row(shapes.ControlShape, state.control, running=state.control.proven),
        "turn": turn(view, one.memory, names, now),
        "holder": None if holds is None else _server(one, holds, names),
        "servers": all_servers,
        "clients": len(state.clients),
        "clients_by_uid": dict(Counter(str(client.uid) for client in state.clients.values())),
        "users": _users(one, names),
        "waiting": list(queue(one._replace(waiting=one.waiting[:STATUS_USERS]), names, now)),
        "waiting_users": len(one.waiting),
        "waiting_processes": sum(each.processes for each in one.waiting),
        "outside": [_outside(each, names) for each in one.outside[:STATUS_USERS]],
        "outside_processes": len(one.outside),
        "last_change": change and row(
            shapes.ChangeShape, change, names=names, at=change.came, uid=change.uid or 0, before=before,
            before_user=None if before is None else names(before), gap=change.more.get("gap"),
        ),
        "last_fault": fault and row(
            shapes.FaultShape, fault, names=names, at=fault.came, server=fault.pid,
            seconds=None if fault.ended is None else round(fault.ended - fault.came, 3),
            recovered=None if fault.ended is None else fault.outcome == "recovered",
        ),
        "limits": {
            "verified": [s["pid"] for s in all_servers if s["verified"] is True],
            "drifted": [s["pid"] for s in all_servers if s["verified"] is False],
            "unconfirmed": [{"uid": uid, "user": names(uid), "why": why} for uid, why in unconfirmed.items()],
            "fail_safe": [client.pid for client in state.clients.values() if client.fail_safe],
        },
        "not_guaranteed": [row(shapes.ConditionShape, each) for each in sure],
        "unknown_lines": state.unknown_lines,
        "foreign_lines": state.foreign_lines,
        "drain": row(
            shapes.DrainShape, drain, draining=drain is not None, deadline=drain and drain.until,
            restart=drain is not None and drain.restart,
            by_user=None if drain is None or drain.by is None else names(drain.by),
        ),
    }  # fmt: skip


def _last(of: Mapping[str | None, Session], page: Page, name: str) -> Session | None:
    """The last one of an instance, or where that is apart, of one of its users'."""
    mine = [one for where, one in of.items()
            if page.single or name in (where or page.first, (apart.split(where or "") or "?")[0])]  # fmt: skip
    return max(mine, key=lambda one: one.came, default=None)


def _gate(views: Sequence[View]) -> Json:
    """One gate serves all instances, each with its table."""
    known, sent = views[0].state.gate, [view.sent[1] for view in views if view.sent is not None]
    return row(
        shapes.GateShape, known, connected=known is not None, synced=known is not None and known.synced,
        handshake=known and views[0].state.known_handshake, open=any(table.open for table in sent),
        admitted=[uid for table in sent for uid in table.users], in_force=all(view.settled for view in views),
    )  # fmt: skip


def _user_daemon(name: str, page: Json) -> Json:
    """The control daemon of a user apart."""
    control, found = page["control"] or {}, apart.split(name)
    return {
        "name": name,
        "uid": None if found is None else found[1],
        "control": control.get("pid"),
        "started": control.get("started"),
        "servers": [one["pid"] for one in page["servers"]],
        "clients": page["clients"],
        "waiting": page["waiting_processes"],
        "draining": page["drain"]["draining"],
    }


def _with_users(page: Json, users: Mapping[str, Json]) -> Json:
    """The page of an instance apart: its users' are part of it."""
    found = _together({"": page, **users}, named=False)
    unsure, found["waiting"] = found["not_guaranteed"], list(numbered(found["waiting"]))
    found["not_guaranteed"] = [one for i, one in enumerate(unsure) if one not in unsure[:i]]
    return {**found, **{name: page[name] for name in ("devices", "last_fault", "drain")}}


def _together(pages: Mapping[str, Json], *, named: bool = True) -> Json:
    """One page of several, whose rows say of which instance they are if these are ``named``. Whose turn it is and how a
    control daemon does is each instance's own: null here."""
    every = list(pages.values())
    found: Json = {**every[0], **dict.fromkeys(("control", "turn", "holder", "last_change", "last_fault"))}
    found |= {key: sum(page[key] for page in every) for key in SUMS}
    for key in LISTS:
        found[key] = [
            {**row, "instance": name} if named else row for name, page in pages.items() for row in page[key]
        ]  # fmt: skip
    by_uid: Counter[str] = Counter()
    for page in every:
        by_uid.update(page["clients_by_uid"])
    found["clients_by_uid"] = dict(by_uid)
    found["limits"] = {key: [one for page in every for one in page["limits"][key]] for key in every[0]["limits"]}
    found["drain"] = next((page["drain"] for page in every if not page["drain"]["draining"]), every[0]["drain"])
    return found


# --- what was ---------------------------------------------------------------------------------------------------------


def session(one: Session, now: float, names: Names, use: Use | None = None) -> Json:
    """See :class:`mpsagent.api.shapes.SessionShape`. ``use``: what is not on record yet."""
    until = now if one.ended is None else one.ended
    more = one.more if use is None else with_use(one.more, use.seconds, use.busy, use.energy, use.shared)
    rest = {name: value for name, value in more.items() if name not in ("counted", "busy")}
    if more.get("counted"):
        rest["utilization"] = round(more["busy"] / more["counted"], 3)
    shown = row(
        shapes.SessionShape, one, names=names, cursor=one.number, pid=one.pid or None, began=one.passed,
        waited=span(one.came, until if one.passed is None else one.passed),
        worked=0.0 if one.passed is None else span(one.passed, until),
        why=None if one.why is None else named(one.why, names),
    )  # fmt: skip
    return shown | rest
