"""Questions to the control daemon, one after the other, each with a deadline.

They are asked as NVIDIA's front-end asks, without starting it. A daemon that greets in another way than we know is
asked by that program (``nvidia-cuda-mps-control``): the commands are in the pipe before it starts, so it sees end of
input at once; it prints nothing before that (recording 01).

The control daemon is single-threaded and may answer nothing for as long as a client or server makes it wait. A question
that outlives its deadline, or whose caller is cancelled, is hung up on, and the next one is asked.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from mpsagent.linux.dialogue import Dialogue, connect
from mpsagent.linux.peers import Credentials
from mpsagent.mps.commands import BUSY_TEXT, NO_DAEMON_TEXT, PROOF, proven
from mpsagent.mps.rendezvous import LONGEST_MESSAGE, PRIVILEGED
from mpsagent.mps.session import FrontEndSession, How
from mpsagent.system.spawn import KEPT, find_program, run_program

PAUSE = 0.02
"""Seconds until the next try while the daemon's queue of connections is full."""


class AnswerStatus(StrEnum):
    """How a question ended."""

    ANSWERED = "answered"
    NO_DAEMON = "no control daemon"
    BUSY = "control daemon takes no command"
    """A `quit` is in progress, or another front-end is connected: there is room for one (scenarios X25 and X27)."""
    SILENT = "no answer in time"
    FAILED = "front-end failed"
    REFUSED_QUEUE = "not sent"


_SAID = {AnswerStatus.NO_DAEMON: NO_DAEMON_TEXT, AnswerStatus.BUSY: BUSY_TEXT}
"""What NVIDIA's program says on stderr."""


class Reply(NamedTuple):
    """``out``: what NVIDIA's front-end would have printed, refusals too. ``REFUSED_QUEUE``: too many waited, or the
    deadline passed before its turn."""

    status: AnswerStatus
    out: str = ""
    err: str = ""

    @property
    def ok(self) -> bool:
        return self.status is AnswerStatus.ANSWERED


class FrontEndQueue:
    """Asks the daemon of ``environment``'s pipe directory; ``program`` is NVIDIA's. ``capacity`` questions may wait,
    and as many urgent ones, which go first. One event loop, one thread."""

    def __init__(self, program: str, environment: Mapping[str, str], *, capacity: int = 64) -> None:
        self.program = program
        self.environment = dict(environment)
        self.capacity = capacity
        self._directory = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        self._asker = Credentials(os.getpid(), os.geteuid(), os.getegid())
        self._ordinary, self._one = asyncio.Lock(), asyncio.Lock()
        self._waiting = {False: 0, True: 0}
        self._over: asyncio.Future[FrontEndSession | None] | None = None
        self._closed = False

    @property
    def busy(self) -> bool:
        """A question is under way."""
        return self._one.locked()

    async def run(self, commands: Sequence[str], *, deadline: float = 10.0, urgent: bool = False) -> Reply:
        """Sends ``commands`` as one session and returns the answer within ``deadline`` seconds. Never raises but for
        its own cancellation."""
        until = asyncio.get_running_loop().time() + deadline
        if self._waiting[urgent] >= self.capacity:
            full = f"{self.capacity} questions wait for the control daemon already"
            return Reply(AnswerStatus.REFUSED_QUEUE, err=full)
        async with AsyncExitStack() as turn:
            self._waiting[urgent] += 1
            try:
                async with asyncio.timeout_at(until):
                    for lock in (self._one,) if urgent else (self._ordinary, self._one):
                        await turn.enter_async_context(lock)
            except TimeoutError:
                text = f"waited {deadline:g} s for its turn; an earlier command is still unanswered"
                return Reply(AnswerStatus.REFUSED_QUEUE, err=text)
            finally:
                self._waiting[urgent] -= 1
            if self._closed:
                return Reply(AnswerStatus.REFUSED_QUEUE, err="the agent is stopping")
            try:
                return await self._ask(commands, deadline, until)
            except ValueError as error:
                return Reply(AnswerStatus.FAILED, err=str(error))

    def close(self) -> None:
        """Hangs up, and answers everybody who waits."""
        self._closed = True
        self._done(None)

    def _done(self, session: FrontEndSession | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(session)

    async def _ask(self, commands: Sequence[str], deadline: float, until: float) -> Reply:
        loop = asyncio.get_running_loop()
        self._over = over = loop.create_future()
        while True:
            try:
                session = FrontEndSession(commands)
                sock = connect(self._directory, PRIVILEGED)
                dialogue = Dialogue(loop, sock, session, self._asker, self._done, longest=LONGEST_MESSAGE)
                break
            except BlockingIOError:
                if over.done() or loop.time() >= until:
                    return Reply(AnswerStatus.SILENT, err=f"the control daemon's queue was full for {deadline:g} s")
                await asyncio.wait([over], timeout=PAUSE)
            except (FileNotFoundError, ConnectionRefusedError):
                return Reply(AnswerStatus.NO_DAEMON, err=NO_DAEMON_TEXT)
            except OSError as error:
                return Reply(AnswerStatus.FAILED, err=f"{self._directory} cannot be connected to: {error.strerror}")
        try:
            await asyncio.wait([over], timeout=max(0.0, until - loop.time()))
            late = loop.time() - until
            if late > 0 and not over.done():  # the loop was held up so long, not the daemon
                await asyncio.wait([over], timeout=min(late, deadline))
        finally:
            dialogue.close()
        if not over.done():
            return Reply(AnswerStatus.SILENT, err=f"the control daemon did not answer within {deadline:g} s")
        session = over.result()
        if session is None:
            return Reply(AnswerStatus.SILENT, err="the agent is stopping")
        if session.how is How.UNKNOWN:
            return await self._run_program(commands, until)
        if session.how is not How.DONE:
            if session.greeting is not None:
                return Reply(AnswerStatus.BUSY, err=BUSY_TEXT)
            return Reply(AnswerStatus.NO_DAEMON, err=NO_DAEMON_TEXT)
        out = "".join(f"{answer}\n" for answer in session.answers)[:KEPT]
        if session.status:
            return Reply(
                AnswerStatus.FAILED, out, f"the control daemon ended the session with exit status {session.status}"
            )
        return Reply(AnswerStatus.ANSWERED, out)

    async def _run_program(self, commands: Sequence[str], until: float) -> Reply:
        path = find_program(self.program, self.environment)
        if path is None:
            return Reply(AnswerStatus.FAILED, err=f"{self.program}: no such program, or not executable")
        last = commands[0].startswith("quit")  # it hears nothing more
        sent = commands if last else [*commands, PROOF]
        feed = "".join(f"{command}\n" for command in sent).encode()
        now = asyncio.get_running_loop().time
        ended = await run_program([path], self.environment, feed=feed, deadline=until - now())
        if ended.code is None:
            return Reply(AnswerStatus.SILENT if now() >= until else AnswerStatus.FAILED, ended.out, ended.problem or "")
        if ended.code:
            how = f"exit status {ended.code}" if ended.code > 0 else f"signal {-ended.code}"
            status = next((status for status, text in _SAID.items() if text in ended.err), AnswerStatus.FAILED)
            return Reply(status, ended.out, f"{self.program}: {ended.err or how}")
        out = ended.out if last else proven(ended.out)
        if out is not None:
            return Reply(AnswerStatus.ANSWERED, out, ended.err)
        if not ended.out.strip():
            return Reply(AnswerStatus.BUSY, err=BUSY_TEXT)
        return Reply(AnswerStatus.FAILED, err=f"{self.program} printed what is no answer: {ended.out[:100]!a}")
