"""What an agent remembers beyond its own life: a drain, whose turn it is, who is being ended. Pure.

The rows are JSON. What an earlier agent has kept is held against what the gate says now: a process is told by pid and
start time, and a turn only goes on for a user who still has clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from types import UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.ladder import begun
from mpsagent.core.model import Outcome
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
SINCE_1970 = 1e8
"""Floats of this size are times."""
MOST = 1000
"""Clients that are being ended; a server has 48."""
OF_PEER = ("pid", "start", "uid", "gid", "cgroup")
OF_LEASE = ("number", "since", "until", "by", "uid", "cgroup", "process", "name")
"""The fields of a client's peer and of a lease that are kept."""
_DAMAGED = (LookupError, TypeError, ValueError, OverflowError, AttributeError)
"""Exceptions of a row that this agent has not written. The row is left out."""


def _memory(size: object) -> values.Memory:
    return size if isinstance(size, int) else parse.amount(size)


_SHARE: dict[str, Callable[[Any], Any]] = {
    "threads": parse.threads, "memory": lambda sizes: {str(one): _memory(size) for one, size in sizes.items()},
    "total_threads": parse.total_threads, "total_memory": _memory, "max_clients": int,
}  # fmt: skip
"""How each part of a share is read."""


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


def client_rows(core: Core) -> list[dict[str, Any]]:
    """Return what a later agent is to know of the clients: the fields of ``Remembered``. The gate does not tell all of
    it, and forgets the rest if its descriptor store is lost."""
    return [
        {**{name: getattr(one.peer, name) for name in OF_PEER}, "lane": one.daemon}
        | {name: _plain(getattr(one, name)) for name in inp.Remembered._fields}
        for one in islice(core.state.clients.values(), MOST)
    ]


def lease_rows(core: Core) -> list[dict[str, Any]]:
    """Return the leases with their shares, as a policy has them."""
    return [
        {name: getattr(one, name) for name in OF_LEASE}
        | {key: values.written(getattr(one.share, key)) for key in _SHARE}
        for one in core.state.leases
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, Limits):
        return value.as_json()
    return {str(key): one for key, one in value.items()} if isinstance(value, Mapping) else value


def by_user(times: Mapping[int, float]) -> list[list[float]]:
    """Return the form in JSON of times by user, which _times reads."""
    return [[uid, at] for uid, at in times.items()]


class KeptRow(NamedTuple):
    """A value that outlives the agent.

    ``source``: it is written when this is not equal to the last time, None: it is written by orders. ``write``: its
    form in JSON, in which large floats are times. ``of_node``: it belongs to no instance. ``of_boot``: it names
    processes, which are others after a boot.
    """

    source: Callable[[Core], object] | None = None
    write: Callable[[Core], Any] = lambda core: None
    of_node: bool = False
    of_boot: bool = False


ROWS: Mapping[str, KeptRow] = {
    "ending": KeptRow(lambda core: [one.memories.ladder for one in core.engines.values()], ending_rows),
    "turn": KeptRow(lambda core: core.memories.turns, turn_row),
    # users who had a turn and wait again, behind the users who came meanwhile
    "served": KeptRow(lambda core: core.memories.turns, lambda core: by_user(core.memories.turns.served)),
    "suspended": KeptRow(lambda core: core.memories.turns, lambda core: by_user(core.memories.turns.suspended)),
    "waiting": KeptRow(lambda core: core.state.held.order, lambda core: list(core.state.held.users()[:MOST])),
    CLIENTS: KeptRow(lambda core: core.state.clients, client_rows, of_boot=True),
    RELEASED: KeptRow(of_boot=True),
    EXTENDED: KeptRow(),
    "drain": KeptRow(),
    DRAINED: KeptRow(of_node=True),
    LEASES: KeptRow(of_node=True),
    LEASE: KeptRow(of_node=True),
    INSTANCE: KeptRow(of_node=True),
}
"""The values that are kept, by their names in the state file."""
OF_NODE = frozenset(name for name, row in ROWS.items() if row.of_node)
OF_BOOT = frozenset(name for name, row in ROWS.items() if row.of_boot)


def moved(kept: Mapping[str, Any], by: float) -> dict[str, Any]:
    """Return these values with the times of an earlier agent in this one's clock."""
    return {key: _moved(value, by) if key.rpartition("/")[2] in ROWS else value for key, value in kept.items()}


def _moved(value: Any, by: float) -> Any:
    if isinstance(value, list):
        return [_moved(one, by) for one in value]
    if isinstance(value, dict):
        return {key: _moved(one, by) for key, one in value.items()}
    return value + by if isinstance(value, float) and value > SINCE_1970 else value


# --- reading what an earlier agent has kept: a damaged row is left out ------------------------------------------------


class EarlierClient(NamedTuple):
    """A client as an earlier agent has kept it. ``daemon``: the user whose own control daemon it was."""

    peer: inp.Peer
    daemon: int | None
    what: inp.Remembered


def _time(value: Any, latest: float) -> float:
    """Raises an error of _DAMAGED. JSON's 1e999 is infinite, and not a time."""
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(found)
    return min(found, latest)


_READ: dict[Any, Callable[[Any, float], Any]] = {
    int: lambda value, _: int(value),
    float: _time,
    str: lambda value, _: str(value),
    bool: lambda value, _: bool(value),
    Mapping[int, int]: lambda value, _: {int(device): int(size) for device, size in value.items()},
    tuple[int, int]: lambda value, _: (int(value[0]), int(value[1])),
    Limits: lambda value, latest: Limits(**_fields(Limits, {"threads": value["threads"]} | value, latest)),
}
_hints = cache(get_type_hints)


