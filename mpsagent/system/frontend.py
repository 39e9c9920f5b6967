"""The front-end ``nvidia-cuda-mps-control``: one queue, one run for each batch, a deadline for each.

The commands are in the pipe before the program starts, so it sees end of input at once; it prints nothing before that
(recording 01).

The control daemon is single-threaded and may answer nothing for as long as a client or server makes it wait. A run that
outlives its deadline is killed and abandoned, and the next one starts.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from mpsagent.system.spawn import FLOOD, FULL, Run, find_program, is_shortage

ABANDONED_CAP = 8
"""Killed runs that the kernel has not let die yet; with more than that nothing new is started."""

NO_DAEMON_TEXT = "Cannot find MPS control daemon process"
BUSY_TEXT = "Cannot send command to MPS control daemon process"


class Status(StrEnum):
    """How a run of the front-end ended."""

    ANSWERED = "answered"
    NO_DAEMON = "no control daemon"
    BUSY = "control daemon takes no command"
    """A `quit` is in progress, or another front-end is connected: there is room for one (scenarios X25 and X27)."""
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
    """Runs ``program`` in ``environment``; ``capacity`` batches may wait, and as many urgent
    ones: no number of queries keeps a limit from being set. One event loop, one thread."""

    def __init__(self, program: str, environment: Mapping[str, str], *, capacity: int = 64) -> None:
        self.program = program
        self.environment = dict(environment)
        self.capacity = capacity
        self._queue: deque[_Batch] = deque()
        self._urgent: deque[_Batch] = deque()
        self._run: Run | None = None
        self._batch: _Batch | None = None
        self._abandoned: set[Run] = set()
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
        if len(text) > FULL:
            return Reply(Status.FAILED, err=f"a batch of {len(text)} bytes is longer than {FULL}")
        queue = self._urgent if urgent else self._queue
        if len(queue) >= self.capacity and self._run is not None:
            return Reply(Status.REFUSED_QUEUE, err=f"{len(queue)} batches are waiting for the control daemon already")
        loop = asyncio.get_running_loop()
        batch = _Batch(text, time.monotonic(), deadline, loop.create_future())
        queue.append(batch)
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
        self._abandon(Reply(Status.SILENT, err="the agent is stopping"))
        for run in self._abandoned:
            run.close()
        self._abandoned.clear()

    # --- one run after another ---------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._run is None and (self._urgent or self._queue):
            batch = (self._urgent or self._queue).popleft()
            if batch.reply.done():  # its caller was cancelled
                continue
            if len(self._abandoned) >= ABANDONED_CAP:
                text = f"{ABANDONED_CAP} earlier runs of {self.program} were killed and still have not ended"
                self._answer(batch, Reply(Status.FAILED, err=text))
                continue
            path = find_program(self.program, self.environment)
            if path is None:
                text = f"{self.program}: no such program, or not executable"
                self._answer(batch, Reply(Status.MISSING, err=text))
                continue
            try:
                self._run = Run([path], self.environment, batch.text, self._finished, self._flooded)
            except OSError as error:
                status = Status.FAILED if is_shortage(error) else Status.MISSING
                self._answer(batch, Reply(status, err=f"{path} cannot be run: {error.strerror}"))
            else:
                self._batch = batch

    def _finished(self, run: Run, code: int) -> None:
        self._abandoned.discard(run)
        if run is not self._run or self._batch is None:
            return
        batch, self._run, self._batch = self._batch, None, None
        out, err = run.texts()
        if code == 0:
            reply = Reply(Status.ANSWERED, out, err)
        elif NO_DAEMON_TEXT in err:
            reply = Reply(Status.NO_DAEMON, out, err)
        elif BUSY_TEXT in err:
            reply = Reply(Status.BUSY, out, err)
        else:
            how = f"exit status {code}" if code >= 0 else f"signal {-code}"
            reply = Reply(Status.FAILED, out, err or f"{self.program} ended with {how}")
        self._answer(batch, reply)
        self._next()

    def _flooded(self, run: Run) -> None:
        if run is self._run:
            text = f"{self.program} printed more than {FLOOD >> 20} MiB and was killed"
            self._abandon(Reply(Status.FAILED, run.texts()[0], text))
            self._next()

    def _expire(self, batch: _Batch) -> None:
        run = self._run
        if run is None or self._batch is not batch:
            text = f"waited {batch.deadline:g} s for its turn; an earlier command is still unanswered"
            self._answer(batch, Reply(Status.REFUSED_QUEUE, err=text))
            for queue in (self._urgent, self._queue):
                with suppress(ValueError):
                    queue.remove(batch)
        elif run.ended:  # the loop was held up, not the program: its answer counts
            run.collect()
        else:
            text = f"the control daemon did not answer within {batch.deadline:g} s"
            self._abandon(Reply(Status.SILENT, run.texts()[0], text))
            self._next()

    def _abandon(self, reply: Reply) -> None:
        """Kills the current run and answers its caller; the kernel may take its time to let the process die."""
        if self._run is not None and self._batch is not None:
            run, batch, self._run, self._batch = self._run, self._batch, None, None
            self._abandoned.add(run)
            run.kill()
            self._answer(batch, reply)

    @staticmethod
    def _answer(batch: _Batch, reply: Reply) -> None:
        seconds = time.monotonic() - batch.asked
        if not batch.reply.done():
            batch.reply.set_result(reply._replace(seconds=seconds, late=seconds >= batch.deadline))
