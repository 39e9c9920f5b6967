"""What happened at the gate while no agent was there, from what is on record and what the gate says now. Pure.

The gate goes on without an agent: processes pass, wait, leave and end. The next agent writes down what of that can be
known, once, and nothing that is on record already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpsagent.core import transitions as tr
from mpsagent.core.model import State

Mark = tuple[int, float]
"""pid and the time when it came, to the millisecond: as the gate said it, so equal each time it is said."""
OVERLAP = 600.0
"""Seconds before the newest record in which transitions are held against the records: the newest record may be of an
action, and lines from before it may not have been read when the last agent was killed."""
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


def missed(known: Open, state: State, started: float, now: float) -> list[tr.Transition]:
    """What to write down once the gate has told everything and ``state`` has it. What happened since the agent
    ``started`` that has written down itself."""
    found: list[tr.Transition] = []
    for one in state.clients.values():
        record = known.clients.get(one.pid)
        if (
            known.before < one.since < started
            and not one.unseen
            and (record is None or one.since > float(record["at"]) + SLACK)
        ):
            told_of = (one.since, one.pid, one.uid, 0.0, one.limits, False, None)
            found.append(tr.ClientConnected(*told_of, *state.job(one.peer)))
    for wait in {one.process: one for one in reversed([*state.held.values()]) if not one.of_client}.values():
        if known.before < wait.since < started and mark(wait.peer.pid, wait.since) not in known.waiting:
            found.append(tr.ClientWaiting(wait.since, wait.peer.pid, wait.uid, wait.connection))
    for pid, record in known.clients.items():
        client, at = state.clients.get(pid), float(record["at"])
        if client is None or client.since > at + SLACK:
            outcome, seconds = "unknown", max(0.0, now - at)
            waited = float(record.get("waited", 0.0))
            told_of_end = (now, pid, int(record["uid"]), None, outcome, seconds, waited)
            found.append(tr.ClientEnded(*told_of_end, record.get("lease"), record.get("job")))
    held = {mark(one.peer.pid, one.since) for one in state.held.values()}
    passed = set(state.clients)
    for key, record in known.waiting.items():
        if key not in held and key[0] not in passed:
            waited = max(0.0, now - float(record["at"]))
            found.append(tr.ClientLeft(now, key[0], int(record["uid"]), waited))
    return sorted(found, key=lambda one: one.at)


def not_yet_written(found: Iterable[tr.Transition], known: Iterable[Mapping[str, object]]) -> list[tr.Transition]:
    """What of ``found`` is not among the ``known`` records. Times are those that MPS wrote, so they are equal where the
    line is the same; two lines that say the same in one millisecond are two."""
    seen = Counter(_mark(float(str(record["at"])), str(record["kind"]), record) for record in known)
    missed = []
    for one in found:
        mark = _mark(one.at, one.kind, tr.transition_fields(one))
        if seen[mark]:
            seen[mark] -= 1
        else:
            missed.append(one)
    return missed


def _mark(at: float, kind: str, fields: Mapping[str, object]) -> tuple[object, ...]:
    return (kind, round(at, 3), fields.get("pid"), fields.get("server"))
