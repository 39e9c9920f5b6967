"""From the state to the JSON of the API. Pure: time is an argument, and nothing changes what it is given.

Lists come as iterators over one state, which never changes: the API writes a long one in slices, with other work in
between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from mpsagent.agent.conditions import Condition, problems
from mpsagent.api import gpus
from mpsagent.core import pause_room
from mpsagent.core.model import Client, Held, Server, State, Use
from mpsagent.core.outside import Outsider
from mpsagent.core.sentences import Names, named
from mpsagent.core.sessions import Session, with_use
from mpsagent.core.view import SHARED_UID, View
from mpsagent.core.waiting import Waiting
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import iso as iso
from mpsagent.policy.containers import container
from mpsagent.system.nvml import GpusSeen

if TYPE_CHECKING:
    from mpsagent.api import shapes, shapes_rows

_NO_NAMES: Mapping[int, str] = {}
_NOT_KNOWN: Mapping[int, int] = {}
_NOT_SUSPENDED: Mapping[int, float] = {}
STATUS_USERS = 100
"""Waiting users that the status names; the queue has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the views need and the engine's view does not have. ``checked``: by server, whether it started with its
    first client's limits. ``devices_known`` False: the state's GPUs are only assumed. ``gpus``: what NVML says of them;
    ``outside``: who computes on them outside MPS.
    ``memory``: of processes, bytes by pid. ``names``: of users who have nothing to do with MPS any more."""

    version: str = ""
    instance: str = ""
    pid: int = 0
    started: float = 0.0
    conditions: tuple[Condition, ...] = ()
    checked: Mapping[int, bool] = field(default_factory=dict)
    devices_known: bool = True
    gpus: GpusSeen = field(default_factory=GpusSeen)
    outside: Sequence[Outsider] = ()
    waiting: Sequence[Waiting] = ()
    memory: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    last_change: Session | None = None
    last_fault: Session | None = None
    policy_loaded: float | None = None
    policy_errors: tuple[str, ...] = ()
    oldest_cursor: int = 0
    newest_cursor: int = 0


def iso_or_none(at: float | None) -> str | None:
    return None if at is None else iso(at)


def name(state: State, uid: int | None, others: Mapping[int, str] = _NO_NAMES) -> str | None:
    known = state.identities.get(uid) if uid is not None else None
    if known is not None:
        return known.name
    return None if uid is None else others.get(uid)


def limits(value: Limits) -> shapes_rows.Limits:
    return cast("shapes_rows.Limits", value.as_json())


# --- servers ----------------------------------------------------------------------------------------------------------


def server(view: View, about: About, one: Server) -> shapes_rows.Server:
    state, shared = view.state, one.uid == SHARED_UID and view.shared
    passed = sum(1 for pid in one.attached if pid in state.clients)
    return {
        "pid": one.pid,
        "uid": one.uid,
        "user": None if shared else name(state, one.uid),
        "shared": shared,
        "status": str(one.status),
        "started": iso(one.started),
        "ready": iso_or_none(one.ready),
        "limits": limits(one.limits),
        "wanted": None if one.uid is None or shared else limits(view.limits(one.uid)),
        "verified": about.checked.get(one.pid),
        "clients": passed,
        "unknown_clients": len(one.attached) - passed,
        "max_clients": one.max_clients,
        "idle_since": iso_or_none(one.idle_since),
        "fault_since": iso_or_none(one.fault_since),
        "sticky": list(one.sticky),
        "forced": one.forced,
    }


def servers(view: View, about: About) -> Iterator[shapes_rows.Server]:
    for one in sorted(view.state.servers.values(), key=lambda s: (s.started, s.pid)):
        yield server(view, about, one)


# --- clients and who waits --------------------------------------------------------------------------------------------


def clients(view: View, now: float, memory: Mapping[int, int] = _NOT_KNOWN) -> Iterator[shapes_rows.Client]:
    """Processes that passed the gate, by age, then those that are held there, in order of arrival. ``memory``: bytes of
    device memory by pid, of those that are known."""
    state = view.state
    serving = {pid: one for one in sorted(state.servers.values(), key=lambda s: s.started) for pid in one.attached}
    for client in sorted(state.clients.values(), key=lambda c: (c.since, c.pid)):
        yield _client(view, client, serving.get(client.pid), now, memory.get(client.pid))
    seen: set[tuple[int, int]] = {(c.pid, c.peer.start) for c in state.clients.values()}
    for held in sorted(state.held.values(), key=lambda h: (h.since, h.connection)):
        key = (held.peer.pid, held.peer.start)
        if key not in seen:
            seen.add(key)
            yield _held(state, held, now)


def _client(view: View, one: Client, serving: Server | None, now: float, memory: int | None) -> shapes_rows.Client:
    peer, state = one.peer, view.state
    attachment = None if serving is None else serving.attached[one.pid]
    word, ending = "running", view.ending.get(one.pid)
    if ending is not None:
        word = "ending"
    elif one.frozen is not None:
        word = "paused"
    elif serving is not None and one.pid in serving.sticky:
        word = "sticky"
    elif serving is None:
        word = "starting" if one.detached is None else "detached"
    return {
        "pid": peer.pid,
        "uid": peer.uid,
        "user": name(state, peer.uid),
        "gid": peer.gid,
        "cgroup": peer.cgroup,
        "container": _container(peer.cgroup),
        "command": peer.command or None,
        "server": None if serving is None else serving.pid,
        "state": word,
        "why": None if ending is None else named(ending.reason, lambda uid: name(state, uid)),
        "since": iso(one.since),
        "seconds": span(one.since, now),
        "waited": round(one.waited, 3),
        "memory": memory,
        "utilization": one.use.utilization,
        "shared": one.use.shared,
        "limits": limits(one.limits),
        "fail_safe": one.fail_safe,
        "unseen": one.unseen,
        "paused": iso_or_none(one.frozen),
        "detached": iso_or_none(one.detached),
        "outcome": str(one.outcome),
        "contexts": 0 if attachment is None else len([c for c in attachment.contexts if c]),
        "devices": [] if attachment is None else sorted(attachment.devices),
    }


def _container(cgroup: str | None) -> shapes_rows.Container | None:
    found = container(cgroup)
    return None if found is None else {"engine": found.engine, "id": found.id, "pod": found.pod}


def _held(state: State, one: Held, now: float) -> shapes_rows.Client:
    peer = one.peer
    return {
        "pid": peer.pid,
        "uid": peer.uid,
        "user": name(state, peer.uid),
        "gid": peer.gid,
        "cgroup": peer.cgroup,
        "container": _container(peer.cgroup),
        "command": peer.command or None,
        "server": None,
        "state": "waiting",
        "why": None,
        "since": iso(one.since),
        "seconds": span(one.since, now),
        "waited": span(one.since, now),
        "memory": None,
        "utilization": None,
        "shared": False,
        "limits": None,
        "fail_safe": False,
        "unseen": False,
        "paused": None,
        "detached": None,
        "outcome": None,
        "contexts": 0,
        "devices": [],
    }


def queue(state: State, waiting: Sequence[Waiting], now: float) -> Iterator[shapes_rows.Waiting]:
    """Users who wait, in the order in which they are served."""
    for position, one in enumerate(waiting, 1):
        yield {
            "position": position,
            "uid": one.uid,
            "user": name(state, one.uid),
            "processes": one.processes,
            "clients": list(one.pids),
            "since": iso(one.since),
            "seconds": span(one.since, now),
            "reason": one.why.word,
            "why": named(one.why.text, lambda uid: name(state, uid)),
            "until": iso_or_none(one.why.until),
            "turn": iso_or_none(one.turn),
            "turn_seconds": None if one.turn is None else span(now, one.turn),
        }


# --- one page ---------------------------------------------------------------------------------------------------------


def turn(view: View, now: float, memory: Mapping[int, int] = _NOT_KNOWN) -> shapes_rows.Turn | None:
    one = view.turn
    if one is None:
        return None
    mine = view.state.clients_of_user(one.uid)
    used = [memory[client.pid] for client in mine if client.pid in memory]
    rules = view.rules(one.uid)
    has_to = pause_room.has_to_leave(view, one.uid)
    return {
        "uid": one.uid,
        "user": name(view.state, one.uid),
        "since": iso(one.since),
        "seconds": span(one.since, now),
        "processes": len(mine),
        "memory": sum(used) if used else None,
        "limits": _each(mine, view.limits(one.uid)),
        "contested": iso_or_none(one.contested),
        "warned": iso_or_none(one.warned),
        "ends": iso_or_none(one.ends),
        "ends_in": None if one.ends is None else span(now, one.ends),
        "after": rules.switch_after if has_to else None,
        "slice": rules.switch_slice if view.may_pause(one.uid) else None,
        "grace": rules.switch_grace,
        "action": rules.switch_action,
        "ending": iso_or_none(one.ending),
    }


def _each(clients: Sequence[Client], now: Limits) -> shapes_rows.Limits | None:
    """What each client of a user was let in with, None where that differs; without any, what it would be now."""
    given = [one.limits for one in clients] or [now]
    return limits(given[0]) if all(one == given[0] for one in given) else None


def users(state: State, about: About, suspended: Mapping[int, float] = _NOT_SUSPENDED) -> list[shapes_rows.User]:
    """Those with clients, by their first one's age; as many as the status names."""
    found: dict[int, shapes_rows.User] = {}
    for client in sorted(state.clients.values(), key=lambda c: c.since):
        one = found.get(client.uid)
        if one is None:
            if len(found) >= STATUS_USERS:
                continue
            one = found[client.uid] = {
                "uid": client.uid, "user": name(state, client.uid), "since": iso(client.since), "processes": 0,
                "memory": None, "paused": iso_or_none(suspended.get(client.uid)),
            }  # fmt: skip
        one["processes"] += 1
        used = about.memory.get(client.pid)
        if used is not None:
            one["memory"] = (one["memory"] or 0) + used
    return list(found.values())


