"""The history: numbers without gap or repetition through SIGKILL, full disks and broken files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsagent.system import database
from mpsagent.system import history as module
from mpsagent.system.accounts import Sums
from mpsagent.system.database import NAME, Database, Query
from mpsagent.system.history import History
from tests.system.conftest import Play, until

pytestmark = pytest.mark.usefixtures("no_leak")


def numbers(history: History, cursor: int = 0, limit: int = 100_000) -> list[object]:
    return [record["seq"] for record in history.since(cursor, limit)]


def lines(path: Path, **query: object) -> list[dict[str, object]]:
    """What is in the file."""
    return database.find(path, Query(**{"after": 0, "limit": 1_000_000, **query}))  # type: ignore[arg-type]


def row(number: int, at: float = 0.0, kind: str = "a", **fields: object) -> tuple[database.Row, database.Record]:
    one: database.Record = {"seq": number, "at": at, "kind": kind, **fields}
    return database.row(one), one


def test_records_are_numbered_and_read_from_a_cursor(tmp_path: Path, play: Play) -> None:
    """A reader that reconnects with its last number misses nothing and sees nothing twice."""

    async def scenario() -> None:
        history = History(str(tmp_path))
        assert history.newest == 0
        assert [history.append("client.queued", 1.5 + n, uid=1000 + n) for n in range(5)] == [1, 2, 3, 4, 5]
        await history.wait(4)
        assert history.since(3) == [
            {"seq": 4, "at": 4.5, "kind": "client.queued", "uid": 1003},
            {"seq": 5, "at": 5.5, "kind": "client.queued", "uid": 1004},
        ]
        assert numbers(history, 0, 2) == [1, 2]
        assert numbers(history, 2, 2) == [3, 4]
        assert numbers(history, 5) == []
        assert numbers(history, 99) == []
        history.close()
        assert [record["seq"] for record in lines(tmp_path / NAME)] == [1, 2, 3, 4, 5]

    play(scenario())


def test_nothing_is_seen_before_it_is_on_disk(tmp_path: Path, play: Play) -> None:
    """Otherwise a number that a follower has seen could come again with another meaning after a SIGKILL."""

    async def scenario() -> None:
        history = History(str(tmp_path))
        history.append("a", 1.0)
        assert numbers(history) == []
        await history.wait(0)
        assert numbers(history) == [1]
        assert len(lines(tmp_path / NAME)) == 1
        history.close()

    play(scenario())


def test_followers_are_woken_and_a_cancelled_one_leaves_no_trace(play: Play) -> None:
    """Any number may wait; one that goes away must not stay in the list."""

    async def scenario() -> None:
        history = History(None)
        tasks = [asyncio.create_task(history.wait(0)) for _ in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.sleep(0)
        assert len(history._waiters) == 2
        history.append("a", 1.0)
        await asyncio.gather(*tasks[1:])
        assert not history._waiters

    play(scenario())


def test_memory_is_bounded_and_the_oldest_number_says_what_is_missing(play: Play) -> None:
    """A reader with an old cursor can tell that it has missed something."""

    async def scenario() -> None:
        history = History(None, capacity=10)
        for number in range(25):
            history.append("a", float(number))
        assert history.oldest == 16
        assert numbers(history) == list(range(16, 26))

    play(scenario())


def test_a_restart_goes_on_with_the_next_number(tmp_path: Path) -> None:
    """Also without a loop, as in a tool or at start-up; the records are there again."""
    for start in (1, 4, 7):
        history = History(str(tmp_path))
        assert numbers(history) == list(range(1, start))
        assert [history.append("a", 0.0) for _ in range(3)] == [start, start + 1, start + 2]
        history.close()
        assert history.notes == []


@pytest.mark.parametrize("junk", [b"no database", b"\0" * 70_000, b"SQLite format 3\0" + b"\xff" * 9000, b""])
def test_a_file_that_is_no_database_is_set_aside_and_said(tmp_path: Path, junk: bytes) -> None:
    """After a crash of the machine files hold anything: a new one is begun, and the old one is still there."""
    (tmp_path / NAME).write_bytes(junk)
    (tmp_path / NAME).chmod(0o640)
    history = History(str(tmp_path))
    assert history.append("next", 0.0) == 1
    history.close()
    assert [record["kind"] for record in lines(tmp_path / NAME)] == ["next"]
    aside = [path for path in tmp_path.iterdir() if "broken" in path.name and not path.name.endswith(("-wal", "-shm"))]
    assert [path.read_bytes() for path in aside] == ([junk] if junk else [])
    assert len(history.notes) == len(aside)


def test_numbers_go_on_when_a_file_is_broken_in_the_middle(tmp_path: Path) -> None:
    """What can be read is read, so that a follower's cursor keeps its meaning."""
    history = History(str(tmp_path))
    for number in range(2000):
        history.append("a", float(number), text="x" * 100)
    history.close()
    with open(tmp_path / NAME, "r+b") as file:  # the last page of the table stays, what lies before does not
        file.seek(3 * 4096)
        file.write(b"\xff" * 20 * 4096)
    history = History(str(tmp_path), capacity=5000)
    for _ in range(3):
        history.append("next", 0.0)
    assert history.last == 2003
    assert len(history.notes) == 1
    history.close()
    assert [record["seq"] for record in lines(tmp_path / NAME)] == [2001, 2002, 2003]


