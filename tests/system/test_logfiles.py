"""Following logs through everything that people and programs do to log files."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from mpsagent.system import log_heads, logfiles
from mpsagent.system.logfiles import Chunk, LogFollower, Position, at_position, find_start, find_time
from tests.coroutines import until

pytestmark = pytest.mark.usefixtures("no_leak")


class Sink:
    """Puts the chunks together again, as a parser for each inode would, and checks that they fit."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.problems: list[str | None] = []
        self._next: dict[int, int] = {}
        self._text: dict[int, bytearray] = defaultdict(bytearray)

    def data(self, chunk: Chunk) -> None:
        if not chunk.fresh:
            assert chunk.offset == self._next[chunk.inode], "a gap or a repetition"
        assert 0 < len(chunk.data) <= logfiles.STEP
        self._next[chunk.inode] = chunk.offset + len(chunk.data)
        self.chunks.append(chunk)

    @property
    def text(self) -> bytes:
        return b"".join(chunk.data for chunk in self.chunks)


def follower(path: Path, sink: Sink, **more: object) -> LogFollower:
    return LogFollower(path, sink.data, on_problem=sink.problems.append, **more)  # type: ignore[arg-type]


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


WRITER = """
import os, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for number in range(int(sys.argv[2])):
    os.write(log, b"%09d %s\\n" % (number, b"x" * 990))
"""


def place(log: LogFollower) -> Position:
    return Position(log._files[-1].inode, log._files[-1].offset)


def start_in(path: Path, **how: int) -> int | None:
    with path.open("rb") as file:
        return find_start(file.fileno(), **how)


def time_in(path: Path, stamp: str) -> int:
    with path.open("rb") as file:
        return find_time(file.fileno(), stamp)


@pytest.mark.parametrize("moves_up", [True, False], ids=["collapse", "hole"])
async def test_a_log_takes_no_more_of_the_disk_than_its_bound_and_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves_up: bool
) -> None:
    """A loop of new clients wrote 42 GB a day. MPS, which never opens its logs again, writes on meanwhile."""
    path, count, times, most = tmp_path / "server.log", 20_000, 3, 8 << 20
    path.touch()
    if not moves_up:  # as on tmpfs, btrfs
        real = log_heads._fallocate
        monkeypatch.setattr(
            log_heads, "_fallocate", lambda fd, mode, size: real(fd, mode, size) if mode & 2 else errno.EOPNOTSUPP
        )
    text, long = bytearray(), list[str | None]()
    log = LogFollower(path, lambda chunk: text.extend(chunk.data), most=lambda: most, on_long=long.append)
    await log.start()
    for time in range(times):
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, str(path), str(count))
        while writer.returncode is None or len(text) < (time + 1) * count * 1001:
            await asyncio.sleep(0.005)
        await until(lambda: not log._drops and path.stat().st_blocks * 512 <= most + (1 << 20))
        assert set(long) == {None}
        assert len(long) > time, "shortened each time"
    assert bytes(text) == times * b"".join(b"%09d %s\n" % (number, b"x" * 990) for number in range(count))
    assert path.read_bytes().endswith(b"%09d %s\n" % (count - 1, b"x" * 990))
    log.close()


async def test_another_file_is_not_cut_through_a_log_of_its_name(tmp_path: Path) -> None:
    """A hard link in a directory that was someone else's; and it is said why the log grows."""
    path, other = tmp_path / "server.log", tmp_path / "other"
    other.write_bytes(b"x" * (12 << 20))
    path.hardlink_to(other)
    long = list[str | None]()
    log = LogFollower(path, lambda chunk: None, most=lambda: 8 << 20, on_long=long.append)
    await log.start()
    await until(lambda: bool(long))
    assert "another name" in (long[0] or "")
    assert other.stat().st_blocks * 512 >= 12 << 20
    log.close()


