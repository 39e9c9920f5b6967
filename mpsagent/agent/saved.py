"""What an agent remembers beyond its own life: a drain, whose turn it is, who is being ended. Pure.

The rows are JSON. What an earlier agent has kept is held against what the gate says now: a process is told by pid and
start time, and a turn only goes on for a user who still has clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.ladder import begun
from mpsagent.core.model import Client, Outcome
from mpsagent.core.turn_memory import Memory
from mpsagent.core.view import Turn
from mpsagent.mps.limits import Limits
from mpsagent.policy import parse, values
from mpsagent.policy.shares import Lease, Share
from mpsagent.wire import link

LEASE = "lease"
"""The number of the last lease, of all instances."""
CLOCK = "clock"
"""The clock of the times of all instances, see :mod:`mpsagent.agent.clock`."""
CLIENTS = "clients"
"""Clients at work, by pid and start time: after a boot these are other processes."""
RELEASED = "released"
"""Living processes that had been at work, in the same form: they are not outside MPS."""
LEASES = "leases"
DRAINED = "drained"
"""The drain that was ordered for the whole node, for instances that are added to the policy later."""
EXTENDED = "extended"
"""Until when users' turns do not end, by an administrator's order."""
INSTANCE = "instance"
"""The name of the only instance, which names nothing that it keeps."""
OF_NODE = (LEASE, LEASES, DRAINED, INSTANCE)
OF_THIS_BOOT = (CLIENTS, RELEASED)
TIMES = ("turn", "served", "suspended", EXTENDED, LEASES, "drain", DRAINED, "ending", CLIENTS)
SINCE_1970 = 1e8
"""Floats of this size are times."""
MOST = 1000
"""Clients that are being ended; a server has 48."""
_DAMAGED = (LookupError, TypeError, ValueError, OverflowError, AttributeError)
"""Exceptions of a row that this agent has not written. The row is left out."""


def _number(value: Any) -> float:
    """Raises one of these; JSON's 1e999 is infinite, and no time."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(found)
    return found


def moved(values: Mapping[str, Any], by: float) -> dict[str, Any]:
    """With the times of an earlier agent in this one's clock."""
    return {key: _moved(value, by) if key.rpartition("/")[2] in TIMES else value for key, value in values.items()}


def _moved(value: Any, by: float) -> Any:
    if isinstance(value, list):
        return [_moved(one, by) for one in value]
    if isinstance(value, dict):
        return {key: _moved(one, by) for key, one in value.items()}
    return value + by if isinstance(value, float) and value > SINCE_1970 else value


def ending_rows(core: Core) -> list[list[Any]]:
    """Return the clients that are being ended, so that the next agent continues and asks MPS nothing twice."""
    return [list(one) for engine in core.engines.values() for one in begun(engine.memories.ladder)]


def turn_row(core: Core) -> list[Any] | None:
    """Return whose turn it is and how far it has come, so that each client is warned once and a grace does not begin
    again."""
    turn, signalled = core.memories.turns.turn, core.memories.turns.signalled
    if turn is None:
        return None
    warned = None if signalled is None else [list(one) for one in sorted(signalled)[:MOST]]
    return [turn.uid, turn.since, turn.contested, turn.warned, turn.ending, warned]


def served_rows(core: Core) -> list[list[Any]]:
    """Who had a turn and waits again: behind those who came meanwhile."""
    return [[uid, at] for uid, at in core.memories.turns.served.items()]


def suspended_rows(core: Core) -> list[list[Any]]:
    """Who is paused, and since when."""
    return [[uid, at] for uid, at in core.memories.turns.suspended.items()]


def waiting_rows(core: Core) -> list[int]:
    """Users who wait here, so that they wait here again."""
    return list(core.state.held.users()[:MOST])


def client_rows(core: Core) -> list[dict[str, Any]]:
    """Return what a later agent is to know of the clients. The gate does not tell all of it, and forgets the rest if
    its descriptor store is lost."""
    return [_client_row(one) for one in islice(core.state.clients.values(), MOST)]


