"""Leases as JSON: checks of a requested lease, and the form of an existing one. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mpsagent.core.view import View
from mpsagent.mps.units import iso, parse_duration
from mpsagent.policy import parse, values
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import ATTRIBUTES_OF_CGROUPS, OF_CGROUPS, key
from mpsagent.policy.shares import Lease
from mpsagent.snapshot.problem import Json, Problem

KEYS: dict[str, type | tuple[type, ...]] = {
    "uid": int, "cgroup": str, "pid": int, "active_threads": (int, str), "memory_limit": (str, dict),
    "total_active_threads": (int, str), "total_memory_limit": str, "max_clients": int, "until": str, "name": str,
}  # fmt: skip
LONGEST = 366 * 86400.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,99}", re.ASCII)
UNTIL = 'a time like "2026-11-22T18:00:00Z", or a span from now like "2h", at most a year'


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A requested lease: its user, cgroup or process, its ``share``, and its end after ``seconds`` or at ``until``."""

    uid: int | None = None
    cgroup: str | None = None
    pid: int | None = None
    share: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    until: float | None = None
    name: str | None = None


def asked(body: Json, now: float) -> LeaseAsked:
    """Return the lease that a body requests. ``now`` and ``until`` are of the wall clock. Raises Problem(400)."""
    uid, cgroup, pid = body.get("uid"), body.get("cgroup"), body.get("pid")
    if uid is None and cgroup is None and pid is None:
        raise Problem(
            400, "the lease has no user, cgroup or process", "uid", "give a uid, a cgroup, a pid, or several of them"
        )
    for name, value in (("uid", uid), ("pid", pid)):
        if value is not None and not 0 <= value < 2**32 - 1:
            raise Problem(400, f"{value} is no {name}", name)
    share: Json = {}
    where = "cgroup"
    try:
        cgroup = None if cgroup is None else parse.cgroup(cgroup)
        for where in OF_CGROUPS:
            if body.get(where) is not None:
                read = parse.total_threads if where == "active_threads" else key("limits", where).kind.parse
                share[ATTRIBUTES_OF_CGROUPS[where]] = read(body[where])
    except parse.Wrong as error:
        raise Problem(400, error.faults[0].problem, where, error.faults[0].hint) from None
    if not share:
        raise Problem(
            400, "the lease has no limits", "active_threads", f"give one of {', '.join(OF_CGROUPS)}, or several"
        )
    job = body.get("name")
    if job is not None and NAME.fullmatch(job) is None:
        raise Problem(
            400, f"{job[:40]!r} is not a name of a job", "name", "at most 100 letters, digits and . _ : / @ -"
        )
    return LeaseAsked(uid, cgroup, pid, share, name=job, **_until(str(body.get("until", "")), now))


def _until(text: str, now: float) -> Any:
    try:
        found = parse_duration(text)
        if 0 < found <= LONGEST:
            return {"seconds": found}
    except ValueError:
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            at = None
        if at is not None and at.tzinfo is not None and now < at.timestamp() <= now + LONGEST:
            return {"until": at.timestamp()}
    raise Problem(400, f"until {text[:40]!r}: it has to be a time within the next year", "until", UNTIL)


def shown(
    one: Lease, view: View, who: Identity | None = None, clients: Sequence[int] = (), waits: str | None = None
) -> Json:
    """Return a lease as JSON. ``clients``: the pids of its running clients. ``who``: its user, if known. ``waits``: why
    its processes wait."""
    state = view.state
    who = who or state.identities.get(-1 if one.uid is None else one.uid)
    limits = None if who is None else state.policy.rules(who).limits_within(one.share, state.devices).as_json()
    return {
        "id": one.number,
        "name": one.name,
        "uid": one.uid,
        "user": None if who is None else who.name,
        "cgroup": one.cgroup,
        "pid": None if one.process is None else one.process[0],
        "active_threads": values.written(one.share.threads),
        "memory_limit": None if one.share.memory is None else {k: _size(size) for k, size in one.share.memory.items()},
        "total_active_threads": values.written(one.share.total_threads),
        "total_memory_limit": None if one.share.total_memory is None else _size(one.share.total_memory),
        "max_clients": one.share.max_clients,
        "limits": limits,
        "since": iso(one.since),
        "until": iso(one.until),
        "by": one.by,
        "clients": list(clients),
        "waits": waits,
    }


def _size(size: values.Memory) -> object:
    return size if isinstance(size, int) else values.written(size)
