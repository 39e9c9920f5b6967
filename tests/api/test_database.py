"""The file of the history: what it keeps and for how long, questions to it, the report."""

from __future__ import annotations

import sqlite3
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from mpsagent.api import database
from mpsagent.api import history as history_module
from mpsagent.api.database import NAME, Database, Query
from mpsagent.api.history import History
from mpsagent.core.model import Use
from mpsagent.core.sessions import Session
from tests.api.history_files import lines, row, write

pytestmark = pytest.mark.usefixtures("no_leak")


def test_old_records_go_by_age_and_the_last_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is where the next agent goes on."""
    monkeypatch.setattr(history_module, "BELIEVED", 0.0)
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


def test_the_file_keeps_to_its_size_and_sessions_stay(tmp_path: Path) -> None:
    """A full disk is the worst a history could do; who had what is still known when the records have gone."""
    size = 4 << 20
    file = Database(tmp_path / NAME)
    write(file, row(1, 1.0, "turn.began", uid=1000))
    for step in range(40):
        first = step * 1000 + 1
        write(file, *(row(first + n, float(n), "a", uid=1000, text="z" * 200) for n in range(1, 1001)))
        file.trim(1.0, 1e9, size)
    file.close()
    assert (tmp_path / NAME).stat().st_size < 1.5 * size
    assert lines(tmp_path / NAME)[-1]["seq"] == 40_001
    assert len(lines(tmp_path / NAME)) < 30_000
    day = database.local_day(1.0)[0]
    assert database.report(tmp_path / NAME, day, day, "uid", 1.0)[0]["turns"] == 1
    file = Database(tmp_path / NAME)
    while file.trim(1.0, 1e9, size // 4):
        pass
    file.close()
    assert (tmp_path / NAME).stat().st_size <= size // 4 + 65536, "a smaller size gives the space back"


def test_who_comes_and_goes_pushes_out_no_other_users_sessions(tmp_path: Path) -> None:
    """Of too many the oldest go of the user who has most."""
    path, size = tmp_path / NAME, 1 << 20
    file = Database(path)
    write(file, row(1, 1.0, "client.connected", uid=1, pid=1), row(2, 2.0, "client.ended", uid=1, pid=1, outcome="ok"))
    for first in range(3, 40_000, 1000):
        write(file, *(row(first + n, 3.0, "client.left", uid=2, pid=n, waited=1.0) for n in range(1000)))
        file.trim(3.0, 1e9, size)
    while file.trim(3.0, 1e9, size):
        pass
    file.close()
    assert path.stat().st_size <= 1.1 * size
    day = database.local_day(1.0)[0]
    mine, other = database.report(path, day, day, "uid", 3.0)
    assert (mine["gpu"], mine["clients"]) == (1.0, 1)
    assert 0 < other["left"] < 20_000


def test_programs_that_start_and_exit_all_day_push_out_records_of_their_own_user_only(tmp_path: Path) -> None:
    """Orders, faults and ends by mpsagent stay, even those of that user; no key makes them shorter than its time."""
    path, size = tmp_path / NAME, 1 << 20
    file = Database(path)
    kept = [
        row(1, 1.0, "client.connected", uid=1, pid=1),
        row(2, 1.0, "client.ended", uid=1, pid=1, outcome="ok"),
        row(3, 1.0, "policy.loaded", digest="x"),
        row(4, 1.0, "client.end_ordered", uid=2, pid=2, by=0),
        row(5, 1.0, "action.done", uid=2, pid=2, action="TerminateClient"),
        row(6, 1.0, "client.ended", uid=2, pid=2, outcome="ended"),
        row(7, 1.0, "server.fault", uid=2, server=3),
    ]
    write(file, *kept)
    for first in range(10, 40_000, 1000):
        kinds = ("client.waiting", "client.connected", "client.used", "client.ended")
        write(
            file,
            *(row(first + n, 3.0, kinds[n % 4], uid=2, pid=n // 4, outcome="ok", job="z" * 50) for n in range(1000)),
        )
        file.trim(3.0, 1e9, size)
    while file.trim(3.0, 1e9, size):
        pass
    file.close()
    assert path.stat().st_size <= 1.1 * size
    found = [one["seq"] for one in database.find(path, database.Query(limit=100_000))]
    assert found[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert 100 < len(found) < 20_000


def test_orders_in_a_loop_push_out_no_other_users_records(tmp_path: Path) -> None:
    path, size = tmp_path / NAME, 1 << 20
    file = Database(path)
    write(file, row(1, 1.0, "client.connected", uid=1, pid=1), row(2, 1.0, "policy.loaded", digest="x"))
    for first in range(10, 20_000, 1000):
        write(file, *(row(first + n, 3.0, "client.end_ordered", uid=2, pid=n, text="z" * 99) for n in range(1000)))
        file.trim(3.0, 1e9, size)
    while file.trim(3.0, 1e9, size):
        pass
    file.close()
    assert path.stat().st_size <= 1.1 * size
    assert [one["seq"] for one in database.find(path, database.Query(limit=100_000))][:2] == [1, 2]


def test_a_file_of_the_version_before_gets_sessions_from_its_records(tmp_path: Path) -> None:
    """An upgrade loses nothing that is on record."""
    path = tmp_path / NAME
    file = Database(path)
    job = {"uid": 1000, "pid": 5, "job": "slurm-7"}
    write(
        file, row(1, 100.0, "client.connected", waited=2.5, **job), row(2, 160.0, "client.ended", outcome="ok", **job)
    )
    write(file, row(3, 170.0, "client.waiting", uid=1001, pid=6))
    file.close()
    with sqlite3.connect(path) as other:
        for table in ("days", "working", "job_days", "job_working"):
            other.execute(f"CREATE TABLE {table} (x)")
        other.execute("DROP TABLE sessions")
        other.execute("PRAGMA user_version=3")
    other.close()
    history = History(str(tmp_path))
    assert (history.notes, history.last, list(history.sessions.open)) == ([], 3, [("client", None, 6)])
    history.close()
    day = database.local_day(100.0)[0]
    [found] = database.report(path, day, day, "job", 200.0)
    assert (found["job"], found["gpu"], found["waited"]) == ("slurm-7", 60.0, 2.5)


def test_questions_by_user_process_kind_and_time(tmp_path: Path) -> None:
    """What there is for a user or a client, since when; the newest, oldest first."""
    file = Database(tmp_path / NAME)
    kinds = ("client.waiting", "client.ended", "turn.began")
    write(file, *(row(n, float(n), kinds[n % 3], uid=1000 + n % 2, pid=n // 10) for n in range(1, 101)))
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
    write(file, row(1, 100.0, "client.connected", uid=1000, pid=5, waited=2.5))
    file.close()
    file = Database(tmp_path / NAME)  # another agent
    write(file, row(2, 160.0, "client.connected", uid=1000, pid=6, waited=0.5))
    day = database.local_day(100.0)[0]

    def sums(now: float) -> object:
        return database.report(tmp_path / NAME, day, day, "uid", now)

    both = {"uid": 1000, "gpu": 100.0, "waited": 3.0, "longest": 2.5, "clients": 2}
    rest = {"left": 0, "refused": 0, "faults": 0, "forced": 0, "turns": 0, "paused": 0}
    assert list(database.SUMS) == [*[*both][1:], *rest]
    rest |= dict.fromkeys(database.USED, 0)
    assert sums(200.0) == [{**both, **rest}]
    write(file, row(3, 300.0, "client.ended", uid=1000, pid=5, outcome="ok"), row(4, 400.0, "turn.began", uid=1000))
    write(file, row(5, 500.0, "client.ended", uid=1000, pid=6, outcome="ended"))
    file.close()
    assert sums(900.0) == [{**both, **rest, "gpu": 400.0, "forced": 1, "turns": 1}]
    assert database.report(tmp_path / NAME, day, day, "day", 0.0) == [
        {"day": day, **{k: v for k, v in both.items() if k != "uid"}, **rest, "gpu": 400.0, "forced": 1, "turns": 1}
    ]
    assert database.report(tmp_path / NAME, "1980-01-01", "1990-01-01", "uid", 0.0) == []


def test_what_was_used_is_in_the_report(tmp_path: Path) -> None:
    """Of who has ended and, not yet on record, of who is at work; over midnight by time. What is said after the end
    counts for that process, and not for the next one with its number."""
    path, job = tmp_path / NAME, {"uid": 1000, "job": "slurm-7"}
    use = {"uid": 1000, "seconds": 60.0, "busy": 30.0, "energy": 9000.0, "shared": False}
    midnight = database.local_day(1000.0)[1]
    file = Database(path)
    write(
        file, row(1, midnight - 80, "client.connected", pid=5, waited=0.0, **job),
        row(2, midnight + 20, "client.used", pid=5, over=False, **use),
        row(3, midnight + 20, "client.ended", pid=5, outcome="ok", **job),
        row(4, midnight + 20, "client.connected", pid=5, waited=0.0, **job),
        row(5, midnight + 21, "client.used", pid=5, over=True, **{**use, "energy": 1000.0}),
    )  # fmt: skip
    before, after = (database.local_day(at)[0] for at in (midnight - 1, midnight + 1))
    live = {4: Use(0.9, None, 20.0, 18.0, 500.0, shared=True)}

    def rows(by: str) -> list[Any]:
        kept = database.report(path, before, after, by, midnight + 40, None, live)
        return [[one[name] for name in ("counted", "busy", "energy", "shared")] for one in kept]

    assert rows("uid") == rows("job") == [[140.0, 78.0, 10_500.0, True]]
    assert rows("day") == [[96.0, 48.0, 8_000.0, False], [44.0, 30.0, 2_500.0, True]]
    file.close()


@pytest.mark.parametrize(
    ("rule", "outcome", "word"),
    [("", "ok", "finished"), ("", "faulted", "fault"), ("", "lost", "lost"), ("", "unknown", "unknown"),
     ("order", "ended", "order"), ("drain", "ended", "drain"), ("user.bob.max_runtime", "ended", "max_runtime"),
     ("limits.on_limit_exceeded", "ended", "on_limit_exceeded"), ("turn.time_limit", "ended", "turn"),
     ("timeouts.fault_recovery", "ended", "fault"),
     ("turn.time_limit", "ok", "finished")],
)  # fmt: skip
def test_how_a_job_ended_is_how_its_last_client_did(tmp_path: Path, rule: str, outcome: str, word: str) -> None:
    file, job = Database(tmp_path / NAME), {"uid": 1000, "job": "slurm-7"}
    write(file, *(row(pid, 100.0, "client.connected", pid=pid, waited=0.0, **job) for pid in (1, 2, 3)))
    if rule:
        write(file, row(4, 110.0, "action.done", action="SignalClient", pid=2, uid=1000, rule=rule, reason="so"))
    write(file, row(5, 120.0, "client.ended", pid=1, outcome="lost", **job))
    write(file, row(6, 121.0, "client.ended", pid=3, outcome="ok", **job))
    day = database.local_day(100.0)[0]
    assert [one["ended"] for one in database.report(tmp_path / NAME, day, day, "job", 130.0)] == ["running"]
    write(file, row(7, 130.0, "client.ended", pid=2, outcome=outcome, **job))
    assert [one["ended"] for one in database.report(tmp_path / NAME, day, day, "job", 140.0)] == [word]
    file.close()


def test_the_report_of_jobs(tmp_path: Path) -> None:
    """Across agents; jobs go with the records that they were counted from."""
    path = tmp_path / NAME
    job = {"uid": 1000, "job": "slurm-7"}
    file = Database(path)
    limits = {"threads": 30.0, "memory": {"0": 4096}}
    write(file, row(1, 100.0, "client.connected", pid=5, waited=2.5, limits=limits, **job))
    file.close()
    file = Database(path)  # another agent
    later = {"threads": 20.0, "memory": {"0": 8192}}
    write(file, row(2, 160.0, "client.connected", pid=6, waited=0.5, limits=later, **job), row(3, 165.0, uid=1))
    day = database.local_day(100.0)[0]
    rest = {"left": 0, "refused": 0, "faults": 0, "forced": 0, "turns": 0, "paused": 0, "threads": 30.0, "memory": 8192,
            "ended": "running", **dict.fromkeys(database.USED, 0)}  # fmt: skip
    found = {**job, "gpu": 100.0, "waited": 3.0, "longest": 2.5, "clients": 2, **rest}
    assert database.report(path, day, day, "job", 200.0) == [found]
    ends = [row(4, 200.0, "client.ended", uid=1000, pid=5, outcome="ok"),
            row(5, 300.0, "client.ended", uid=1000, pid=6, outcome="ok")]  # fmt: skip
    write(file, *ends, row(6, 310.0, "client.left", uid=2, pid=9, waited=1.0, job="slurm-8"))
    assert database.report(path, day, day, "job", 900.0, "slurm-7") == [{**found, "gpu": 200.0, "ended": "finished"}]
    assert [one["job"] for one in database.report(path, day, day, "job", 900.0)] == ["slurm-8", "slurm-7"]
    days = 86400.0 * 3
    write(file, row(7, days, "client.left", uid=2, pid=9, waited=1.0, job="slurm-9"))
    file.trim(days, 86400.0, 1 << 40)
    file.close()
    assert [one["job"] for one in database.report(path, "1970-01-01", "1990-01-01", "job", days)] == ["slurm-9"]


def test_a_report_of_very_many_jobs_takes_the_memory_of_those_it_is_about(tmp_path: Path) -> None:
    """Any user may ask for it, and the api has 256 MB: of a year with 670,000 jobs it took 791."""
    file, count = Database(tmp_path / NAME), 20 * database.MOST_JOBS
    clients = (
        Session(n, "client", None, 1000, n, n, n, n + 0.5, "ok", None, f"slurm-{n}") for n in range(1, count + 1)
    )
    file.save(map(database.session_row, clients))
    file.close()
    day = database.local_day(1.0)[0]
    tracemalloc.start()
    rows = database.report(tmp_path / NAME, day, day, "job", float(count))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one["job"] for one in rows] == [f"slurm-{n}" for n in range(count, count - database.MOST_JOBS, -1)]
    assert most < 8 << 20


def test_what_a_failed_write_has_told_is_not_told_twice(tmp_path: Path) -> None:
    """Sessions are in the transaction of their records."""
    file = Database(tmp_path / NAME)
    write(file, row(1, 100.0, "client.connected", uid=1000, pid=5, waited=1.0))
    twice = [row(2, 150.0, "client.ended", uid=1000, pid=5, outcome="ok"), row(2, 150.0)]
    with pytest.raises(sqlite3.IntegrityError):
        write(file, *twice)
    write(file, *twice[:1])
    write(file, *twice[:1])  # as after a commit of which nothing was heard
    file.close()
    day = database.local_day(100.0)[0]
    [sums] = database.report(tmp_path / NAME, day, day, "uid", 1000.0)
    assert (sums["gpu"], sums["clients"]) == (50.0, 1)


def test_time_with_the_gpu_is_divided_at_midnight_and_pauses_are_none_of_it(tmp_path: Path) -> None:
    """Also where a pause lasts over midnight, or a client ends in it; forty-six processes do not have the GPU forty-six
    times; and a fault of which nobody knows whose it is belongs to no user."""
    path = tmp_path / NAME
    day, end = database.local_day(1e9)
    file = Database(path)
    write(
        file,
        row(1, end - 50, "client.connected", uid=1, pid=1, job="train"),
        row(2, end - 45, "client.connected", uid=1, pid=2),
        row(3, end - 40, "user.paused", uid=1, clients=2),
        row(4, end - 30, "client.connected", uid=2, pid=3, job="train"),
        row(5, end - 10, "client.ended", uid=2, pid=3, outcome="ok"),
        row(6, end + 30, "client.ended", uid=1, pid=2, outcome="ended"),
        row(7, end + 30, "user.resumed", uid=1, seconds=70.0),
        row(8, end + 50, "client.ended", uid=1, pid=1, outcome="faulted"),
        row(9, end + 60, "server.fault", server=9),
    )
    file.close()
    then = database.local_day(end)[0]

    def had(by: str, first: str = day) -> list[tuple[object, ...]]:
        rows = database.report(path, first, then, by, end + 100)
        return [(one[by], one["gpu"], one["paused"], one["forced"], one["faults"]) for one in rows]

    assert had("uid") == [(1, 30.0, 70.0, 1, 1), (2, 20.0, 0, 0, 0)]
    assert had("day") == [(day, 30.0, 40.0, 0, 0), (then, 20.0, 30.0, 1, 1)]
    assert had("uid", then) == [(1, 20.0, 30.0, 1, 1)]
    assert had("job") == [("train", 30.0, 70.0, 0, 1), ("train", 20.0, 0, 0, 0)]


def test_sessions_by_time_user_and_kind(tmp_path: Path) -> None:
    """Those of which a part lies in the time, in pages; several kinds at once."""
    path = tmp_path / NAME
    file = Database(path)
    write(
        file,
        row(1, 10.0, "turn.began", uid=1),
        row(2, 10.0, "client.connected", uid=1, pid=5),
        row(3, 20.0, "client.ended", uid=1, pid=5, outcome="ok"),
        row(4, 30.0, "client.waiting", uid=2, pid=6),
        row(5, 40.0, "server.fault", server=9),
    )
    file.close()

    def numbers(**query: object) -> list[int]:
        return [one.number for one in database.sessions(path, Query(**query))]  # type: ignore[arg-type]

    assert (numbers(), numbers(limit=1), numbers(after=0, limit=2)) == ([1, 2, 4, 5], [5], [1, 2])
    assert (numbers(since=15.0, until=25.0), numbers(since=20.5)) == ([1, 2], [1, 4, 5])
    assert (numbers(uid=1), numbers(pid=6), numbers(kind="client,fault")) == ([1, 2], [4], [2, 4, 5])
    found = database.find(path, Query(kind="turn.,server."))
    assert [one["seq"] for one in found] == [1, 5]


def test_a_pause_at_one_gpu_takes_nothing_from_the_work_at_another(tmp_path: Path) -> None:
    """alice works on gpu1 for an hour, and is paused on gpu0 for forty minutes of it: she had a GPU for an hour."""
    path = tmp_path / NAME
    day, end = database.local_day(1e9)
    began = end - 7200
    file = Database(path)
    write(
        file,
        row(1, began, "client.connected", uid=1, pid=1, instance="gpu0", job="train"),
        row(2, began, "client.connected", uid=1, pid=2, instance="gpu1", job="train"),
        row(3, began + 600, "user.paused", uid=1, clients=1, instance="gpu0"),
        row(4, began + 3000, "user.resumed", uid=1, seconds=2400.0, instance="gpu0"),
        row(5, began + 3000, "client.ended", uid=1, pid=1, outcome="ok", instance="gpu0"),
        row(6, began + 3600, "client.ended", uid=1, pid=2, outcome="ok", instance="gpu1"),
        row(7, began + 3600, "user.paused", uid=1, clients=1, instance="gpu2"),
    )
    file.close()
    for by in ("uid", "day", "job"):
        [sums] = database.report(path, day, day, by, end)
        assert (sums["gpu"], sums["paused"]) == (3600.0, 0.0), by