def _fields(cls: type, row: Mapping[str, Any], latest: float, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the fields that the row has (of these names, if there are any), each as its type says. No time is later
    than ``latest``."""
    found = {}
    for name in names or _hints(cls):
        if name in row:
            hint = _hints(cls)[name]
            some = get_args(hint)[0] if isinstance(hint, UnionType) else hint
            none = row[name] is None and some is not hint
            found[name] = None if none else _READ[some](row[name], latest)
    return found


def _rows(kept: Mapping[str, Any], name: str) -> list[Any]:
    rows = kept.get(name)
    return rows[:MOST] if isinstance(rows, list) else []


def clients(kept: Mapping[str, Any], now: float) -> dict[tuple[int, int], EarlierClient]:
    """Return the clients of the agent before, by pid and start time."""
    found: dict[tuple[int, int], EarlierClient] = {}
    for row in _rows(kept, CLIENTS):
        with suppress(*_DAMAGED):
            peer = inp.Peer(**_fields(inp.Peer, row, now, OF_PEER))
            what = inp.Remembered(**_fields(inp.Remembered, row, now))
            what = what._replace(
                outcome=Outcome(what.outcome), waited=max(0.0, what.waited), connections=max(0, what.connections)
            )
            daemon = None if row["lane"] is None else int(row["lane"])
            found[peer.pid, peer.start] = EarlierClient(peer, daemon, what)
    return found


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


def leases(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Return the leases that have not expired."""
    found: list[inp.Input] = []
    for row in _rows(kept, LEASES):
        with suppress(*_DAMAGED):
            source = f"lease {int(row['number'])}"
            given = {key: read(row[key]) for key, read in _SHARE.items() if row.get(key) is not None}
            of_lease = _fields(Lease, row, math.inf, OF_LEASE)
            lease = Lease(share=Share(source, **given, job=of_lease.get("name") or source), **of_lease)
            if lease.until > now and (lease.uid, lease.cgroup, lease.process) != (None, None, None):
                found.append(inp.LeaseOrdered(now, lease))
    return found


def drain(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Maintenance goes on: an upgrade in the middle of it must not let users back in."""
    with suppress(*_DAMAGED):
        names = "since", "until", "restart", "by"
        return [inp.DrainOrdered(now, **_fields(inp.DrainOrdered, kept["drain"], math.inf, names))]
    return []


def _times(kept: Mapping[str, Any], name: str, latest: float = math.inf) -> dict[int, float]:
    """Return the times by user. Raises an error of _DAMAGED."""
    return {int(uid): _time(at, latest) for uid, at in kept[name][:MOST]}


def extended(kept: Mapping[str, Any], now: float) -> list[inp.Input]:
    """Return the turns that were given more time, if that has not expired."""
    with suppress(*_DAMAGED):
        return [inp.TurnExtended(now, *one) for one in _times(kept, EXTENDED).items() if one[1] > now]
    return []


def ending(kept: Mapping[str, Any], now: float) -> inp.Resumed:
    """Return the clients that were being ended, for the engine once the gate has reported the living ones."""
    found = []
    for row in _rows(kept, "ending"):
        with suppress(*_DAMAGED):
            fields = dict(zip(inp.Begun._fields, row, strict=True))
            found.append(inp.Begun(**_fields(inp.Begun, fields, math.inf)))
    return inp.Resumed(now, tuple(found))


def take_up_turn(core: Core, kept: Mapping[str, Any], told: Iterable[inp.Input], now: float) -> None:
    """Before the engine decides for the first time: the turn goes on where the earlier agent was with it, when its user
    has a client among what the gate has ``told``. The users who waited may have left meanwhile: an end that was not
    announced is counted from the first one who waits now. No time is later than ``now``: no user is to wait for one in
    the future."""
    with suppress(*_DAMAGED):
        core.memories = replace(core.memories, turns=Memory(served=_times(kept, "served", now)))
    with suppress(*_DAMAGED):
        suspended = _times(kept, "suspended", now)
        core.memories = replace(core.memories, turns=replace(core.memories.turns, suspended=suspended))
    with suppress(*_DAMAGED):
        uid, since, contested, warned, end, *more = kept["turn"]
        signalled = None if more == [None] else frozenset((int(pid), int(start)) for pid, start in chain(*more[:1]))
        contested, warned, end = (None if at is None else _time(at, now) for at in (contested, warned, end))
        each = [one.what if isinstance(one, inp.Of) else one for one in told]
        said = [one.what for one in each if isinstance(one, inp.GateSaid)]
        others = [one.since for one in said if isinstance(one, link.Knock | link.Known) and one.uid != int(uid)]
        if contested is not None and warned is None and others:
            contested = max(contested, min(others))
        turn = Turn(int(uid), _time(since, now), contested, warned, end)
        users = {one.peer.uid for one in each if isinstance(one, inp.ClientRemembered)}
        users |= {one.uid for one in said if isinstance(one, link.Known)}
        if turn.uid in users:
            rest = {one: at for one, at in core.memories.turns.suspended.items() if one != turn.uid}
            turn = replace(turn, phase=turn.reached if end is None else "ending")
            turns = replace(core.memories.turns, turn=turn, suspended=rest, signalled=signalled)
            core.memories = replace(core.memories, turns=turns)