async def test_what_is_there_and_what_comes_is_delivered(tmp_path: Path) -> None:
    """The ordinary case: old lines first, then each line as it is written, with a position to go on from."""
    path = tmp_path / "control.log"
    path.write_bytes(b"one\n")
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    assert sink.text == b"one\n"
    assert sink.chunks[0].fresh
    with open(path, "ab", buffering=0) as writer:
        for number in range(50):
            writer.write(b"line %d\n" % number)
            await asyncio.sleep(0)
    await until(lambda: sink.text.endswith(b"line 49\n"))
    assert sink.text == path.read_bytes()
    assert place(log) == Position(path.stat().st_ino, path.stat().st_size)
    assert sink.problems == []
    log.close()


async def test_a_large_log_is_read_in_steps_with_the_loop_alive(tmp_path: Path) -> None:
    """A 20 MB log must not hold up the loop: other callbacks run between any two steps."""
    path = tmp_path / "control.log"
    path.write_bytes(b"x" * 99 + b"\n" + os.urandom(20 << 20))
    sink, turns = Sink(), 0
    log = follower(path, sink)
    await log.start()
    while len(sink.text) < path.stat().st_size and turns < 10_000:
        turns += 1
        before = len(sink.chunks)
        await asyncio.sleep(0)
        assert len(sink.chunks) <= before + 2  # a look of the timer's may fall into the same turn
    assert sink.text == path.read_bytes()
    log.close()


async def test_a_file_that_is_created_later_is_read_from_its_beginning(tmp_path: Path) -> None:
    """The agent usually starts before the daemon; a log that is not there yet is no problem to report."""
    path = tmp_path / "control.log"
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    assert log.missing
    append(path, b"first\n")
    await until(lambda: sink.text == b"first\n")
    assert not log.missing
    assert sink.problems == []
    log.close()


async def test_a_directory_that_appears_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inotify on what exists above it, not by the timer (which is put out of action here)."""
    monkeypatch.setattr(logfiles, "CHECK", 3600)
    path = tmp_path / "a" / "b" / "server.log"
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    await asyncio.sleep(0.05)
    path.parent.parent.mkdir()
    await asyncio.sleep(0.05)
    path.parent.mkdir()
    append(path, b"there\n")
    await until(lambda: sink.text == b"there\n")
    shutil.rmtree(path.parent.parent)
    await asyncio.sleep(0.05)
    path.parent.mkdir(parents=True)
    append(path, b"again\n")
    await until(lambda: sink.text == b"there\nagain\n")
    log.close()


async def test_a_renamed_log_is_followed_and_so_is_the_new_one(tmp_path: Path) -> None:
    """MPS never reopens its logs: after a rename the running daemon writes on into the old file, a restarted one into a
    new file at the path. Both count."""
    path = tmp_path / "control.log"
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    with open(path, "ab", buffering=0) as old:
        old.write(b"before\n")
        await until(lambda: sink.text == b"before\n")
        path.rename(tmp_path / "control.log.1")
        old.write(b"after rename\n")
        await until(lambda: sink.text == b"before\nafter rename\n")
        append(path, b"new daemon\n")
        await until(lambda: sink.text.endswith(b"new daemon\n"))
        old.write(b"last words\n")
        await until(lambda: sink.text.endswith(b"last words\n"))
    append(path, b"more\n")
    await until(lambda: sink.text.endswith(b"more\n"))
    inodes = {chunk.inode for chunk in sink.chunks}
    assert inodes == {path.stat().st_ino, (tmp_path / "control.log.1").stat().st_ino}
    log.close()


async def test_old_files_are_let_go_once_a_new_daemon_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a deleted log would keep its disk space for as long as the agent runs."""
    monkeypatch.setattr(logfiles, "LINGER", 0.1)
    path = tmp_path / "control.log"
    path.write_bytes(b"old\n")
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    path.unlink()
    append(path, b"new\n")
    await until(lambda: len(log._files) == 1 and sink.text == b"old\nnew\n")
    assert place(log) == Position(path.stat().st_ino, 4)
    log.close()


async def test_removal_keeps_the_open_file(tmp_path: Path) -> None:
    """A user deletes the log: the daemon writes on into the deleted file, and those lines still count."""
    path = tmp_path / "control.log"
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    with open(path, "ab", buffering=0) as writer:
        writer.write(b"a\n")
        await until(lambda: sink.text == b"a\n")
        path.unlink()
        writer.write(b"b\n")
        await until(lambda: sink.text == b"a\nb\n")
    log.close()


