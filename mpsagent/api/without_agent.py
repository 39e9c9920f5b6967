"""What happened at the gate while no agent was there, from what is on record and what the gate says now. Pure.

The gate goes on without an agent: processes pass, wait, leave and end. The next agent writes down what of that can be
known, once, and nothing that is on record already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from mpsagent.core import transitions as tr
from mpsagent.core.model import State
from mpsagent.core.sessions import Session

OVERLAP = 600.0
"""Seconds before the newest record in which transitions are held against the records: the newest record may be of an
action, and lines from before it may not have been read when the last agent was killed."""
SLACK = 2.0
"""Seconds between a hand-over by the gate's clock and its record."""


def missed(known: Iterable[Session], state: State, started: float, now: float) -> list[tr.Transition]:
    """What to write down once the gate has told everything and ``state`` has it. ``known``: the clients that have not
    ended by what is on record; the gate says the same time of coming each time. What happened since the agent
    ``started`` that has written down itself."""
    clients = {one.pid: (one, one.passed) for one in known if one.passed is not None}
    waiting = {(one.pid, round(one.came, 3)): one for one in known if one.passed is None}
    held = {wait.peer.pid: wait for wait in reversed([*state.held.values()]) if not wait.of_client}
    found: list[tr.Transition] = []
    for pid, (one, passed) in clients.items():
        later = state.clients.get(pid)
        if later is None or later.since > passed + SLACK:
            at = now if later is None else later.since
            told_of_end = (at, pid, one.uid or 0, None, "unknown", max(0.0, at - passed), passed - one.came)
            found.append(tr.ClientEnded(*told_of_end, one.more.get("lease"), one.job))
    for (pid, came), one in waiting.items():
        again = held.get(pid)
        if pid not in state.clients and (again is None or round(again.since, 3) != came):
            at = now if again is None else again.since
            found.append(tr.ClientLeft(at, pid, one.uid or 0, max(0.0, at - one.came)))
    for client in state.clients.values():
        there = clients.get(client.pid)
        if client.since < started and not client.unseen and (there is None or client.since > there[1] + SLACK):
            told_of = (client.since, client.pid, client.uid, 0.0, client.limits, False, None)
            found.append(tr.ClientConnected(*told_of, *state.job(client.peer)))
    for pid, wait in held.items():
        if wait.since < started and (pid, round(wait.since, 3)) not in waiting:
            found.append(tr.ClientWaiting(wait.since, pid, wait.uid, wait.connection))
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
