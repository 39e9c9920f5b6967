"""A line on the terminal of a process, or in its standard error: as its user, and never waiting for either."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from mpsagent.linux.proc import start_time
from mpsagent.system import terminal
from mpsagent.system.control_unit import UnitState
from tests.conformance.rig import USERS
from tests.system.silent_file_system import silent_file_system
from tests.waiting import until

A, B = USERS[:2]
SLEEP = ("sleep", "600")
root = pytest.mark.root


@contextmanager
def on_a_terminal(uid: int | None = None) -> Iterator[tuple[int, int, int]]:
    """The master's side, and a process with its pid and start time."""
    master, slave = pty.openpty()
    os.fchown(slave, -1 if uid is None else uid, -1)
    os.set_blocking(master, False)
    process = subprocess.Popen(SLEEP, stdin=slave, stdout=slave, stderr=slave, user=uid)
    start = start_time(process.pid)
    assert start is not None
    try:
        yield master, process.pid, start
    finally:
        process.kill()
        process.wait()
        os.close(slave)
        os.close(master)


def seen(master: int) -> str:
    try:
        return os.read(master, 4096).decode().replace("\r\r\n", "\n")
    except BlockingIOError:
        return ""


def line_on(master: int) -> str:
    """The next line: the kernel passes it on a little later, and perhaps in parts."""
    parts: list[str] = []

    def whole() -> bool:
        with suppress(BlockingIOError):
            parts.append(os.read(master, 4096).decode())
        return "".join(parts).count("\n") >= 2

    until(whole, "a line")
    return "".join(parts).replace("\r\r\n", "\n")


def tell(uid: int, pid: int, start: int, text: str, *, files: bool = False) -> str | None:
    async def told() -> str | None:
        return await terminal.Terminals(unit=False).tell(uid, pid, start, text, files=files)

    return asyncio.run(told())


def test_a_line_without_what_a_terminal_would_obey() -> None:
    with on_a_terminal() as (master, pid, start):
        assert terminal.write(pid, start, "waits \x1b[2J\n" + "x" * 1000)
        said = line_on(master)
        assert said.startswith("\nmpsagent: waits ?[2J?xxx")
        assert len(said) < terminal.LONGEST + 50
        assert not terminal.write(pid, start + 1, "another process has the number")
        assert seen(master) == ""


def test_a_terminal_that_is_stopped_is_not_waited_for() -> None:
    with on_a_terminal() as (master, pid, start):
        termios.tcflow(master, termios.TCOOFF)
        for _ in range(100):
            terminal.write(pid, start, "x" * 400)
        termios.tcflow(master, termios.TCOON)


