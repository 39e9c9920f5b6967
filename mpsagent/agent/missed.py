"""What happened at the gate while no agent was there, from what is on record and what the gate says now. Pure.

The gate goes on without an agent: processes pass, wait, leave and end. The next agent writes down what of that can be
known, once, and nothing that is on record already.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.model import State

Mark = tuple[int, float]
"""pid and the time when it came, to the millisecond: as the gate said it, so equal each time it is said."""
SLACK = 2.0
"""Seconds between a hand-over by the gate's clock and its record."""


class Open(NamedTuple):
    """What the records leave open. ``clients``: by pid, the record of a client that has not ended; ``waiting``: by
    mark, of one that has neither passed nor left; ``before``: what is older than this is not in sight any more."""

    clients: Mapping[int, Mapping[str, Any]]
    waiting: Mapping[Mark, Mapping[str, Any]]
    before: float


def mark(pid: int, at: float) -> Mark:
    return pid, round(at, 3)


def open_ends(records: Sequence[Mapping[str, Any]]) -> Open:
    """``records``: the newest ones, oldest first; when the first of them is not number 1, there were others."""
    clients: dict[int, Mapping[str, Any]] = {}
    waiting: dict[int, dict[Mark, Mapping[str, Any]]] = {}
    for record in records:
        kind, pid = record["kind"], record.get("pid")
        if kind == "user.moved":  # to another instance, where all that waits is written down anew
            for of_pid in waiting.values():
                for key in [key for key, one in of_pid.items() if one["uid"] == record["uid"]]:
                    del of_pid[key]
        if not isinstance(pid, int):
            continue
        if kind == tr.ClientWaiting.kind:
            waiting.setdefault(pid, {})[mark(pid, record["at"])] = record
        elif kind == tr.ClientConnected.kind:
            clients[pid] = record
            waiting.pop(pid, None)
        elif kind in (tr.ClientLeft.kind, tr.ClientRefused.kind):
            waiting.pop(pid, None)
        elif kind == tr.ClientEnded.kind:
            clients.pop(pid, None)
    first = records[0] if records else None
    before = float("-inf") if first is None or first["seq"] == 1 else float(first["at"])
    return Open(clients, {key: one for by in waiting.values() for key, one in by.items()}, before)


def is_new(known: Open, one: tr.ClientWaiting) -> bool:
    """False for a connection whose wait is on record already, or began before all records in sight."""
    return one.at > known.before and mark(one.pid, one.at) not in known.waiting


def waited(known: Open, one: inp.Known) -> float:
    """How long a client that works had waited, as an earlier agent has written it down."""
    record = known.clients.get(one.peer.pid)
    same = record is not None and one.since <= float(record["at"]) + SLACK
    return float(record.get("waited", 0.0)) if record is not None and same else 0.0


def missed(known: Open, state: State, told: Iterable[inp.Input], now: float) -> list[tr.Transition]:
    """What to write down once the gate has ``told`` everything and ``state`` has it."""
    found: list[tr.Transition] = []
    for one in told:
        if not isinstance(one, inp.Known) or one.since <= known.before:
            continue
        record = known.clients.get(one.peer.pid)
        if record is None or one.since > float(record["at"]) + SLACK:
            told_of = (one.since, one.peer.pid, one.peer.uid, 0.0, one.limits, False, None)
            found.append(tr.ClientConnected(*told_of, *state.job(one.peer)))
    for pid, record in known.clients.items():
        client, at = state.clients.get(pid), float(record["at"])
        if client is None or client.since > at + SLACK:
            outcome, seconds = "unknown", max(0.0, now - at)
            waited = float(record.get("waited", 0.0))
            told_of_end = (now, pid, int(record["uid"]), None, outcome, seconds, waited)
            found.append(tr.ClientEnded(*told_of_end, record.get("lease"), record.get("job")))
    held = {mark(one.peer.pid, one.since) for one in state.held.values()}
    passed = {one.peer.pid for one in told if isinstance(one, inp.Known)}
    for key, record in known.waiting.items():
        if key not in held and key[0] not in passed:
            waited = max(0.0, now - float(record["at"]))
            found.append(tr.ClientLeft(now, key[0], int(record["uid"]), waited))
    return sorted(found, key=lambda one: one.at)
