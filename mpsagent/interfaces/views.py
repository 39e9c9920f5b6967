"""From the state to the JSON of the API. Pure: agent and replay share it, and time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from mpsagent.core.model import Server, State, Waiting
from mpsagent.core.turns import Turn, deadlines
from mpsagent.core.world import World, same_limits
from mpsagent.mps.limits import Limits

if TYPE_CHECKING:
    from mpsagent.interfaces import shapes


@dataclass(frozen=True, slots=True)
class Trouble:
    """One reason for not being healthy: what, since when (seconds since the epoch), and what a person can do."""

    what: str
    since: float | None = None
    do: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the views need and the state does not know.

    ``names``: user by uid; ``wanted``: the policy's limits by uid; ``parked_uid``: whose server is the parked one;
    ``turns``: by uid of a waiting user, when the policy gives it the GPU at the latest; ``commands``: by client pid.
    """

    version: str = ""
    pid: int = 0
    started: float = 0.0
    pipe_directory: str | None = None
    troubles: tuple[Trouble, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    wanted: Mapping[int, Limits] = field(default_factory=dict)
    parked_uid: int | None = None
    turns: Mapping[int, float] = field(default_factory=dict)
    commands: Mapping[int, str] = field(default_factory=dict)
    last_switch: float | None = None
    draining_since: float | None = None
    drain_deadline: float | None = None
    policy_digest: str | None = None
    policy_loaded: float | None = None
    policy_errors: tuple[str, ...] = ()
    oldest_cursor: int = 0
    newest_cursor: int = 0


def iso(at: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC with milliseconds, which is what the logs resolve."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def iso_or_none(at: float | None) -> str | None:
    return None if at is None else iso(at)


def limits(value: Limits) -> shapes.Limits:
    return {"threads": value.threads, "memory": {str(device): size for device, size in sorted(value.memory.items())}}


def server(state: State, about: About, one: Server) -> shapes.Server:
    wanted = about.wanted.get(one.uid) if one.uid is not None else None
    parked = one.uid is not None and one.uid == about.parked_uid
    verified = same_limits(one.limits, wanted) if wanted is not None and one.reported and not parked else None
    return {
        "pid": one.pid,
        "uid": one.uid,
        "user": _name(about, one.uid),
        "status": str(one.status),
        "started": iso(one.started),
        "ready": iso_or_none(one.ready),
        "limits": limits(one.limits),
        "wanted": None if wanted is None else limits(wanted),
        "verified": verified,
        "clients": len(state.clients_of(one.pid)),
        "max_clients": one.max_clients,
        "idle_since": iso_or_none(one.idle_since),
        "fault_since": iso_or_none(one.fault_since),
        "sticky": list(one.sticky),
        "forced": one.forced,
        "parked": parked,
    }


def servers(state: State, about: About) -> list[shapes.Server]:
    return [server(state, about, one) for one in sorted(state.servers.values(), key=lambda s: (s.started, s.pid))]


def clients(state: State, about: About, now: float) -> list[shapes.Client]:
    """Clients of servers by server and age, then the waiting ones in order of arrival."""
    found: list[shapes.Client] = []
    for one in sorted(state.clients.values(), key=lambda c: (c.server, c.since, c.pid)):
        holder = state.servers.get(one.server)
        sticky = holder is not None and one.pid in holder.sticky
        found.append(
            {
                "pid": one.pid,
                "uid": one.uid,
                "user": _name(about, one.uid),
                "server": one.server,
                "state": "sticky" if sticky else "running",
                "since": iso(one.since),
                "seconds": _span(one.since, now),
                "waited": None if one.queued is None else _span(one.queued, one.since),
                "contexts": len([c for c in one.contexts if c]),
                "devices": sorted(one.devices),
                "command": about.commands.get(one.pid),
            }
        )
    found.extend(
        {
            "pid": one.pid,
            "uid": one.uid,
            "user": _name(about, one.uid),
            "server": None,
            "state": "waiting",
            "since": iso(one.since),
            "seconds": _span(one.since, now),
            "waited": _span(one.since, now),
            "contexts": 0,
            "devices": [],
            "command": about.commands.get(one.pid),
        }
        for one in state.waiting
    )
    return found


def queue(state: State, about: About, now: float) -> list[shapes.Waiting]:
    """Waiting users in the order in which MPS serves them."""
    by_user: dict[int, list[Waiting]] = {}
    for one in state.waiting:
        by_user.setdefault(one.uid, []).append(one)
    found: list[shapes.Waiting] = []
    for position, uid in enumerate(state.next_users(), 1):
        since, turn = by_user[uid][0].since, about.turns.get(uid)
        found.append(
            {
                "position": position,
                "uid": uid,
                "user": _name(about, uid),
                "clients": [one.pid for one in by_user[uid]],
                "since": iso(since),
                "seconds": _span(since, now),
                "turn": iso_or_none(turn),
                "turn_seconds": None if turn is None else _span(now, turn),
            }
        )
    return found


def expected_turns(world: World, turn: Turn | None, now: float) -> dict[int, float]:
    """By waiting user, when the policy gives it the GPU at the latest; who may wait without end is left out.

    ``turn`` is the one that is running out (``TurnsMemory.turn``). Each user ahead may keep its turn for as long as its
    own rules say, so a bound ends at the first who never has to leave.
    """
    holder, at = world.holder(), now
    if holder is not None:
        times = deadlines(world, turn) if turn is not None and turn.server == holder.pid else None
        if times is None or not _has_to_leave(world, turn.uid if turn is not None else holder.uid):
            return {}
        at = max(now, times[1])
    found: dict[int, float] = {}
    for uid in world.state.next_users():
        if holder is not None and uid == holder.uid:
            continue
        found[uid] = at
        rules = world.rules(uid)
        if rules.switch_after is None or not _has_to_leave(world, uid):
            break
        at += rules.switch_after + rules.switch_grace
    return found


def _has_to_leave(world: World, uid: int | None) -> bool:
    """Whether somebody who holds the GPU while others wait is made to leave at some time."""
    if uid is None:
        return False
    rules = world.rules(uid)
    enforced = rules.enforce_switch and rules.switch_action != "none" and not rules.switch_exempt
    return enforced and rules.switch_after is not None


def status(state: State, about: About, now: float) -> shapes.Status:
    """Everything that matters, on one page."""
    control, holder, all_servers = state.control, state.holder(), servers(state, about)
    return {
        "agent": {
            "version": about.version,
            "pid": about.pid,
            "started": iso(about.started),
            "uptime": _span(about.started, now),
        },
        "health": {
            "ok": not about.troubles,
            "problems": [{"what": t.what, "since": iso_or_none(t.since), "do": t.do} for t in about.troubles],
        },
        "pipe_directory": about.pipe_directory,
        "control": None
        if control is None
        else {
            "pid": control.pid,
            "version": control.version,
            "started": iso(control.started),
            "socket": control.socket,
            "quitting": iso_or_none(control.quitting),
            "running": control.exited is None,
        },
        "holder": None if holder is None else server(state, about, holder),
        "servers": all_servers,
        "clients": len(state.clients),
        "waiting": queue(state, about, now),
        "last_switch": iso_or_none(about.last_switch),
        "limits": {
            "verified": [s["pid"] for s in all_servers if s["verified"] is True],
            "drifted": [s["pid"] for s in all_servers if s["verified"] is False],
        },
        "unknown_lines": state.unknown_lines,
        "drain": {
            "draining": about.draining_since is not None,
            "since": iso_or_none(about.draining_since),
            "deadline": iso_or_none(about.drain_deadline),
        },
        "policy": {
            "digest": about.policy_digest,
            "loaded": iso_or_none(about.policy_loaded),
            "errors": list(about.policy_errors),
        },
        "history": {"oldest": about.oldest_cursor, "newest": about.newest_cursor},
    }


def _name(about: About, uid: int | None) -> str | None:
    return None if uid is None else about.names.get(uid)


def _span(start: float, end: float) -> float:
    """Seconds from start to end, never negative (clocks are set back)."""
    return round(max(0.0, end - start), 3)