def _client_row(one: Client) -> dict[str, Any]:
    peer, limits = one.peer, one.limits
    return {
        "pid": peer.pid, "start": peer.start, "uid": peer.uid, "gid": peer.gid, "cgroup": peer.cgroup,
        "lane": one.daemon, "since": one.since, "waited": round(one.waited, 3),
        "limits": None if limits is None else limits.as_json(),
        "most_memory": None if one.most_memory is None else Limits(memory=one.most_memory).as_json()["memory"],
        "fail_safe": one.fail_safe, "connections": one.connections, "terminated": one.terminated,
        "outcome": str(one.outcome), "lease": one.lease, "job": one.job, "counts": one.counts, "counted": one.counted,
    }  # fmt: skip


class Kept(NamedTuple):
    """A client as an earlier agent has kept it. ``daemon``: the user whose own control daemon it was."""

    peer: inp.Peer
    daemon: int | None
    what: inp.Remembered


def clients(kept: Mapping[str, Any], now: float) -> dict[tuple[int, int], Kept]:
    """Return the clients of the agent before, by pid and start time. Damaged rows are left out."""
    found: dict[tuple[int, int], Kept] = {}
    rows = kept.get("clients")
    for row in rows[:MOST] if isinstance(rows, list) else ():
        with suppress(*_DAMAGED):
            cgroup, job = (None if row[key] is None else str(row[key]) for key in ("cgroup", "job"))
            lane, lease = (None if row[key] is None else int(row[key]) for key in ("lane", "lease"))
            counted = None if row.get("counted") is None else min(now, _number(row["counted"]))
            peer = inp.Peer(int(row["pid"]), int(row["uid"]), int(row["gid"]), int(row["start"]), cgroup)
            terminated = None if row["terminated"] is None else min(now, _number(row["terminated"]))
            found[peer.pid, peer.start] = Kept(peer, lane, inp.Remembered(
                min(now, _number(row["since"])), max(0.0, _number(row["waited"])), _limits(row["limits"]),
                None if row["most_memory"] is None else _sizes(row["most_memory"]), bool(row["fail_safe"]),
                max(0, int(row["connections"])), terminated, Outcome(row["outcome"]), lease, job,
                bool(row.get("counts", True)), counted,
            ))  # fmt: skip
    return found


def _limits(value: Any) -> Limits | None:
    if value is None:
        return None
    return Limits(_number(value["threads"]), _sizes(value["memory"]), bool(value.get("below_normal")))


def _sizes(value: Mapping[str, Any]) -> dict[int, int]:
    return {int(device): int(size) for device, size in value.items()}


