"""A line on the terminal of a process: as its user, on its own terminal alone, and never waiting for it."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsagent.linux.proc import start_time
from mpsagent.system import terminal
from mpsagent.system.control_unit import UnitState
from tests.conformance.rig import USERS

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


def tell(uid: int, pid: int, start: int, text: str) -> str | None:
    async def told() -> str | None:
        return await terminal.Terminals(unit=False).tell(uid, pid, start, text)

    return asyncio.run(told())


def test_a_line_without_what_a_terminal_would_obey() -> None:
    with on_a_terminal() as (master, pid, start):
        assert terminal.write(pid, start, "waits \x1b[2J\n" + "x" * 1000)
        said = seen(master)
        assert said.startswith("\nmpsagent: waits ?[2J?xxx")
        assert len(said) < 500
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
        assert seen(master) == "\nmpsagent: has the GPU now\n"


@root
def test_a_process_that_has_exited_gets_no_line_and_no_traceback() -> None:
    """A refused program may exit at once: the helper failed with an IndexError."""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    process = subprocess.Popen(["true"])
    process.wait()
    assert tell(A, process.pid, 1, "was refused") == "it has no terminal"


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
        return await made.tell(1001, 77, 5, "waits")

    assert asyncio.run(told()) is None
    assert systemd.read == [("mpsagent-tell@1001.service", {"pid": 77, "start": 5, "text": "waits"})]
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