def test_a_file_that_breaks_while_it_is_in_use_is_set_aside(tmp_path: Path, play: Play) -> None:
    """The agent goes on, with the next number, and what it had not yet written is in the new file."""

    async def scenario() -> None:
        history = History(str(tmp_path))
        history.append("before", 1.0)
        await history.wait(0)
        history._database.close()  # type: ignore[union-attr]
        history._database = None
        (tmp_path / NAME).write_bytes(b"\xff" * 5000)
        history.append("after", 2.0)
        await history.wait(1)
        assert history.problem is None
        assert len(history.notes) == 1
        assert numbers(history) == [1, 2]
        history.close()

    play(scenario())
    assert [record["seq"] for record in lines(tmp_path / NAME)] == [2]


@pytest.mark.parametrize("how", ["later version", "others may write", "no tables"])
def test_a_file_that_is_not_ours_is_set_aside(tmp_path: Path, how: str) -> None:
    """Of an agent to come, or planted: never trusted and never lost."""
    path = tmp_path / NAME
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version={99 if how == 'later version' else 1 if how == 'no tables' else 0}")
        other.execute("CREATE TABLE mine (x)")
    other.close()
    path.chmod(0o666 if how == "others may write" else 0o640)
    history = History(str(tmp_path))
    assert len(history.notes) == 1
    assert history.append("a", 0.0) == 1
    history.close()
    assert len(lines(path)) == 1
    assert len(list(tmp_path.glob(f"{NAME}.broken-*"))) >= 1


def test_records_of_the_earlier_form_are_taken_over(tmp_path: Path) -> None:
    """Files of a line of JSON each: all records come, in order, and the files go."""
    parts = {"history.jsonl.1": range(1, 1501), "history.jsonl": range(1501, 2001)}
    for name, part in parts.items():
        text = "".join(f'{{"seq":{n},"at":{n}.5,"kind":"turn.began","uid":1000,"gap":0.5}}\n' for n in part)
        (tmp_path / name).write_text(text + "no json\n" + '{"seq":9')
    history = History(str(tmp_path), capacity=100)
    assert history.last == 2000
    assert history.oldest == 1
    assert numbers(history) == list(range(1901, 2001))
    assert history.append("next", 0.0) == 2001
    history.close()
    kept = lines(tmp_path / NAME)
    assert [one["seq"] for one in kept] == list(range(1, 2002))
    assert kept[4] == {"seq": 5, "at": 5.5, "kind": "turn.began", "uid": 1000, "gap": 0.5}
    assert not list(tmp_path.glob("history.jsonl*"))


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
    """Across agents, for a file of before there were any; jobs go with the records that they were counted from."""
    path = tmp_path / NAME
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript(database.MIGRATIONS[0] + "PRAGMA user_version=1;")
    path.chmod(0o640)
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


def test_a_monstrous_record_is_cut(tmp_path: Path) -> None:
    """Texts come from hostile logs and command lines."""
    history = History(str(tmp_path))
    history.append("a", 0.0, text="x" * 100_000, uid=5)
    history.append("b", 0.0, many=list(range(100_000)))
    history.append("c", 0.0, path=Path("/x"))
    found = history.since(0)
    assert found[0]["uid"] == 5
    assert len(str(found[0]["text"])) == 200
    assert found[1] == {"seq": 2, "at": 0.0, "kind": "b", "cut": True}
    history.close()
    assert [record["seq"] for record in lines(tmp_path / NAME)] == [1, 2, 3]


