"""Running a program from the event loop: no shell, no thread, bounded output, an end that is certain.

``posix_spawn`` does not copy the agent's memory, and the pidfd says when the process has ended: about two thirds of the
time that asyncio's own subprocesses take (0.8 against 1.2 ms for a run of ``cat``), and less to go wrong under load.
Python's descriptors are closed in the program; its input is in the pipe before it starts.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

KEPT = 64 << 10
"""Bytes kept of each of stdout and stderr; the rest is read and dropped."""
FLOOD = 4 << 20
"""Bytes after which a program that goes on printing is to be killed."""
FULL = 32 << 10
"""Bytes of input at most: they must fit into an empty pipe (64 KiB)."""
KILL_WAIT = 1.0
"""Seconds in which a killed process should have ended."""


def find_program(program: str, environment: Mapping[str, str]) -> str | None:
    """Its path, by the PATH of ``environment``; None when it is missing or not executable."""
    return shutil.which(program, path=environment.get("PATH", os.defpath))


class Ended(NamedTuple):
    """How a program ended: ``code`` is None when it was killed at its deadline or for printing without end, or never
    ran; ``problem`` says so in words."""

    code: int | None
    out: str = ""
    err: str = ""
    problem: str | None = None


class _Run:
    """One process; ``done`` gets how it ended. The constructor raises OSError."""

    __slots__ = ("_files", "_kept", "_loop", "_pidfd", "_problem", "_program", "_seen", "done", "pid")

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], feed: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Ended] = self._loop.create_future()
        self._program, self._problem = argv[0], ""
        self._kept = (bytearray(), bytearray())
        self._seen = 0
        opened: list[int] = []
        try:
            for _ in range(3):
                opened += os.pipe()
            stdin, feeder, out, out_end, err, err_end = opened
            os.set_blocking(feeder, False)
            if feed and os.write(feeder, feed) != len(feed):
                raise OSError(errno.ENOMEM, "the kernel is short of pipe memory")
            self.pid, self._pidfd = start_process(argv, environment, stdin, out_end, err_end)
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        for descriptor in (stdin, feeder, out_end, err_end):
            os.close(descriptor)
        self._files: list[int | None] = [out, err]
        for which, descriptor in enumerate((out, err)):
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, self._readable, which)
        self._loop.add_reader(self._pidfd, self._collect)

    def stop(self, problem: str) -> None:
        """Unless it has just ended by itself."""
        if self.done.done() or self._problem:
            return
        if _readable(self._pidfd, 0):
            self._collect()
        else:
            self._problem = problem
            self.kill()
            self._loop.call_later(KILL_WAIT, self._settle, None)  # not for ever: the kernel may hold on to a process

    def kill(self) -> None:
        """SIGKILL to it and its process group; it is reaped whenever the kernel lets it die."""
        self._close(0)
        self._close(1)
        with suppress(OSError):
            kill_group(self.pid)  # not reaped, so the number is still its own

    def _collect(self) -> None:
        """The process has ended: read what is left in the pipes, reap it, say so."""
        self._loop.remove_reader(self._pidfd)
        for which in (0, 1):
            for _ in range(3):  # more than a pipe holds; a grandchild may go on writing for ever
                if not self._read(which):
                    break
            self._close(which)
        code = reap(self._pidfd)
        os.close(self._pidfd)
        self._settle(code)

    def _settle(self, code: int | None) -> None:
        if not self.done.done():
            out, err = (one.decode(errors="replace") for one in self._kept)
            self.done.set_result(Ended(None if self._problem else code, out, err, self._problem or None))

    def _readable(self, which: int) -> None:
        self._read(which)
        if self._seen > FLOOD:
            self.stop(f"{self._program} printed more than {FLOOD >> 20} MiB and was killed")

    def _read(self, which: int) -> bool:
        """Reads once; False when there is nothing now or nothing more to come."""
        descriptor = self._files[which]
        if descriptor is None:
            return False
        try:
            data = os.read(descriptor, KEPT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(which)
            return False
        self._seen += len(data)
        kept = self._kept[which]
        kept += data[: KEPT - len(kept)]
        return True

    def _close(self, which: int) -> None:
        descriptor = self._files[which]
        if descriptor is not None:
            self._files[which] = None
            self._loop.remove_reader(descriptor)
            os.close(descriptor)


async def run_program(
    argv: Sequence[str], environment: Mapping[str, str], *, feed: bytes = b"", deadline: float
) -> Ended:
    """Runs ``argv`` (a path first) for at most ``deadline`` seconds. Never raises but for its own cancellation, which
    kills the program."""
    if len(feed) > FULL:
        return Ended(None, problem=f"{argv[0]}: {len(feed)} bytes of input are more than {FULL}")
    try:
        run = _Run(argv, environment, feed)
    except OSError as error:
        return Ended(None, problem=f"{argv[0]} cannot be run: {error.strerror}")
    late = f"{argv[0]} did not end within {deadline:g} s and was killed"
    timer = asyncio.get_running_loop().call_later(deadline, run.stop, late)
    try:
        return await run.done
    except asyncio.CancelledError:
        run.kill()
        raise
    finally:
        timer.cancel()


def start_process(
    argv: Sequence[str], environment: Mapping[str, str], stdin: int, out: int, err: int
) -> tuple[int, int]:
    """pid and pidfd of a new process, in a process group of its own so that whatever it starts can die with it."""
    pid = os.posix_spawn(
        argv[0],
        list(argv),
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((stdin, out, err))],
        setpgroup=0,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP],
    )
    try:
        return pid, os.pidfd_open(pid)
    except OSError:  # out of descriptors; an unreaped child's number is still its own
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _readable(fd: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def kill_group(pid: int) -> None:
    """SIGKILL to a child that is not reaped and to what it has started. Raises OSError when all have ended."""
    os.killpg(pid, signal.SIGKILL)


def reap(pidfd: int, wait: int = 0) -> int:
    """Exit status, or the signal as a negative number; 0 if another part of the program has reaped it, or it has not
    ended within ``wait`` milliseconds."""
    if wait and not _readable(pidfd, wait):
        return 0
    with suppress(OSError):
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
        if info is not None:
            return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
    return 0
