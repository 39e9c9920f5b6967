"""The control daemon as a process: what a supervisor does, and the proof that a process is the one it should be.

The pid file has mode 0666 and lies in a directory that every user may enter, so its number is only a hint. A process is
believed to be our control daemon by its owner, its command line and the pipe directory in its environment.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from mpsagent.system.processes import Process
from mpsagent.system.threads import in_thread

PROGRAM = "nvidia-cuda-mps-control"
PID_FILE = "nvidia-cuda-mps-control.pid"
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"
DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps"
PROOF_DEADLINE = 2.0
"""Seconds: reading another process's command line waits for its memory map, which a dying process may hold."""


@dataclass(frozen=True, slots=True)
class Running:
    """A control daemon that was proved to be the one of ``pipe_directory``; ``how`` says how it was found."""

    process: Process
    pipe_directory: str
    log_directory: str
    devices: str | None
    """Its CUDA_VISIBLE_DEVICES."""
    threads: str | None
    """Its CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: the default that it started with."""
    multiuser: bool
    how: str

    @property
    def pid(self) -> int:
        return self.process.pid


class TroubleKind(StrEnum):
    ABSENT = "not running"
    UNSAFE = "not safe to take over"
    FAILED = "did not start"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why there is no control daemon to work with; ``commands`` clean up, for a person to run."""

    kind: TroubleKind
    text: str
    commands: tuple[str, ...] = ()


class ControlSupervisor(Protocol):
    """Starts, adopts and ends the control daemon of one instance. Nothing here raises or blocks the loop."""

    @property
    def running(self) -> Running | None:
        """The daemon that is held, if any."""
        ...

    async def start(self, environment: Mapping[str, str], threads: float) -> Running | Trouble:
        """Starts a daemon; ``threads`` is the percentage of the floor, in force from its first moment."""
        ...

    async def adopt(self) -> Running | Trouble:
        """Takes over a daemon that runs already."""
        ...

    async def stop(self, grace: float = 5.0) -> str | None:
        """Ends it by SIGTERM, after ``grace`` seconds SIGKILL; its servers exit with it. None, or what went wrong."""
        ...

    def kill(self) -> str | None:
        """SIGKILL. None when it was sent, else why not."""
        ...

    def close(self) -> None:
        """Lets go; the daemon runs on."""
        ...


class Held:
    """The daemon that a supervisor holds: common to all kinds of supervisors."""

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        self._on_gone = on_gone
        self._running: Running | None = None
        self._ended = asyncio.Event()

    @property
    def running(self) -> Running | None:
        return self._running

    def hold(self, running: Running) -> Running:
        self.close()
        self._running = running
        self._ended.clear()
        running.process.when_gone(lambda: self._gone(running))
        return running

    def kill(self) -> str | None:
        if self._running is None:
            return "no control daemon is held"
        return self._running.process.send(signal.SIGKILL)

    async def stop(self, grace: float = 5.0) -> str | None:
        running = self._running
        if running is None:
            return None
        for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            problem = running.process.send(number)
            if problem is not None and running.process.alive:
                return problem
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), wait)
            if self._running is not running:
                return None
        return f"control daemon {running.pid} is still there after SIGKILL"

    def close(self) -> None:
        if self._running is not None:
            self._running.process.close()
            self._running = None

    def _gone(self, running: Running) -> None:
        if self._running is running:
            self.close()
            self._ended.set()
            self._on_gone(running.pid)


# --- proof -----------------------------------------------------------------------------------------------------------


def read_pid_file(pipe_directory: str) -> int | None:
    """The number in the pid file: a hint."""
    try:
        fd = os.open(Path(pipe_directory, PID_FILE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        text = os.read(fd, 32).strip()
        return int(text) if text.isdigit() and len(text) < 11 else None
    except OSError:
        return None
    finally:
        os.close(fd)


async def prove(pid: int, pipe_directory: str, how: str, program: str = PROGRAM) -> Running | Trouble:
    """What process ``pid`` is, with a deadline."""
    try:
        return await in_thread(_prove, pid, pipe_directory, how, program, deadline=PROOF_DEADLINE)
    except TimeoutError:
        text = f"process {pid}: /proc/{pid} could not be read within {PROOF_DEADLINE:g} s"
        return Trouble(TroubleKind.UNSAFE, text, (f"kill -KILL {pid}",))


async def search(pipe_directory: str, program: str = PROGRAM) -> Running | Trouble:
    """The control daemon of ``pipe_directory``: by its pid file, otherwise among all processes of the machine."""
    pid = read_pid_file(pipe_directory)
    absent = Trouble(TroubleKind.ABSENT, f"no control daemon runs on {pipe_directory}")
    if pid is not None:
        found = await prove(pid, pipe_directory, "its pid file", program)
        if isinstance(found, Running) or found.kind is TroubleKind.UNSAFE:
            return found
    try:
        return await in_thread(_search, pipe_directory, program, deadline=2 * PROOF_DEADLINE) or absent
    except TimeoutError:
        return absent


def _search(pipe_directory: str, program: str) -> Running | Trouble | None:
    trouble = None
    for name in os.listdir("/proc"):  # noqa: PTH208 - names only, thousands of them
        if name.isdigit():
            found = _prove(int(name), pipe_directory, "its command line; the pid file is missing or wrong", program)
            if isinstance(found, Running):
                return found
            if found.kind is TroubleKind.UNSAFE:
                trouble = found
    return trouble


def _prove(pid: int, pipe_directory: str, how: str, program: str) -> Running | Trouble:
    absent = Trouble(TroubleKind.ABSENT, f"process {pid} is not the control daemon of {pipe_directory}")
    process = Process.open(pid)
    if process is None:
        return absent
    verdict: Running | Trouble = absent
    try:
        verdict = _examine(process, pipe_directory, how, program) or absent
        if not process.alive:
            verdict = absent
    finally:
        if not isinstance(verdict, Running):
            process.close()
    return verdict


def _examine(process: Process, pipe_directory: str, how: str, program: str) -> Running | Trouble | None:
    pid = process.pid
    try:
        command = [word.decode(errors="replace") for word in _proc(pid, "cmdline").split(b"\0")[:-1]]
        # The program itself, or an interpreter and the program; a daemon, so with an option that says so.
        names = [index for index, word in enumerate(command[:3]) if Path(word).name == Path(program).name]
        if not names or process.uid != os.geteuid():
            if not names:
                return None
            # Somebody else's daemon: its environment cannot tell us anything we would trust.
            if _owns_socket_directory(process.uid, pipe_directory):
                text = f"{pipe_directory} belongs to a control daemon of uid {process.uid} (process {pid})"
                return Trouble(TroubleKind.UNSAFE, text, (f"kill {pid}", f"rm -r {pipe_directory}"))
            return None
        options = command[names[0] + 1 :]
        pairs = (entry.partition(b"=") for entry in _proc(pid, "environ").split(b"\0") if b"=" in entry)
        environ = {key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs}
    except OSError:
        return None
    theirs = environ.get("CUDA_MPS_PIPE_DIRECTORY") or DEFAULT_PIPE_DIRECTORY
    if not options or not _same_directory(theirs, pipe_directory):
        return None
    flags = "".join(word[1:] for word in options if word.startswith("-") and not word.startswith("--"))
    if "f" in flags or any(word.startswith("--for") for word in options):
        text = (
            f"control daemon {pid} runs in the foreground (-f): its logs go to its standard output, and without "
            f"them nobody can see which user waits"
        )
        stop = f"echo quit -t 30 | CUDA_MPS_PIPE_DIRECTORY={pipe_directory} {PROGRAM}"
        return Trouble(TroubleKind.UNSAFE, text, (stop,))
    if "d" not in flags and "--daemon" not in options:
        return None
    return Running(
        process,
        pipe_directory=pipe_directory,
        log_directory=environ.get("CUDA_MPS_LOG_DIRECTORY") or DEFAULT_LOG_DIRECTORY,
        devices=environ.get("CUDA_VISIBLE_DEVICES"),
        threads=environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
        multiuser="M" in flags or "--multiuser-server" in options,
        how=how,
    )


def _proc(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(256 << 10)


def _same_directory(left: str, right: str) -> bool:
    try:
        return Path(left).samefile(right)
    except OSError:
        return os.path.realpath(left) == os.path.realpath(right)


def _owns_socket_directory(uid: int, pipe_directory: str) -> bool:
    try:
        return Path(pipe_directory, PID_FILE).lstat().st_uid == uid
    except OSError:
        return False
