"""Running a program from the event loop: no shell, no thread, bounded output, an end that is certain.

``posix_spawn`` does not copy the agent's memory, and the pidfd says when the process has ended. Python's descriptors
are closed in the program. Its input is in the pipe before it starts, and its output is read when it has ended: who
prints more than the pipe holds stands until the deadline.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import shutil
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

KEPT = 64 << 10
"""Bytes kept of each of stdout and stderr."""
ROOM = 256 << 10
"""Bytes that a pipe holds; 64 KiB where the kernel gives it no more. It counts them against all pipes of root, of which
some 64 MiB may be so long."""
FULL = 32 << 10
"""Bytes of input at most: they must fit into an empty pipe of 64 KiB."""
KILL_WAIT = 1.0
"""Seconds in which a killed process should have ended."""
LAST_WAIT = 0.1
"""Seconds that the end of the loop waits for a killed process."""


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


class Child:
    """A process in a process group of its own, so that whatever it starts can die with it. It is reaped when it has
    ended. The constructor raises OSError."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        stdin: int,
        out: int,
        err: int,
        *,
        blocked: Collection[int] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit status, or the signal as a negative number."""
        self.pid, self._pidfd = start_process(argv, environment, stdin, out, err, blocked)
        self._loop.add_reader(self._pidfd, self._reap)

    def kill(self) -> bool:
        """SIGKILL to it and its group; False: it has ended by itself."""
        if not self.ended.done() and _readable(self._pidfd, 0):
            self._reap()
        if self.ended.done():
            return False
        with suppress(OSError):
            kill_group(self.pid)  # not reaped, so the number is still its own
        return True

    def let_go(self) -> None:
        """For the end of the loop, after :meth:`kill`: it is reaped if it dies at once."""
        if not self.ended.done():
            _readable(self._pidfd, int(LAST_WAIT * 1000))
            self._reap()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        status = 0  # another part of the program has reaped it, or it has not ended
        with suppress(OSError):
            if (info := os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)) is not None:
                status = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        os.close(self._pidfd)
        self.ended.set_result(status)


async def run_program(
    argv: Sequence[str], environment: Mapping[str, str], *, feed: bytes = b"", deadline: float
) -> Ended:
    """Runs ``argv`` (a path first) for at most ``deadline`` seconds. Never raises but for its own cancellation, which
    kills the program."""
    if len(feed) > FULL:
        return Ended(None, problem=f"{argv[0]}: {len(feed)} bytes of input are more than {FULL}")
    with ExitStack() as stack:
        try:
            (stdin, feeder), (out, out_end), (err, err_end) = (_pipe(stack) for _ in range(3))
            for one in (feeder, out, err):
                os.set_blocking(one.fileno(), False)
            if feed and feeder.write(feed) != len(feed):
                raise OSError(errno.ENOMEM, "the kernel is short of pipe memory")
            for one in (out, err):
                with suppress(OSError):
                    fcntl.fcntl(one, fcntl.F_SETPIPE_SZ, ROOM)
            child = Child(argv, environment, stdin.fileno(), out_end.fileno(), err_end.fileno())
        except OSError as error:
            return Ended(None, problem=f"{argv[0]} cannot be run: {error.strerror}")
        feeder.close()
        code: int | None = None
        problem: str | None = None
        try:
            await asyncio.wait([child.ended], timeout=deadline)
            if child.kill():
                problem = f"{argv[0]} did not end within {deadline:g} s and was killed"
                await asyncio.wait([child.ended], timeout=KILL_WAIT)  # not for ever: the kernel may hold on to it
            else:
                code = child.ended.result()
        finally:
            child.kill()
        printed, errors = ((one.read(KEPT) or b"").decode(errors="replace") for one in (out, err))
        if problem is not None and KEPT in (len(printed), len(errors)):
            problem += f"; it printed more than {KEPT >> 10} KiB"
        return Ended(code, printed, errors, problem)


def _pipe(stack: ExitStack) -> tuple[Any, Any]:
    reader, writer = os.pipe()
    return stack.enter_context(open(reader, "rb", 0)), stack.enter_context(open(writer, "wb", 0))


def start_process(
    argv: Sequence[str], environment: Mapping[str, str], stdin: int, out: int, err: int, blocked: Collection[int] = ()
) -> tuple[int, int]:
    """Return pid and pidfd of a new process, in its own process group, so that its own child processes can die with it.
    ``blocked``: signals that do not reach it."""
    pid = os.posix_spawn(
        argv[0],
        list(argv),
        environment,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate((stdin, out, err))],
        setpgroup=0,
        setsigmask=blocked,
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