def holder(view: View) -> Server | None:
    """The server of the user whose turn it is."""
    if view.turn is None:
        return None
    state = view.state
    mine = {client.pid for client in state.clients_of_user(view.turn.uid)}
    found = [one for one in state.servers.values() if one.uid == view.turn.uid or not mine.isdisjoint(one.attached)]
    return max(found, key=lambda one: one.started, default=None)


def gate(view: View) -> shapes.Gate:
    known, sent = view.state.gate, view.sent
    return {
        "connected": known is not None,
        "pid": None if known is None else known.pid,
        "since": None if known is None else iso(known.since),
        "synced": known is not None and known.synced,
        "handshake": None if known is None else view.state.lane.known_handshake,
        "open": sent is not None and sent[1].open,
        "admitted": [] if sent is None else list(sent[1].users),
        "in_force": view.settled,
    }


def status(view: View, about: About, now: float) -> shapes.Status:
    """Everything that matters, on one page."""
    state, control, holds = view.state, view.state.control, holder(view)
    all_servers, waiting = list(servers(view, about)), about.waiting
    change, fault, policy, drain = about.last_change, about.last_fault, view.policy, state.drain
    wrong = problems(about.conditions)
    return {
        "agent": {
            "version": about.version,
            "pid": about.pid,
            "started": iso(about.started),
            "uptime": span(about.started, now),
        },
        "health": {
            "ok": not wrong,
            "problems": [_condition(one) for one in wrong],
        },
        "mode": {
            "sharing": view.sharing,
            "server": "shared" if view.shared else "own",
            "enforced": policy.enforce,
        },
        "devices": [gpus.device(one, about.gpus) for one in (state.devices if about.devices_known else ())],
        "pipe_directory": policy.pipe_directory,
        "control": None
        if control is None
        else {
            "pid": control.pid,
            "version": control.version,
            "started": iso(control.started),
            "socket": control.socket,
            "quitting": iso_or_none(control.quitting),
            "running": control.proven,
        },
        "gate": gate(view),
        "turn": turn(view, now, about.memory),
        "holder": None if holds is None else server(view, about, holds),
        "servers": all_servers,
        "clients": len(state.clients),
        "clients_by_uid": dict(Counter(str(client.uid) for client in state.clients.values())),
        "users": users(state, about, view.suspended),
        "waiting": list(queue(state, waiting[:STATUS_USERS], now)),
        "waiting_users": len(waiting),
        "waiting_processes": sum(one.processes for one in waiting),
        "outside": [gpus.outside(one, name(state, one.seen.uid, about.names)) for one in about.outside[:STATUS_USERS]],
        "outside_processes": len(about.outside),
        "last_change": None
        if change is None
        else {
            "at": iso(change.came),
            "before": change.more.get("before"),
            "before_user": name(state, change.more.get("before"), about.names),
            "uid": change.uid or 0,
            "user": name(state, change.uid, about.names),
            "gap": change.more.get("gap"),
        },
        "last_fault": None
        if fault is None
        else {
            "at": iso(fault.came),
            "server": fault.pid,
            "uid": fault.uid,
            "user": name(state, fault.uid, about.names),
            "seconds": None if fault.ended is None else round(fault.ended - fault.came, 3),
            "recovered": None if fault.ended is None else fault.outcome == "recovered",
        },
        "limits": {
            "verified": [s["pid"] for s in all_servers if s["verified"] is True],
            "drifted": [s["pid"] for s in all_servers if s["verified"] is False],
            "unconfirmed": [
                {"uid": uid, "user": name(state, uid), "why": why} for uid, why in state.unconfirmed.items()
            ],
            "fail_safe": [client.pid for client in state.clients.values() if client.fail_safe],
        },
        "not_guaranteed": [
            _condition(one)
            for one in about.conditions
            if one.bad == "not sure" and (not one.where or about.instance in one.where)
        ],
        "unknown_lines": state.unknown_lines,
        "foreign_lines": state.foreign_lines,
        "drain": {
            "draining": drain is not None,
            "since": None if drain is None else iso(drain.since),
            "deadline": None if drain is None else iso_or_none(drain.until),
            "restart": drain is not None and drain.restart,
        },
        "policy": {
            "digest": policy.digest or None,
            "loaded": iso_or_none(about.policy_loaded),
            "errors": list(about.policy_errors),
        },
        "history": {"oldest": about.oldest_cursor, "newest": about.newest_cursor},
    }