KILLED = textwrap.dedent(
    """
    import asyncio, os, sys
    from mpsagent.system.history import History

    async def main():
        history = History(sys.argv[1], capacity=100_000)
        async def follow():
            cursor = history.newest
            while True:
                await history.wait(cursor)
                for record in history.since(cursor):
                    cursor = record["seq"]
                    os.write(1, b"%d %d\\n" % (cursor, record["token"]))
        task = asyncio.create_task(follow())
        token = int.from_bytes(os.urandom(4), "big")
        while True:
            for _ in range(20):
                history.append("a", 0.0, token=token, text="y" * 300)
            await asyncio.sleep(0.001)  # twenty thousand records a second
    asyncio.run(main())
    """
)


def test_sigkill_at_any_moment_leaves_no_gap_and_no_second_meaning(tmp_path: Path) -> None:
    """Twelve runs on one history, each killed while it writes: everything that a follower has seen is there, under the
    same number, and the numbers have no gap."""
    script = tmp_path / "writer.py"
    script.write_text(KILLED)
    directory = tmp_path / "history"
    rng = random.Random(5)
    seen: dict[int, int] = {}
    root = str(Path(__file__).resolve().parents[2])
    for _ in range(12):
        child = subprocess.Popen(
            [sys.executable, str(script), str(directory)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
        )
        assert child.stdout is not None
        wanted = rng.randrange(1, 400_000)
        output = b""
        while len(output) < wanted % 20_000 + 1:
            output += child.stdout.read1(4096)
        child.send_signal(signal.SIGKILL)
        output += child.stdout.read()
        child.stdout.close()
        child.wait()
        for line in output.split(b"\n")[:-1]:
            number, token = map(int, line.split())
            assert number not in seen, "a number with two meanings"
            seen[number] = token
    history = History(str(directory), capacity=1_000_000)
    records = history.since(0, 1_000_000)
    assert [record["seq"] for record in records] == list(range(1, len(records) + 1))
    tokens = {record["seq"]: record["token"] for record in records}
    assert all(tokens[number] == token for number, token in seen.items())
    assert len(seen) > 1000
    history.close()


@pytest.mark.parametrize("begun", ["before", "after", "never"])
def test_closed_while_a_thread_is_to_write(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch, begun: str
) -> None:
    """Every record is on disk once, and the descriptor shut, wherever the thread of the last step was at that time."""
    steps: list[Callable[[], None]] = []

    async def in_thread(function: Callable[[bytes], None], data: bytes, *, deadline: float) -> None:
        steps.append(lambda: function(data))
        await asyncio.sleep(deadline)

    monkeypatch.setattr(module, "in_thread", in_thread)

    async def scenario() -> None:
        history = History(str(tmp_path))
        for number in range(3):
            history.append("a", float(number))
        await until(lambda: steps)
        history.append("b", 3.0)
        if begun == "before":
            steps[0]()
        history.close()
        if begun == "after":
            steps[0]()
        assert [record["seq"] for record in lines(tmp_path / NAME)] == [1, 2, 3, 4]

    play(scenario())


def test_closed_at_any_turn_of_the_loop(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the threads there are."""
    monkeypatch.setattr(module, "CLOSE_DEADLINE", 60.0)

    async def scenario() -> None:
        for turns in range(60):
            directory = tmp_path / str(turns)
            history = History(str(directory))
            for number in range(3):
                history.append("a", float(number))
            for _ in range(turns % 20):
                await asyncio.sleep(0)
            history.close()
            assert [record["seq"] for record in lines(directory / NAME)] == [1, 2, 3]

    play(scenario())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs to be root to mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
def test_a_full_disk_is_said_and_nothing_within_capacity_is_lost(
    small_disk: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers see everything all the same, and once there is room again the file is complete."""
    monkeypatch.setattr(module, "RETRY_FIRST", 0.02)
    (small_disk / "ballast").write_bytes(b"x" * 900_000)

    async def scenario() -> None:
        history = History(str(small_disk))
        for number in range(500):
            history.append("a", float(number), text="z" * 500)
            if number % 10 == 0:
                await asyncio.sleep(0)
        await until(lambda: history.problem)
        assert "full" in (history.problem or "")
        history.append("b", 0.0)
        assert numbers(history) == list(range(1, 502)), "followers do not wait for the disk"
        (small_disk / "ballast").unlink()
        (small_disk / "ballast").write_bytes(b"")
        subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
        await until(lambda: history.problem is None)
        await until(lambda: not history._pending)
        assert history.lost == 0
        history.close()
        assert [record["seq"] for record in lines(small_disk / NAME)] == list(range(1, 502))

    play(scenario())


@pytest.mark.root
def test_beyond_capacity_the_loss_is_counted(small_disk: Path, play: Play) -> None:
    """Bounded memory even when the disk stays full for ever; the file stays readable."""
    history = History(str(small_disk), capacity=50)
    (small_disk / "ballast").write_bytes(b"")
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/ballast", "bs=4096"], capture_output=True, check=False)

    async def scenario() -> None:
        for number in range(2000):
            history.append("a", float(number), text="z" * 1000)
            await asyncio.sleep(0)
        await until(lambda: history.problem)  # its thread may begin only now
        assert history.lost >= 1000
        assert len(history._pending) <= 50
        (small_disk / "ballast").unlink()
        history.close()
        found = [int(str(record["seq"])) for record in lines(small_disk / NAME)]
        assert found == sorted(set(found))
        assert found[-1] == 2000
        assert len(found) + history.lost == 2000

    play(scenario())


def test_a_directory_that_cannot_be_made_leaves_memory(tmp_path: Path, play: Play) -> None:
    """A file where the directory should be: said, and the agent works on."""
    (tmp_path / "file").write_text("")

    async def scenario() -> None:
        history = History(str(tmp_path / "file" / "history"))
        assert history.problem
        assert history.append("a", 0.0) == 1
        assert numbers(history) == [1]
        history.close()

    play(scenario())


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Nobody can have root write to a file of their choice."""
    (tmp_path / "target").write_text("")
    (tmp_path / NAME).symlink_to(tmp_path / "target")
    history = History(str(tmp_path))
    history.append("a", 0.0)
    history.close()
    assert (tmp_path / "target").read_text() == ""
    assert len(lines(tmp_path / NAME)) == 1


def test_a_disk_that_does_not_answer_does_not_hold_up_the_loop(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program holds the file, so that the write waits for as long as the test likes: it lets go only when the
    loop has had its turns, so a loop that waited too would wait for ever."""
    monkeypatch.setattr(database, "BUSY", 1000.0)
    monkeypatch.setattr(module, "SLOW", 0.2)

    async def scenario() -> None:
        history = History(str(tmp_path), capacity=4000)
        other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        while history.problem is None or len(history._pending) <= 100:
            history.append("a", 0.0, text="z" * 1000)
            await asyncio.sleep(0.001)
        assert history._writing is not None  # it does wait
        assert "does not answer" in history.problem
        assert history.newest == history.last, "followers do not wait for the disk"
        other.execute("COMMIT")
        other.close()
        await until(lambda: not history._pending)
        assert history.problem is None
        history.close()
        assert [one["seq"] for one in lines(tmp_path / NAME)] == list(range(1, history.last + 1))

    play(scenario())


def test_an_old_record_is_found_while_others_are_written(tmp_path: Path, play: Play) -> None:
    """A long question must not wait for the writer, nor hold it up."""

    async def scenario() -> None:
        history = History(str(tmp_path), capacity=50)
        for number in range(1000):
            history.append("a", float(number), uid=number % 7)
            if number % 40 == 0:
                await until(lambda: history.newest == history.last)
        await until(lambda: history.newest == 1000)
        assert history.oldest == 1
        assert history.in_memory == 951
        history.append("a", 0.0)
        found = await asyncio.gather(*(history.find(Query(after=n, limit=2)) for n in range(0, 900, 30)))
        assert [one[0]["seq"] for one, _ in found] == list(range(1, 901, 30))
        assert (await history.report("1970-01-01", "9999-12-31", "uid", 0.0)) == []
        history.close()
        with pytest.raises(OSError, match="only in memory"):
            await History(None).find(Query())

    play(scenario())