def released(kept: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return pid and start time of the processes that had been clients of the agent before."""
    with suppress(*_DAMAGED):
        return [(int(pid), int(start)) for pid, start in (kept.get(RELEASED) or ())[:MOST]]
    return []


def waited_here(kept: Mapping[str, Any]) -> frozenset[int]:
    """Return the users who waited when the agent before ended."""
    with suppress(*_DAMAGED):
        return frozenset(int(uid) for uid in kept.get("waiting") or ())
    return frozenset()


def _memory(size: object) -> values.Memory:
    return size if isinstance(size, int) else parse.amount(size)


_SHARE: dict[str, Callable[[Any], Any]] = {
    "threads": parse.threads, "memory": lambda sizes: {str(one): _memory(size) for one, size in sizes.items()},
    "total_threads": parse.total_threads, "total_memory": _memory, "max_clients": int,
}  # fmt: skip
"""How each part of a share is read."""


def lease_rows(core: Core) -> list[dict[str, Any]]:
    return [
        {
            "number": one.number, "since": one.since, "until": one.until, "by": one.by, "uid": one.uid,
            "cgroup": one.cgroup, "process": one.process, "name": one.name,
            **{key: values.written(getattr(one.share, key)) for key in _SHARE},
        }
        for one in core.state.leases
    ]  # fmt: skip


def leases(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Those whose time is not over. What is damaged is left out."""
    found: list[inp.Input] = []
    rows = kept.get("leases")
    for row in rows[:MOST] if isinstance(rows, list) else ():
        with suppress(*_DAMAGED):
            process = None if row["process"] is None else (int(row["process"][0]), int(row["process"][1]))
            uid = None if row["uid"] is None else int(row["uid"])
            cgroup, name = (None if row.get(key) is None else str(row[key]) for key in ("cgroup", "name"))
            number, until, source = int(row["number"]), _number(row["until"]), f"lease {row['number']}"
            given = {key: read(row[key]) for key, read in _SHARE.items() if row.get(key) is not None}
            share = Share(source, **given, job=name or source)
            lease = Lease(number, share, _number(row["since"]), until, int(row["by"]), uid, cgroup, process, name)
            if until > now and (uid, cgroup, process) != (None, None, None):
                found.append(inp.LeaseGiven(now, lease))
    return found


def drain(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Maintenance goes on: an upgrade in the middle of it must not let users back in."""
    with suppress(*_DAMAGED):
        row = kept["drain"]
        until = row["until"]
        until = None if until is None else _number(until)
        by = None if row.get("by") is None else int(row["by"])
        return [inp.DrainOrdered(now, _number(row["since"]), until, bool(row.get("restart")), by)]
    return []


def extended_rows(core: Core) -> list[list[Any]]:
    return [[uid, until] for uid, until in core.state.extended.items()]


def extended(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Return the turns that were given more time, as long as that is not over."""
    with suppress(*_DAMAGED):
        rows = [(int(uid), _number(until)) for uid, until in kept[EXTENDED][:MOST]]
        return [inp.TurnExtended(now, uid, until) for uid, until in rows if until > now]
    return []


def ending(kept: Mapping[str, Any], now: float) -> inp.Resumed:
    """To be told once the gate has said who lives."""
    found = []
    rows = kept.get("ending")
    for row in rows[:MOST] if isinstance(rows, list) else ():
        with suppress(*_DAMAGED):
            pid, start, uid, reason, rule, step, at = row
            found.append(inp.Begun(int(pid), int(start), int(uid), str(reason), str(rule), str(step), _number(at)))
    return inp.Resumed(now, tuple(found))


def take_up_turn(core: Core, kept: Mapping[str, Any], told: Iterable[inp.Input], now: float) -> None:
    """Before the engine decides for the first time: the turn goes on where the earlier agent was with it, when its user
    has a client among what the gate has ``told``. The users who waited may have left meanwhile: an end that was not
    announced is counted from the first one who waits now. No time is later than ``now``: no user is to wait for one in
    the future."""
    with suppress(*_DAMAGED):
        served = {int(uid): min(now, _number(at)) for uid, at in kept["served"][:MOST]}
        core.memories = replace(core.memories, turns=Memory(served=served))
    with suppress(*_DAMAGED):
        suspended = {int(uid): min(now, _number(at)) for uid, at in kept["suspended"][:MOST]}
        core.memories = replace(core.memories, turns=replace(core.memories.turns, suspended=suspended))
    with suppress(*_DAMAGED):
        uid, since, contested, warned, end, *more = kept["turn"]
        signalled = None if more == [None] else frozenset((int(pid), int(start)) for pid, start in chain(*more[:1]))
        contested, warned, end = (None if at is None else min(now, _number(at)) for at in (contested, warned, end))
        each = [one.what if isinstance(one, inp.Of) else one for one in told]
        said = [one.what for one in each if isinstance(one, inp.GateSaid)]
        others = [one.since for one in said if isinstance(one, link.Knock | link.Known) and one.uid != int(uid)]
        if contested is not None and warned is None and others:
            contested = max(contested, min(others))
        turn = Turn(int(uid), min(now, _number(since)), contested, warned, end)
        users = {one.peer.uid for one in each if isinstance(one, inp.ClientRemembered)}
        users |= {one.uid for one in said if isinstance(one, link.Known)}
        if turn.uid in users:
            rest = {one: at for one, at in core.memories.turns.suspended.items() if one != turn.uid}
            turn = replace(turn, phase=turn.reached if end is None else "ending")
            turns = replace(core.memories.turns, turn=turn, suspended=rest, signalled=signalled)
            core.memories = replace(core.memories, turns=turns)
