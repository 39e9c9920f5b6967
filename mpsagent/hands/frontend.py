"""The front-end ``nvidia-cuda-mps-control``: one queue, one run for each batch, a deadline for each.

A run is spawned with ``posix_spawn`` and watched through its pidfd: on the path from a waiting client to its limits
there is no thread, no task switch and no copy of the agent's memory. The commands are in the pipe before the program
starts, so it sees end of input at once; it prints nothing before that (recording 01).

The control daemon is single-threaded and may answer nothing for as long as a client or server makes it wait. A run that
outlives its deadline is killed and abandoned, and the next one starts.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

OUTPUT_CAP = 64 << 10
"""Bytes kept of each of stdout and stderr; the rest is read and dropped."""
OUTPUT_FLOOD = 4 << 20
"""Bytes after which a program that goes on printing is killed: the real one answers in a few hundred."""
INPUT_CAP = 32 << 10
"""Bytes of one batch: it must fit into an empty pipe (64 KiB, or less where the kernel is short of pipe memory)."""
ABANDONED_CAP = 8
"""Killed runs that the kernel has not let die yet; with more than that nothing new is started."""

NO_DAEMON_TEXT = "Cannot find MPS control daemon process"
QUITTING_TEXT = "Cannot send command to MPS control daemon process"


class Status(StrEnum):
    """How a run of the front-end ended."""

    ANSWERED = "answered"
    NO_DAEMON = "no control daemon"
    QUITTING = "control daemon is quitting"
    SILENT = "no answer in time"
    MISSING = "front-end cannot be run"
    FAILED = "front-end failed"
    REFUSED_QUEUE = "not sent"


class Reply(NamedTuple):
    """What came of a batch. ``seconds`` from the call to the answer, queueing included; ``late``: past the deadline.

    ``ANSWERED`` says only that the daemon took the commands: refusals are text in ``out`` with exit status 0.
    ``REFUSED_QUEUE``: nothing was sent, because the queue was full or the deadline passed in it.
    """

    status: Status
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    late: bool = False

    @property
    def ok(self) -> bool:
        return self.status is Status.ANSWERED


class _Batch:
    """A call that waits for its turn or its answer."""

    __slots__ = ("asked", "deadline", "reply", "text", "timer")

    def __init__(self, text: bytes, asked: float, deadline: float, reply: asyncio.Future[Reply]) -> None:
        self.text = text
        self.asked = asked
        self.deadline = deadline
        self.reply = reply
        self.timer: asyncio.TimerHandle | None = None


class FrontEnd:
    """Runs ``program`` in ``environment``; ``capacity`` batches may wait. One event loop, one thread."""

    def __init__(self, program: str, environment: Mapping[str, str], *, capacity: int = 64) -> None:
        self.program = program
        self.environment = dict(environment)
        self.capacity = capacity
        self._queue: deque[_Batch] = deque()
        self._urgent: deque[_Batch] = deque()
        self._run: _Run | None = None
        self._abandoned: set[_Run] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Batches in the queue, without the one that runs."""
        return len(self._queue) + len(self._urgent)

    @property
    def busy_since(self) -> float | None:
        """``time.monotonic()`` of the start of the run that is under way."""
        return self._run.started if self._run else None

    async def run(self, commands: Sequence[str], *, deadline: float = 10.0, urgent: bool = False) -> Reply:
        """Sends ``commands``, one a line, and returns the answer within ``deadline`` seconds. Never raises."""
        if self._closed:
            return Reply(Status.REFUSED_QUEUE, err="the agent is stopping")
        if any("\n" in command or "\r" in command or "\0" in command for command in commands):
            return Reply(Status.FAILED, err="a command may not contain a line break or NUL")
        text = "".join(f"{command}\n" for command in commands).encode(errors="replace")
        if len(text) > INPUT_CAP:
            return Reply(Status.FAILED, err=f"a batch of {len(text)} bytes is longer than {INPUT_CAP}")
        if self.waiting >= self.capacity and self._run is not None:
            return Reply(Status.REFUSED_QUEUE, err=f"{self.waiting} batches are waiting for the control daemon already")
        loop = asyncio.get_running_loop()
        batch = _Batch(text, time.monotonic(), deadline, loop.create_future())
        (self._urgent if urgent else self._queue).append(batch)
        batch.timer = loop.call_later(deadline, self._expire, batch)
        if self._run is None:
            self._next()
        try:
            return await batch.reply
        finally:
            batch.timer.cancel()

    def close(self) -> None:
        """Kills what runs and answers everybody who waits."""
        self._closed = True
        for batch in (*self._urgent, *self._queue):
            self._answer(batch, Reply(Status.REFUSED_QUEUE, err="the agent is stopping"))
        self._urgent.clear()
        self._queue.clear()
        if self._run is not None:
            run, self._run = self._run, None
            self._answer(run.batch, Reply(Status.SILENT, err="the agent is stopping"))
            self._abandon(run)
        for run in list(self._abandoned):
            run.give_up()
        self._abandoned.clear()

    # --- one run after another ---------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._run is None and (self._urgent or self._queue):
            batch = (self._urgent or self._queue).popleft()
            if batch.reply.done():  # its caller was cancelled, or its deadline passed here
                continue
            if len(self._abandoned) >= ABANDONED_CAP:
                text = f"{ABANDONED_CAP} earlier runs of {self.program} were killed and still have not ended"
                self._answer(batch, Reply(Status.FAILED, err=text))
                continue
            path = shutil.which(self.program, path=self.environment.get("PATH"))
            if path is None:
                text = f"{self.program}: no such program, or not executable"
                self._answer(batch, Reply(Status.MISSING, err=text))
                continue
            try:
                self._run = _Run(self, batch, path)
            except OSError as error:
                status = Status.FAILED if error.errno in _SHORTAGES else Status.MISSING
                self._answer(batch, Reply(status, err=f"{path} cannot be run: {error.strerror}"))

    def finished(self, run: _Run, code: int) -> None:
        """A run has ended with exit status ``code`` (negative: the signal)."""
        self._abandoned.discard(run)
        if run is not self._run:
            return
        self._run = None
        out, err = run.texts()
        if code == 0:
            reply = Reply(Status.ANSWERED, out, err)
        elif NO_DAEMON_TEXT in err:
            reply = Reply(Status.NO_DAEMON, out, err)
        elif QUITTING_TEXT in err:
            reply = Reply(Status.QUITTING, out, err)
        else:
            how = f"exit status {code}" if code >= 0 else f"signal {-code}"
            reply = Reply(Status.FAILED, out, err or f"{self.program} ended with {how}")
        self._answer(run.batch, reply)
        self._next()

    def flooded(self, run: _Run) -> None:
        """A run prints without end."""
        if run is self._run:
            self._run = None
            text = f"{self.program} printed more than {OUTPUT_FLOOD >> 20} MiB and was killed"
            self._answer(run.batch, Reply(Status.FAILED, run.texts()[0], text))
            self._abandon(run)
            self._next()

    def _expire(self, batch: _Batch) -> None:
        run = self._run
        if run is not None and run.batch is batch:
            if run.ended():  # the loop was held up, not the program: its answer counts
                run.collect()
                return
            self._run = None
            out, _ = run.texts()
            text = f"the control daemon did not answer within {batch.deadline:g} s"
            self._answer(batch, Reply(Status.SILENT, out, text))
            self._abandon(run)
            self._next()
            return
        text = f"waited {batch.deadline:g} s for its turn; an earlier command is still unanswered"
        self._answer(batch, Reply(Status.REFUSED_QUEUE, err=text))
        for queue in (self._urgent, self._queue):
            with suppress(ValueError):
                queue.remove(batch)

    def _abandon(self, run: _Run) -> None:
        self._abandoned.add(run)
        run.kill()

    @staticmethod
    def _answer(batch: _Batch, reply: Reply) -> None:
        seconds = time.monotonic() - batch.asked
        if not batch.reply.done():
            batch.reply.set_result(reply._replace(seconds=seconds, late=seconds >= batch.deadline))


