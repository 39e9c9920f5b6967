"""The history: numbers without gap or repetition, for followers, through restarts and SIGKILL."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mpsagent.api import database
from mpsagent.api import history as module
from mpsagent.api.database import NAME, Query
from mpsagent.api.history import History
from tests.api.history_files import lines, numbers
from tests.coroutines import until

DAY = 86400.0

pytestmark = pytest.mark.usefixtures("no_leak")


async def test_records_are_numbered_and_read_from_a_cursor(tmp_path: Path) -> None:
    """A reader that reconnects with its last number misses nothing and sees nothing twice."""
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


async def test_nothing_is_seen_before_it_is_on_disk(tmp_path: Path) -> None:
    """Otherwise a number that a follower has seen could come again with another meaning after a SIGKILL."""
    history = History(str(tmp_path))
    history.append("a", 1.0)
    assert numbers(history) == []
    await history.wait(0)
    assert numbers(history) == [1]
    assert len(lines(tmp_path / NAME)) == 1
    history.close()


async def test_followers_are_woken_and_a_cancelled_one_leaves_no_trace() -> None:
    """Any number may wait; one that goes away must not stay in the list."""
    history = History(None)
    tasks = [asyncio.create_task(history.wait(0)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.sleep(0)
    assert len(history._waiters) == 2
    history.append("a", 1.0)
    await asyncio.gather(*tasks[1:])
    assert not history._waiters


async def test_memory_is_bounded_and_the_oldest_number_says_what_is_missing() -> None:
    """A reader with an old cursor can tell that it has missed something."""
    history = History(None, capacity=10)
    for number in range(25):
        history.append("a", float(number))
    assert history.oldest == 16
    assert numbers(history) == list(range(16, 26))


def test_a_restart_goes_on_with_the_next_number(tmp_path: Path) -> None:
    """Also without a loop, as in a tool or at start-up; the records are there again."""
    for start in (1, 4, 7):
        history = History(str(tmp_path))
        assert numbers(history) == list(range(1, start))
        assert [history.append("a", 0.0) for _ in range(3)] == [start, start + 1, start + 2]
        history.close()
        assert history.notes == []


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
    from mpsagent.api.history import History

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
async def test_closed_while_a_thread_is_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str) -> None:
    """Every record is on disk once, and the descriptor shut, wherever the thread of the last step was at that time."""
    steps: list[Callable[[], None]] = []

    async def in_thread(function: Callable[[bytes], None], data: bytes, *, deadline: float) -> None:
        steps.append(lambda: function(data))
        await asyncio.sleep(deadline)

    monkeypatch.setattr(module, "in_thread", in_thread)
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


async def test_closed_at_any_turn_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the threads there are."""
    monkeypatch.setattr(module, "CLOSE_DEADLINE", 60.0)
    for turns in range(60):
        directory = tmp_path / str(turns)
        history = History(str(directory))
        for number in range(3):
            history.append("a", float(number))
        for _ in range(turns % 20):
            await asyncio.sleep(0)
        history.close()
        assert [record["seq"] for record in lines(directory / NAME)] == [1, 2, 3]


async def test_an_old_record_is_found_while_others_are_written(tmp_path: Path) -> None:
    """A long question must not wait for the writer, nor hold it up."""

    def after(number: int, path: Path) -> list[database.Record]:
        return database.find(path, Query(after=number, limit=2))

    history = History(str(tmp_path), capacity=50)
    for number in range(1000):
        history.append("a", float(number), uid=number % 7)
        if number % 40 == 0:
            await until(lambda: history.newest == history.last)
    await until(lambda: history.newest == 1000)
    assert history.oldest == 1
    assert history.in_memory == 951
    history.append("a", 0.0)
    found = await asyncio.gather(*(history.ask(partial(after, n)) for n in range(0, 900, 30)))
    assert [one[0]["seq"] for one in found] == list(range(1, 901, 30))
    assert (await history.ask(lambda path: database.report(path, "1970-01-01", "9999-12-31", "uid", 0.0))) == []
    history.close()
    with pytest.raises(OSError, match="only in memory"):
        await History(None).ask(partial(after, 0))


@pytest.mark.parametrize("hours", [0.5, 2.0], ids=["after a boot", "later"])
async def test_a_clock_that_was_ahead_takes_no_records_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    """One record of an agent whose clock was 500 days ahead deleted all others. After a boot the machine's own clock
    may be ahead, too; later it is right, and only the agent goes on with what it was at its start."""
    now = time.time()
    history = History(str(tmp_path))
    history.keep = 400 * DAY
    for number in range(module.TRIM_EVERY - 1):
        history.append("turn.began", now + number, uid=1000)
    history.close()
    wall, ran = now + (500 * DAY if hours < 1 else 0.0), 0.0
    monkeypatch.setattr(module.time, "time", lambda: wall)
    monkeypatch.setattr(module.time, "monotonic", lambda: 5.0 + ran)
    history = History(str(tmp_path))
    history.keep = 400 * DAY
    ran = hours * 3600
    for number in range(2):
        history.append("turn.began", now + 500 * DAY + number, uid=1000)
    history.close()
    assert len(lines(tmp_path / NAME)) == module.TRIM_EVERY + 1
