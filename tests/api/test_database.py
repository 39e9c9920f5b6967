"""The file of the history: what it keeps and for how long, questions to it, the report."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from mpsagent.api import database
from mpsagent.api.database import NAME, Database, Query
from mpsagent.api.history import History
from mpsagent.system.accounts import Sums
from tests.api.history_files import lines, row

pytestmark = pytest.mark.usefixtures("no_leak")


def test_old_records_go_by_age_and_the_last_stays(tmp_path: Path) -> None:
    """Its number is where the next agent goes on."""
    history = History(str(tmp_path))
    history.keep = 1000.0
    for number in range(1, 3001):
        history.append("turn.began", float(number), uid=1000)
        if number % 100 == 0:
            history.close()
            history = History(str(tmp_path))
            history.keep = 1000.0
    history.close()
    kept = [int(str(one["seq"])) for one in lines(tmp_path / NAME)]
    assert kept == list(range(kept[0], 3001))
    assert 1900 < kept[0] <= 2001
    again = History(str(tmp_path))
    assert again.oldest == kept[0]
    again.append("late", 1e6)
    again.close()
    file = Database(tmp_path / NAME)
    while file.trim(1e9, 1.0, 1 << 40):
        pass
    assert (file.oldest, file.last) == (3001, 3001)
    file.close()
    again = History(str(tmp_path))
    assert again.append("x", 1e9) == 3002
    again.close()


def test_the_file_keeps_to_its_size_and_the_sums_stay(tmp_path: Path) -> None:
    """A full disk is the worst a history could do; who had what is still known when the records have gone."""
    size = 4 << 20
    file = Database(tmp_path / NAME)
    for step in range(40):
        first = step * 1000
        file.write([row(first + n, float(n), "turn.began", uid=1000, text="z" * 200) for n in range(1, 1001)])
        file.trim(1.0, 1e9, size)
    file.close()
    assert (tmp_path / NAME).stat().st_size < 1.5 * size
    assert lines(tmp_path / NAME)[-1]["seq"] == 40_000
    assert len(lines(tmp_path / NAME)) < 30_000
    day = database.local_day(1.0)[0]
    assert database.report(tmp_path / NAME, day, day, "uid", 1.0)[0]["turns"] == 40_000
    file = Database(tmp_path / NAME)
    while file.trim(1.0, 1e9, size // 4):
        pass
    file.close()
    assert (tmp_path / NAME).stat().st_size <= size // 4 + 65536, "a smaller size gives the space back"


def test_questions_by_user_process_kind_and_time(tmp_path: Path) -> None:
    """What there is for a user or a client, since when; the newest, oldest first."""
    file = Database(tmp_path / NAME)
    kinds = ("client.waiting", "client.ended", "turn.began")
    file.write([row(n, float(n), kinds[n % 3], uid=1000 + n % 2, pid=n // 10) for n in range(1, 101)])
    file.close()
    path = tmp_path / NAME

    def seqs(**query: object) -> list[object]:
        return [one["seq"] for one in database.find(path, Query(**query))]  # type: ignore[arg-type]

    assert seqs(limit=3) == [98, 99, 100]
    assert seqs(after=97) == [98, 99, 100]
    assert seqs(uid=1001, limit=2) == [97, 99]
    assert seqs(pid=3) == list(range(30, 40))
    assert seqs(kind="client.", pid=3) == [n for n in range(30, 40) if n % 3 < 2]
    assert seqs(kind="turn.began", since=10.0, until=18.0) == [11, 14, 17]
    assert seqs(kind="%") == []


def test_the_report_counts_what_is_under_way(tmp_path: Path) -> None:
    """A client that trains for a week is not left out until it ends; after a SIGKILL nothing is counted twice."""
    file = Database(tmp_path / NAME)
    file.write([row(1, 100.0, "client.connected", uid=1000, pid=5, waited=2.5)])
    file.close()
    file = Database(tmp_path / NAME)  # another agent
    file.write([row(2, 160.0, "client.connected", uid=1000, pid=6, waited=0.5)])
    day = database.local_day(100.0)[0]

    def sums(now: float) -> object:
        return database.report(tmp_path / NAME, day, day, "uid", now)

    both = {"uid": 1000, "gpu": 100.0, "waited": 3.0, "longest": 2.5, "clients": 2}
    rest = {"left": 0, "refused": 0, "faults": 0, "forced": 0, "turns": 0, "paused": 0}
    assert sums(200.0) == [{**both, **rest}]
    file.write([row(3, 300.0, "client.ended", uid=1000, pid=5, outcome="ok"), row(4, 400.0, "turn.began", uid=1000)])
    file.write([row(5, 500.0, "client.ended", uid=1000, pid=6, outcome="ended")])
    file.close()
    assert sums(900.0) == [{**both, **rest, "gpu": 400.0, "forced": 1, "turns": 1}]
    assert database.report(tmp_path / NAME, day, day, "day", 0.0) == [
        {"day": day, **{k: v for k, v in both.items() if k != "uid"}, **rest, "gpu": 400.0, "forced": 1, "turns": 1}
    ]
    assert database.report(tmp_path / NAME, "1980-01-01", "1990-01-01", "uid", 0.0) == []
    assert list(Sums.__slots__) == [*[*both][1:], *rest]


def test_the_report_of_jobs(tmp_path: Path) -> None:
    """Across agents; jobs go with the records that they were counted from."""
    path = tmp_path / NAME
    job = {"uid": 1000, "job": "slurm-7"}
    file = Database(path)
    limits = {"threads": 30.0, "memory": {"0": 4096}}
    file.write([row(1, 100.0, "client.connected", pid=5, waited=2.5, limits=limits, **job)])
    file.close()
    file = Database(path)  # another agent
    later = {"threads": 20.0, "memory": {"0": 8192}}
    file.write([row(2, 160.0, "client.connected", pid=6, waited=0.5, limits=later, **job), row(3, 165.0, uid=1)])
    day = database.local_day(100.0)[0]
    rest = {"left": 0, "refused": 0, "faults": 0, "forced": 0, "turns": 0, "paused": 0, "threads": 30.0, "memory": 8192}
    found = {**job, "gpu": 100.0, "waited": 3.0, "longest": 2.5, "clients": 2, **rest}
    assert database.report_jobs(path, day, day, None, 200.0) == [found]
    ends = [row(4, 200.0, "client.ended", uid=1000, pid=5, outcome="ok"),
            row(5, 300.0, "client.ended", uid=1000, pid=6, outcome="ok")]  # fmt: skip
    file.write([*ends, row(6, 310.0, "client.left", uid=2, pid=9, waited=1.0, job="slurm-8")])
    assert database.report_jobs(path, day, day, "slurm-7", 900.0) == [{**found, "gpu": 200.0}]
    assert [one["job"] for one in database.report_jobs(path, day, day, None, 900.0)] == ["slurm-8", "slurm-7"]
    days = 86400.0 * 3
    file.write([row(7, days, "client.left", uid=2, pid=9, waited=1.0, job="slurm-9")])
    file.trim(days, 86400.0, 1 << 40)
    file.close()
    assert [one["job"] for one in database.report_jobs(path, "1970-01-01", "1990-01-01", None, days)] == ["slurm-9"]


def test_what_a_failed_write_has_counted_is_not_counted_twice(tmp_path: Path) -> None:
    """The sums are in the transaction of their records."""
    file = Database(tmp_path / NAME)
    file.write([row(1, 100.0, "client.connected", uid=1000, pid=5, waited=1.0)])
    twice = [row(2, 150.0, "client.ended", uid=1000, pid=5, outcome="ok"), row(2, 150.0)]
    with pytest.raises(sqlite3.IntegrityError):
        file.write(twice)
    file.write(twice[:1])
    file.write(twice[:1])  # as after a commit of which nothing was heard
    file.close()
    day = database.local_day(100.0)[0]
    [sums] = database.report(tmp_path / NAME, day, day, "uid", 1000.0)
    assert (sums["gpu"], sums["clients"]) == (50.0, 1)