_SHORTAGES = {11, 12, 23, 24}  # EAGAIN, ENOMEM, ENFILE, EMFILE: the machine is short of something, the program is there


class _Run:
    """One process of the front-end: its pidfd and the two pipes that it prints into."""

    __slots__ = ("batch", "files", "kept", "loop", "owner", "pid", "pidfd", "seen", "started")

    def __init__(self, owner: FrontEnd, batch: _Batch, path: str) -> None:
        self.owner = owner
        self.batch = batch
        self.loop = asyncio.get_running_loop()
        self.kept = (bytearray(), bytearray())
        self.seen = 0
        opened: list[int] = []
        try:
            stdin, feed = os.pipe()
            opened += (stdin, feed)
            out, out_end = os.pipe()
            opened += (out, out_end)
            err, err_end = os.pipe()
            opened += (err, err_end)
            os.set_blocking(feed, False)
            if os.write(feed, batch.text) != len(batch.text):
                raise OSError(12, "the kernel is short of pipe memory")
            self.started = time.monotonic()
            # A process group of its own, so that whatever it starts dies with it.
            self.pid = os.posix_spawn(
                path,
                [path],
                owner.environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, stdin, 0),
                    (os.POSIX_SPAWN_DUP2, out_end, 1),
                    (os.POSIX_SPAWN_DUP2, err_end, 2),
                ],
                setpgroup=0,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP],
            )
            try:
                self.pidfd = os.pidfd_open(self.pid)
            except OSError:  # out of descriptors; the child is still ours, so its pid cannot have been reused
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                raise
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        for descriptor in (stdin, feed, out_end, err_end):
            os.close(descriptor)
        self.files: list[int | None] = [out, err]
        for which, descriptor in enumerate((out, err)):
            os.set_blocking(descriptor, False)
            self.loop.add_reader(descriptor, self._readable, which)
        self.loop.add_reader(self.pidfd, self.collect)

    def texts(self) -> tuple[str, str]:
        out, err = (bytes(part).decode(errors="replace") for part in self.kept)
        return out, err

    def ended(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def kill(self) -> None:
        """SIGKILL to the whole group; the exit itself is collected later, whenever the kernel lets it happen."""
        for which in (0, 1):
            self._close(which)
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)  # not yet reaped, so the number is still its own
        with suppress(OSError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def give_up(self) -> None:
        """The loop is about to end: take the exit status if it is there, and close everything."""
        self.loop.remove_reader(self.pidfd)
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        if poll.poll(100):
            with suppress(OSError):
                os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        os.close(self.pidfd)

    def collect(self) -> None:
        """The process has ended: read what is left in the pipes, reap it, hand over."""
        self.loop.remove_reader(self.pidfd)
        for which in (0, 1):
            for _ in range(3):  # a pipe holds 64 KiB; a grandchild may go on writing for ever
                if not self._read(which):
                    break
            self._close(which)
        code = 0
        with suppress(OSError):  # somebody else reaped it: its answer counts
            info = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
            if info is not None:
                code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        os.close(self.pidfd)
        self.owner.finished(self, code)

    def _readable(self, which: int) -> None:
        self._read(which)
        if self.seen > OUTPUT_FLOOD:
            self.owner.flooded(self)

    def _read(self, which: int) -> bool:
        """Reads once; False when there is nothing more to come or nothing now."""
        descriptor = self.files[which]
        if descriptor is None:
            return False
        try:
            data = os.read(descriptor, OUTPUT_CAP)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._close(which)
            return False
        self.seen += len(data)
        kept = self.kept[which]
        kept += data[: OUTPUT_CAP - len(kept)]
        return True

    def _close(self, which: int) -> None:
        descriptor = self.files[which]
        if descriptor is not None:
            self.files[which] = None
            self.loop.remove_reader(descriptor)
            os.close(descriptor)