def _condition(one: Condition) -> shapes.Condition:
    return {"what": one.what, "since": iso_or_none(one.since), "do": one.do}


def session(one: Session, now: float, names: Names, use: Use | None = None) -> dict[str, Any]:
    """See :class:`mpsagent.api.shapes_rows.Session`. ``use``: what is not on record yet."""
    until = now if one.ended is None else one.ended
    more = one.more if use is None else with_use(one.more, use.seconds, use.busy, use.energy, use.shared)
    rest = {name: value for name, value in more.items() if name not in ("counted", "busy")}
    if more.get("counted"):
        rest["utilization"] = round(more["busy"] / more["counted"], 3)
    return {
        "cursor": one.number,
        "kind": one.kind,
        "instance": one.instance,
        "uid": one.uid,
        "user": None if one.uid is None else names(one.uid),
        "pid": one.pid or None,
        "came": iso(one.came),
        "began": iso_or_none(one.passed),
        "ended": iso_or_none(one.ended),
        "waited": span(one.came, until if one.passed is None else one.passed),
        "worked": 0.0 if one.passed is None else span(one.passed, until),
        "outcome": one.outcome,
        "why": one.why,
        "job": one.job,
        **rest,
    }


def span(start: float, end: float) -> float:
    """Seconds from start to end, never negative (clocks are set back)."""
    return round(max(0.0, end - start), 3)