@pytest.mark.parametrize("after", [b"short\n", b"something that is much longer than what was there before\n" * 5])
async def test_truncation_in_place_starts_anew(tmp_path: Path, after: bytes) -> None:
    """copytruncate, or `: > control.log`; also when the file has already grown past the old position again."""
    path = tmp_path / "control.log"
    path.write_bytes(b"twenty bytes of log\n" * 3)
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    await until(lambda: sink.text == b"twenty bytes of log\n" * 3)
    shutil.copy(path, tmp_path / "control.log.1")
    with open(path, "ab", buffering=0) as writer:
        os.truncate(path, 0)
        writer.write(after)
    await until(lambda: sink.text.endswith(after))
    assert sink.chunks[-1].fresh
    assert sink.chunks[-1].offset == 0
    assert sink.text == b"twenty bytes of log\n" * 3 + after
    log.close()


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory"])
async def test_only_regular_files_are_read_and_recovery_is_noticed(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile log directory: a link to /etc/shadow, a FIFO that would block the open. It is said what is wrong, and
    reading begins once it is put right."""
    monkeypatch.setattr(logfiles, "CHECK", 0.2)
    path = tmp_path / "control.log"
    (tmp_path / "secret").write_bytes(b"secret\n")
    if kind == "symlink":
        path.symlink_to(tmp_path / "secret")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    assert sink.chunks == []
    assert len(sink.problems) == 1
    assert str(path) in (sink.problems[0] or "")
    await asyncio.sleep(0.3)
    assert len(sink.problems) == 1, "the same problem is reported once"
    path.rmdir() if kind == "directory" else path.unlink()
    append(path, b"good\n")
    await until(lambda: sink.text == b"good\n")
    await until(lambda: sink.problems[-1] is None)
    log.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to become another user")
async def test_a_log_without_permission_is_a_problem_until_it_is_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried again with back-off; nothing that was written meanwhile is lost."""
    path = tmp_path / "control.log"
    path.write_bytes(b"hidden\n")
    path.chmod(0)
    for directory in (tmp_path, *tmp_path.parents[:-2]):
        directory.chmod(0o755)
    os.seteuid(20001)
    try:
        sink = Sink()
        log = follower(path, sink)
        await log.start()
        assert "Permission denied" in (sink.problems[0] or "")
        os.seteuid(0)
        append(path, b"more\n")
        path.chmod(0o644)
        os.seteuid(20001)
        await until(lambda: sink.text == b"hidden\nmore\n")
        assert sink.problems[-1] is None
        log.close()
    finally:
        os.seteuid(0)


async def test_without_inotify_the_timer_goes_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of inotify instances is limited for each user; other programs may have used them up."""

    def none_left(*_: object, **__: object) -> None:
        raise OSError(24, "no inotify instance left")

    monkeypatch.setattr(logfiles, "Inotify", none_left)
    path = tmp_path / "control.log"
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    append(path, b"seen\n")
    await until(lambda: sink.text == b"seen\n")
    log.close()


async def test_a_checkpoint_is_taken_up_only_for_the_same_file(tmp_path: Path) -> None:
    """After a restart of the agent: same file, go on; another file or a truncated one, from the beginning."""
    path = tmp_path / "control.log"
    path.write_bytes(b"0123456789")
    inode = path.stat().st_ino
    for position, expected in (
        (Position(inode, 4), b"456789"),
        (Position(inode, 10), b""),
        (Position(inode, 11), b"0123456789"),
        (Position(inode + 1, 4), b"0123456789"),
    ):
        sink = Sink()
        log = follower(path, sink, first=at_position(position))
        await log.start()
        assert sink.text == expected
        log.close()


class Writer:
    """Writes numbered lines as MPS does: one open file, for appending."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self.count = 0
        self.reopen()

    def reopen(self) -> None:
        self.close()
        self.fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def line(self) -> None:
        self.count += 1
        os.write(self.fd, b"line %06d\n" % self.count)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


async def test_any_mixture_of_writing_renaming_and_truncating_loses_nothing(tmp_path: Path) -> None:
    """A writer that behaves like MPS and a rotation that behaves like people, in random order with a fixed seed: every
    line arrives once and in order."""
    path = tmp_path / "control.log"
    rng = random.Random(7)
    sink = Sink()
    log = follower(path, sink)
    await log.start()
    writer = Writer(path)

    def all_read() -> bool:
        return sink.text.count(b"\n") == writer.count

    def opened() -> bool:
        return bool(log._files) and log._files[-1].inode == path.stat().st_ino

    for step in range(300):
        choice = rng.random()
        if choice < 0.85:
            for _ in range(rng.randrange(1, 20)):
                writer.line()
        elif choice < 0.9:
            await until(all_read)  # what is cut off before it is read is lost
            os.truncate(path, 0)
        elif choice < 0.95:
            await until(opened)  # nobody renames a log in the very millisecond of its creation
            path.rename(tmp_path / f"control.log.{step}")
            if rng.random() < 0.5:
                writer.line()  # the daemon that is still there, into the old file
            writer.reopen()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    writer.close()
    expected = b"".join(b"line %06d\n" % number for number in range(1, writer.count + 1))
    await until(lambda: len(sink.text) >= len(expected))
    assert sink.text == expected
    log.close()


# --- where to begin --------------------------------------------------------------------------------------------------

START = b"[2026-11-20 23:56:21.414 Control   471] Starting control daemon using socket /tmp/mps/pipe/control\n"
OTHER = b"[2026-11-20 23:56:22.414 Control   471] NEW UI\n"
FALSE = b"[2026-11-20 23:56:22.414 Control   471] Cmd:Starting control daemon using socket /x\n"
BARE = b"Starting control daemon using socket /x\n"


@pytest.mark.parametrize("before", [0, 1, 1000, 6000, 12000])
@pytest.mark.parametrize("behind", [0, 1, 5570, 5571, 5572, 5573, 5574, 5575, 5576, 5577, 5578, 5579, 12000])
def test_the_last_start_is_found_wherever_it_lies(tmp_path: Path, before: int, behind: int) -> None:
    """Also across the border of two blocks; a user's command with the same words is not a start."""
    path = tmp_path / "control.log"
    lead = START + OTHER * before
    path.write_bytes(lead + START + (FALSE + BARE + OTHER) * (behind // 3) + OTHER * (behind % 3))
    assert start_in(path) == len(lead)


def test_every_alignment_to_the_block_border_is_found(tmp_path: Path) -> None:
    """The line shifted byte by byte over the border between two steps of the search."""
    path = tmp_path / "control.log"
    for shift in range(-len(START) - 2, 3):
        tail = b"y" * (logfiles.STEP + shift - 1) + b"\n"
        path.write_bytes(b"x\n" + START + tail)
        assert start_in(path) == 2


def test_no_start_and_a_limit(tmp_path: Path) -> None:
    """None, and not a whole-file search, when the start lies too far back."""
    path = tmp_path / "control.log"
    path.write_bytes(b"")
    assert start_in(path) is None
    path.write_bytes(START + OTHER * 20_000)
    assert start_in(path) == 0
    assert start_in(path, limit=100_000) is None


def test_the_first_line_at_or_after_a_time_is_found(tmp_path: Path) -> None:
    """Compared with a plain search, for every time around every line, with lines that have no time between them."""
    path = tmp_path / "server.log"
    rng = random.Random(3)
    lines = []
    for number in range(400):
        lines.append(b"[2026-11-20 23:%02d:%02d.000 Server   565] x\n" % (number // 60, number % 60))
        lines += [b"continued " * rng.randrange(300) + b"\n" for _ in range(rng.randrange(3))]
    path.write_bytes(b"".join(lines))
    offset = {}
    at = 0
    for line in lines:
        if line.startswith(b"["):
            offset[line[1:24].decode()] = at
        at += len(line)
    for stamp, expected in offset.items():
        assert time_in(path, stamp) == expected
        assert time_in(path, stamp[:-3] + "001") == next((o for o in offset.values() if o > expected), at)
    assert time_in(path, "2020") == 0
    path.write_bytes(b"")
    assert time_in(path, "2020") == 0
