"""The history: numbers without gap or repetition through SIGKILL, full disks and rotation."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mpsagent.system import history as module
from mpsagent.system.history import NAME, History
from tests.system.conftest import Play, until

pytestmark = pytest.mark.usefixtures("no_leak")


def numbers(history: History, cursor: int = 0, limit: int = 100_000) -> list[object]:
    return [record["seq"] for record in history.since(cursor, limit)]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


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


def test_a_torn_last_line_is_cut_off_and_said(tmp_path: Path) -> None:
    """A crash in the middle of a write; the next record must not be glued to the rest of the torn one."""
    history = History(str(tmp_path))
    history.append("whole", 0.0)
    history.close()
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'{"seq":2,"at":0.0,"kind":"to')
    history = History(str(tmp_path))
    assert len(history.notes) == 1
    assert "28 bytes" in history.notes[0]
    assert history.append("next", 0.0) == 2
    history.close()
    assert [record["kind"] for record in lines(tmp_path / NAME)] == ["whole", "next"]


@pytest.mark.parametrize(
    "junk", [b"\0" * 70_000, b"no json\n", b"[1,2]\n{}\n\n", b'{"seq":"x","kind":1}\n', b"\xff\xfe\n"]
)
def test_garbage_in_the_file_is_left_out_and_said(tmp_path: Path, junk: bytes) -> None:
    """After a crash of the machine files hold anything; the numbers still go on."""
    history = History(str(tmp_path))
    history.append("good", 0.0)
    history.close()
    with open(tmp_path / NAME, "ab") as file:
        file.write(junk)
    history = History(str(tmp_path))
    assert history.notes
    assert history.append("next", 0.0) == 2
    assert numbers(history) == [1, 2]
    history.close()


def test_rotation_keeps_five_files_and_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded disk space; after a restart the records of several files are in memory again."""
    monkeypatch.setattr(module, "FILE_SIZE", 2000)
    history = History(str(tmp_path), capacity=1000)
    for number in range(300):
        history.append("a", float(number), text="x" * 20)
    history.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"{NAME}.{n}" for n in (1, 2, 3, 4)] or files == [NAME, *(f"{NAME}.{n}" for n in (1, 2, 3, 4))]
    again = History(str(tmp_path), capacity=1000)
    found = numbers(again)
    assert found == list(range(301 - len(found), 301))
    assert len(found) > 100
    assert again.append("next", 0.0) == 301
    again.close()
    small = History(str(tmp_path), capacity=10)
    assert numbers(small) == list(range(292, 302))
    small.close()


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


def test_closed_at_any_turn_of_the_loop(tmp_path: Path, play: Play) -> None:
    """The same with the threads there are."""

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
    """A real file system with 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs to be root to mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
def test_a_full_disk_is_said_and_nothing_within_capacity_is_lost(
    small_disk: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers see everything all the same, and once there is room again the file is complete, also the line that
    the full disk has cut."""
    monkeypatch.setattr(module, "RETRY_FIRST", 0.02)
    (small_disk / "ballast").write_bytes(b"x" * 40_000)

    async def scenario() -> None:
        problems: list[str | None] = []
        history = History(str(small_disk), on_problem=problems.append)
        for number in range(500):
            history.append("a", float(number), text="z" * 100)
            if number % 10 == 0:
                await asyncio.sleep(0)
        await until(lambda: problems)
        assert "No space left" in (problems[0] or "")
        assert history.problem is not None
        history.append("b", 0.0)
        assert numbers(history) == list(range(1, 502)), "followers do not wait for the disk"
        (small_disk / "ballast").unlink()
        (small_disk / "ballast").write_bytes(b"")
        subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
        await until(lambda: history.problem is None)
        await until(lambda: not history._pending)
        assert problems[-1] is None
        assert history.lost == 0
        history.close()
        assert [record["seq"] for record in lines(small_disk / NAME)] == list(range(1, 502))

    play(scenario())


@pytest.mark.root
def test_beyond_capacity_the_loss_is_counted(small_disk: Path, play: Play) -> None:
    """Bounded memory even when the disk stays full for ever; the file stays readable."""
    (small_disk / "ballast").write_bytes(b"x" * 62_000)

    async def scenario() -> None:
        history = History(str(small_disk), capacity=50)
        for number in range(200):
            history.append("a", float(number), text="z" * 100)
            await asyncio.sleep(0)
        assert history.lost >= 100
        assert len(history._pending) <= 50
        (small_disk / "ballast").unlink()
        history.close()
        found = [int(str(record["seq"])) for record in lines(small_disk / NAME)]
        assert found == sorted(set(found))
        # What a thread was writing when the disk was full stays in its place at the head of the queue.
        assert found[-40:] == list(range(161, 201))
        assert len(found) + history.lost == 200

    play(scenario())


def test_a_directory_that_cannot_be_made_leaves_memory(tmp_path: Path, play: Play) -> None:
    """A file where the directory should be: said, and the agent works on."""
    (tmp_path / "file").write_text("")

    async def scenario() -> None:
        problems: list[str | None] = []
        history = History(str(tmp_path / "file" / "history"), on_problem=problems.append)
        assert problems
        assert history.append("a", 0.0) == 1
        assert numbers(history) == [1]
        history.close()

    play(scenario())


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path, play: Play) -> None:
    """Nobody can have root append to a file of his choice."""
    (tmp_path / "target").write_text("")
    (tmp_path / NAME).symlink_to(tmp_path / "target")

    async def scenario() -> None:
        history = History(str(tmp_path))
        history.append("a", 0.0)
        await asyncio.sleep(0.01)
        assert history.problem is not None
        assert (tmp_path / "target").read_text() == ""
        history.close()

    play(scenario())


async def _lags(history: History, seconds: float) -> float:
    """The longest time the loop was held up while records came in."""
    loop, longest = asyncio.get_running_loop(), 0.0
    until = loop.time() + seconds
    while loop.time() < until:
        before = loop.time()
        history.append("a", before, text="z" * 1000)
        await asyncio.sleep(0.001)
        longest = max(longest, loop.time() - before)
    return longest


def test_a_disk_that_does_not_answer_does_not_hold_up_the_loop(tmp_path: Path, play: Play) -> None:
    """The loop answers in milliseconds; a write that waits for the disk would cost them. The file is a FIFO that nobody
    reads, so that the write waits for as long as the test likes."""
    fifo = tmp_path / NAME
    os.mkfifo(fifo, 0o640)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    async def scenario() -> None:
        history = History(None, capacity=4000)
        history._path = fifo
        longest = await _lags(history, 2.0)
        assert history._writing is not None  # it does wait
        assert longest < 0.5
        assert len(history._pending) > 100
        while os.read(reader, 1 << 16):  # it is read again: the rest goes out
            await asyncio.sleep(0.01)
            if not history._pending:
                break
        assert not history._pending
        history.close()

    try:
        play(scenario())
    finally:
        os.close(reader)
