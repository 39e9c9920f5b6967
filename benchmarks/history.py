"""A year of the history: how fast it is written, how large it is, how long a report over it takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figure import Figure
from mpsagent.api import database
from mpsagent.api.database import Database, Query, Record
from mpsagent.core.sessions import Sessions

YEAR = 365 * 86400.0
USERS = 40
STEP = 1000
BEGIN = 1_750_000_000.0


def a_year(quick: bool) -> list[Figure]:
    """1,000,000 turns of 40 users: each with a client that waits, is let in, works and ends."""
    turns = 20_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="mpsagent-bench-") as name:
        path = Path(name, database.NAME)
        file, begun = Database(path), time.perf_counter()
        sessions, batch = Sessions(), list[tuple[database.RecordRow, list[tuple[object, ...]]]]()
        for record in _records(turns):
            batch.append((database.row(record), list(map(database.session_row, sessions.take(record)))))
            if len(batch) == STEP:
                file.write(batch)
                batch.clear()
        file.write(batch)
        took, count = time.perf_counter() - begun, file.last
        file.close()
        size = path.stat().st_size
        report = {
            by: _timed(lambda by=by: database.report(path, "1970-01-01", "2100-01-01", by, BEGIN + YEAR))
            for by in ("uid", "day")
        }
        user = _timed(lambda: database.find(path, Query(uid=1003, limit=100)))
        try:
            scan = f"{_timed(lambda: database.find(path, Query(kind='server.fault', limit=100))) * 1000:.0f} ms"
        except TimeoutError:
            scan = f"given up after {database.PATIENCE:g} s"
        plain = _timed(lambda: sum(1 for _ in _records(turns // 50)))
    worst = max(report.values())
    return [
        Figure(f"history: records written, in transactions of {STEP:,}", f"{count / took:,.0f} a second", "", None,
               f"{count:,} records of {turns:,} turns in {took:.0f} s; making them alone {plain * 50:.0f} s"),
        Figure(f"history: size of the file with {turns:,} turns", f"{size / 2**20:,.0f} MiB", "", None,
               f"{size / turns:.0f} bytes a turn, {size / count:.0f} a record"),
        Figure(f"history: report over a year, {turns:,} turns of {USERS} users", f"{worst * 1000:.1f} ms", "under 1 s",
               worst < 1.0, f"by user {report['uid'] * 1000:.1f} ms, by day {report['day'] * 1000:.1f} ms"),
        Figure("history: the newest 100 records of a user", f"{user * 1000:.1f} ms", "", None,
               f"all records looked through for a kind that is not there: {scan}"),
    ]  # fmt: skip


def _timed(what: object) -> float:
    begun = time.perf_counter()
    what()  # type: ignore[operator]
    return time.perf_counter() - begun


def _records(turns: int) -> Iterator[Record]:
    """As the agent writes them."""
    number, every = 0, YEAR / turns
    limits = {"threads": 50.0, "memory": {"0": 21474836480}}
    for turn in range(turns):
        at, uid, pid = BEGIN + turn * every, 1000 + turn * 7 % USERS, 2000 + turn % 30_000
        who: Record = {"uid": uid, "pid": pid}
        ended = {"server": 900, "outcome": "ok", "seconds": every / 2, "waited": 4.2}
        for kind, when, more in (
            ("client.waiting", at, {**who, "connection": turn}),
            ("turn.began", at + 4.1, {"uid": uid, "gap": 0.11}),
            ("client.connected", at + 4.2, {**who, "waited": 4.2, "limits": limits, "fail_safe": False}),
            ("client.ended", at + 4.2 + every / 2, {**who, **ended}),
            ("turn.ended", at + 4.2 + every / 2, {"uid": uid, "seconds": every / 2, "forced": False}),
        ):
            number += 1
            yield {"seq": number, "at": when, "kind": kind, **more}