def test_without_a_terminal_nothing_is_written(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(SLEEP, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        assert not terminal.write(process.pid, start_time(process.pid) or 0, "not here")
        assert (tmp_path / "out").read_bytes() == b""
    finally:
        process.kill()
        process.wait()


@root
def test_it_is_written_by_the_user_and_on_no_one_elses_terminal() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with on_a_terminal(A) as (master, pid, start):
        assert tell(B, pid, start, "not for B") is not None
        assert tell(0, pid, start, "never by root") is not None
        assert seen(master) == ""
        assert tell(A, pid, start, "has the GPU now") is None
        assert line_on(master) == "\nmpsagent: has the GPU now\n"


@root
def test_a_process_that_has_exited_gets_no_line_and_no_traceback() -> None:
    """A refused program may exit at once: the helper failed with an IndexError."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    process = subprocess.Popen(["true"])
    process.wait()
    assert tell(A, process.pid, 1, "was refused") == terminal.NOWHERE


@root
def test_the_helper_takes_no_group_of_a_process_that_is_another_users() -> None:
    """The number of the process may be another's by now: the helper would have had root's group."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    script = "from mpsagent.system import terminal; terminal.write = print; raise SystemExit(terminal.main())"
    said = json.dumps({"pid": 1, "start": 1, "text": "x", "files": False})
    command = [sys.executable, "-c", script, str(A)]
    done = subprocess.run(command, input=said, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


class Systemd:
    """Says what a unit would have found on its stdin."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.read = directory, list[tuple[str, dict[str, object]]]()

    def start(self, unit: str) -> None:
        (file,) = (self.directory / "tell").iterdir()
        assert file.stat().st_mode & 0o077 == 0
        self.read.append((unit, json.loads(file.read_bytes())))

    def state(self, unit: str) -> UnitState:
        return UnitState("loaded", "inactive", 0, "success")


def test_under_systemd_a_unit_of_the_user_writes_it(tmp_path: Path) -> None:
    systemd = Systemd(tmp_path)

    async def told() -> str | None:
        made = terminal.Terminals(unit=True, systemd=systemd, run_directory=str(tmp_path))
        return await made.tell(1001, 77, 5, "waits", files=True)

    assert asyncio.run(told()) is None
    assert systemd.read == [("mpsagent-tell@1001.service", {"pid": 77, "start": 5, "text": "waits", "files": True})]
    assert list((tmp_path / "tell").iterdir()) == []


def test_a_terminal_that_hangs_delays_its_own_users_lines_alone(tmp_path: Path) -> None:
    told, go = [], threading.Event()

    class Hangs(Systemd):
        def start(self, unit: str) -> None:
            if "@1001" in unit:
                go.wait(60)
            told.append(unit)

    async def both() -> list[str | None]:
        made = terminal.Terminals(unit=True, systemd=Hangs(tmp_path), run_directory=str(tmp_path))
        hangs = [asyncio.ensure_future(made.tell(1001, 77, 5, "waits")) for _ in range(9)]
        await asyncio.sleep(0)
        assert await made.tell(1002, 78, 5, "waits") is None
        assert told == ["mpsagent-tell@1002.service"]
        go.set()
        return await asyncio.gather(*hangs)

    assert asyncio.run(both()).count(None) == terminal.OF_ONE


def test_lines_of_many_users_leave_room_for_what_else_the_agent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent does 256 things at a time and drops what is more: one of 64 users with four processes each, whose lines
    took their time, ended nobody and killed no server that hung."""
    told, go = [], threading.Event()

    class Slow(Systemd):
        def start(self, unit: str) -> None:
            go.wait(60)
            told.append(unit)

    monkeypatch.setattr(terminal.Terminals, "_beside", asyncio.Semaphore(terminal.AT_ONCE))

    async def all_of_them() -> list[str | None]:
        made = terminal.Terminals(unit=True, systemd=Slow(tmp_path), run_directory=str(tmp_path))
        lines = [asyncio.ensure_future(made.tell(100_000 + one, 77, 5, "waits")) for one in range(300)]
        await asyncio.sleep(0)
        under_way = sum(not one.done() for one in lines)
        go.set()
        answers = await asyncio.gather(*lines)
        assert under_way == terminal.MOST
        assert await made.tell(1001, 77, 5, "waits") is None, "there is room again"
        return answers

    answers = asyncio.run(all_of_them())
    assert answers.count(None) == len(told) - 1 == terminal.MOST
    assert set(answers) == {None, f"{terminal.MOST} lines wait to be written"}


# --- files and pipes ------------------------------------------------------------------------------------------------


@contextmanager
def with_stderr(descriptor: int, uid: int = A) -> Iterator[tuple[int, int]]:
    """A process of a user with this standard error, and no terminal; its pid and start time."""
    process = subprocess.Popen(
        SLEEP, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=descriptor, user=uid, group=uid
    )
    start = start_time(process.pid)
    assert start is not None
    try:
        yield process.pid, start
    finally:
        process.kill()
        process.wait()


@contextmanager
def opened(path: Path | str, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def in_a_file(path: Path, descriptor: int, uid: int = A) -> str | None:
    """Write a line for a user's process whose standard error this is; why not, or what the file holds."""
    with with_stderr(descriptor, uid) as (pid, start):
        problem = tell(uid, pid, start, "waits", files=True)
    return path.read_text() if problem is None else problem


APPENDS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
LINE = "\nmpsagent: waits\n"


@root
def test_a_file_to_which_the_program_appends_gets_a_line_if_the_order_says_so(place: Path) -> None:
    log = place / "slurm-7.out"
    log.write_text("epoch 1\n")
    with opened(log, APPENDS) as descriptor:
        os.fchown(descriptor, A, A)
        with with_stderr(descriptor) as (pid, start):
            assert tell(A, pid, start, "waits") == terminal.NOWHERE
            assert tell(A, pid, start + 1, "waits", files=True) == terminal.NOWHERE, "another process has the number"
            assert tell(A, pid, start, "waits\x1b[2J", files=True) is None
        assert log.read_text() == "epoch 1\n\nmpsagent: waits?[2J\n"


@root
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY, os.O_RDONLY | os.O_APPEND, os.O_PATH])
def test_a_file_that_the_program_writes_at_its_own_place_or_only_reads_is_left_alone(place: Path, flags: int) -> None:
    """Its next output would overwrite the line; and a program that has closed its standard error may have a data file
    in its place."""
    data = place / "data"
    data.write_text("data")
    os.chown(data, A, A)
    with opened(data, flags) as descriptor:
        assert in_a_file(data, descriptor) == terminal.NOWHERE
    assert data.read_text() == "data"


@root
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_another_users_file_that_came_from_sudo_is_left_alone(place: Path, mode: int) -> None:
    """The program may write into it, because it was opened for the program. The helper may not, or does not."""
    log = place / "of-root"
    with opened(log, APPENDS) as descriptor:
        log.chmod(mode)
        assert in_a_file(log, descriptor) is not None
    assert log.read_text() == ""


@root
def test_the_file_itself_gets_the_line_whatever_its_name_is_now(place: Path) -> None:
    log, victim = place / "log", place / "victim"
    victim.write_text("")
    os.chown(victim, A, A)
    with opened(log, APPENDS) as descriptor:
        os.fchown(descriptor, A, A)
        log.rename(place / "moved")
        log.symlink_to(victim)
        assert in_a_file(place / "moved", descriptor) == LINE
    assert victim.read_text() == ""


@root
def test_what_is_no_file_and_no_pipe_gets_no_line(place: Path) -> None:
    """A symbolic link itself, devices, sockets, directories, and files of /proc that are another user's."""
    target, link = place / "target", place / "link"
    target.write_text("")
    os.chown(target, A, A)
    link.symlink_to(target)
    os.lchown(link, A, A)
    device = place / "null"  # the user's own, and a write succeeds
    os.mknod(device, 0o20666, os.makedev(1, 3))
    os.chown(device, A, A)
    for path, flags in (
        (link, os.O_PATH | os.O_NOFOLLOW),
        (device, os.O_WRONLY | os.O_APPEND),
        ("/dev/null", os.O_WRONLY | os.O_APPEND),
        (place, os.O_RDONLY),
        ("/proc/1/fd", os.O_RDONLY),
        ("/proc/self/oom_score_adj", os.O_WRONLY | os.O_APPEND),
    ):
        with opened(path, flags) as descriptor:
            assert in_a_file(target, descriptor) == terminal.NOWHERE, path
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert in_a_file(target, theirs.fileno()) == terminal.NOWHERE
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    assert target.read_text() == ""


@root
def test_a_pipe_of_the_user_gets_a_line_and_a_full_one_or_one_of_others_none(place: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    with open(reader, "rb", 0) as end, open(writer, "wb", 0) as descriptor, with_stderr(writer) as (pid, start):
        assert tell(A, pid, start, "waits", files=True) is not None, "it is root's"
        os.fchown(writer, A, A)
        assert tell(A, pid, start, "waits", files=True) is None
        assert end.read(4096) == LINE.encode()
        while descriptor.write(b"x" * 4096):
            pass
        assert tell(A, pid, start, "waits", files=True) == terminal.NOWHERE


@root
def test_a_fifo_without_a_reader_is_not_waited_for(place: Path) -> None:
    fifo = place / "fifo"
    os.mkfifo(fifo, 0o600)
    os.chown(fifo, A, A)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with opened(fifo, os.O_WRONLY) as writer, with_stderr(writer) as (pid, start):
        assert tell(A, pid, start, "waits", files=True) is None
        assert os.read(reader, 4096) == LINE.encode()
        os.close(reader)
        assert tell(A, pid, start, "waits", files=True) == terminal.NOWHERE


@root
def test_a_file_on_a_dead_server_costs_its_own_user_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper waits for the server in the kernel and is killed. The loop never waits."""
    monkeypatch.setattr(terminal, "DEADLINE", 2.0)
    monkeypatch.setattr(terminal, "SLOW", 1.5)
    monkeypatch.setattr(terminal.Terminals, "_paused", {})
    dead = place / "dead"
    dead.mkdir()
    with ExitStack() as stack, opened(place / "log", APPENDS) as other:
        os.fchown(other, B, B)
        served = stack.enter_context(silent_file_system(dead, A))
        descriptor = os.open(served, os.O_WRONLY | os.O_APPEND)
        process = subprocess.Popen(
            SLEEP, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=descriptor, user=A
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        start = start_time(process.pid)
        assert start is not None
        said = tell(A, process.pid, start, "waits", files=True)
        assert said is not None
        assert "did not end within 2 s" in said
        assert tell(A, process.pid, start, "waits", files=True) == "this user's last line took more than 1.5 s"
        assert in_a_file(place / "log", other, B) == LINE
