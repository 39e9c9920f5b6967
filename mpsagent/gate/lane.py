"""The way to one control daemon: one front-end session and one hand-over at a time, front-ends of users in between."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from mpsagent.linux import peers
from mpsagent.linux.backoff import Backoff
from mpsagent.linux.channel import Channel
from mpsagent.linux.dialogue import Dialogue, connect
from mpsagent.linux.peers import Credentials
from mpsagent.mps.rendezvous import CONTROL, HELLO, LONGEST_MESSAGE, PRIVILEGED
from mpsagent.mps.session import FrontEndSession, How

FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.05
FIRST_DOWN_PAUSE = 0.05
LONGEST_DOWN_PAUSE = 1.0


@dataclass(eq=False, repr=False)
class Run:
    """One front-end session, repeated while another front-end is connected. ``done`` gets the session, or why there is
    none; it is never called after :meth:`cancel`. ``turned_away``: at the last attempt the daemon spoke, with another
    front-end."""

    _lane: Lane
    _commands: Sequence[str]
    _asker: Credentials
    patience: InitVar[float]
    _done: Callable[[FrontEndSession | None, str], None]
    turned_away: bool = field(default=False, init=False)

    def __post_init__(self, patience: float) -> None:
        self._dialogue: Dialogue[FrontEndSession] | None = None
        self._pauses, self._why = Backoff(FIRST_PAUSE, LONGEST_PAUSE), "the control daemon does not answer"
        self._limit = self._lane.loop.call_later(patience, self._expire)
        self._again = self._lane.loop.call_later(0, self._try)

    def cancel(self) -> None:
        self._limit.cancel()
        self._again.cancel()
        if self._dialogue is not None:
            self._dialogue.close()

    def _try(self) -> None:
        lane = self._lane
        self.turned_away = False
        try:
            session, asker = FrontEndSession(self._commands), self._asker
            # The daemon accepts its owner's settings at the privileged socket only (550), and other users not there.
            sock = connect(lane.directory, PRIVILEGED if asker.uid in (0, os.geteuid()) else CONTROL)
            self._dialogue = Dialogue(
                lane.loop, sock, session, asker, self._end, lane.greeted, longest=LONGEST_MESSAGE
            )  # fmt: skip
        except BlockingIOError:
            self._later("the control daemon's queue is full")
        except OSError as error:
            self._finish(None, f"the control daemon cannot be reached: {error.strerror}")

    def _end(self, session: FrontEndSession) -> None:
        how = session.how
        self.turned_away = how is How.TURNED_AWAY
        if self.turned_away and not self._commands[0].startswith("quit"):
            self._later("another front-end is connected to the control daemon")
        elif how is How.UNKNOWN:
            self._finish(None, "the control daemon's greeting is not known")
        else:
            self._finish(session, "")

    def _later(self, why: str) -> None:
        self._why = why
        self._again = self._lane.loop.call_later(self._pauses.pause(), self._try)

    def _expire(self) -> None:
        self._finish(None, f"{self._why}, for too long")

    def _finish(self, session: FrontEndSession | None, why: str) -> None:
        self.cancel()
        self._done(session, why)


@dataclass(slots=True, eq=False)
class Request:
    """A front-end's command that waits for its turn. ``sets``: it must not come between a hand-over's limits and its
    end. ``done`` gets the session or why there is none."""

    asker: Credentials
    command: str
    sets: bool
    patience: float
    done: Callable[[FrontEndSession | None, str], None]
    run: Run | None = field(default=None)


@dataclass(eq=False, repr=False)
class Lane:
    """``begin`` is asked to start a hand-over when one may start; it says whether it has. ``greeting`` hears how the
    daemon greets, when that changes or another daemon does."""

    loop: asyncio.AbstractEventLoop
    directory: Path
    _begin: Callable[[], bool]
    _greeting: Callable[[bytes, int], None]

    def __post_init__(self) -> None:
        self.servers: tuple[int, ...] = ()
        """The servers that the last session found."""
        self.handing = False
        """A hand-over is under way."""
        self.open_to_questions = False
        """It waits for the daemon's answer or the client: commands that set nothing may come in between."""
        self.altered = False
        """A front-end has set something; the hand-overs take note of it."""
        self.quiet = True
        """Nothing is started yet: what an earlier gate has left is still being put into order."""
        self._last: tuple[bytes, int] | None = None
        self._users: OrderedDict[int, deque[Request]] = OrderedDict()
        self._running: Request | None = None
        self._front_end_next = False
        self._pumping = False
        self._down_until = 0.0
        self._down_pauses = Backoff(FIRST_DOWN_PAUSE, LONGEST_DOWN_PAUSE)
        self._timer: asyncio.TimerHandle | None = None
        self._prober: Channel | None = None
        self._closed = False

    def close(self) -> None:
        """Its daemon is not of interest any more. What runs ends by itself."""
        self._closed = True
        if self._prober is not None:
            self._prober.close()

    # --- how the daemon is ---

    def greeted(self, data: bytes, sock: socket.socket) -> None:
        """A connection of ours was greeted."""
        try:
            pid = peers.peer(sock).pid
        except OSError:
            pid = 0
        self._down_pauses.reset()
        if (data, pid) != self._last:
            self._last = (data, pid)
            self.servers = ()
            self._greeting(data, pid)

    @property
    def known(self) -> bool | None:
        """Whether the daemon greets as we know it; None before it has been asked."""
        return None if self._last is None else self._last[0] == HELLO

    def down(self) -> None:
        """The daemon could not be reached, or not be worked with: nothing is tried for a while that doubles."""
        self.rest(self._down_pauses.pause())

    def rest(self, seconds: float) -> None:
        """No hand-over begins for so long."""
        self._down_until = max(self._down_until, self.loop.time() + seconds)
        self.wake_at(self._down_until)

    @property
    def is_down(self) -> bool:
        return self.loop.time() < self._down_until

    def probe(self) -> None:
        """Asks for the greeting and hangs up, as each client does; again and again until there is one."""
        if self._closed or (self._prober is not None and self._prober.open):
            return
        try:
            sock = connect(self.directory, CONTROL)
        except OSError:
            self.loop.call_later(self._down_pauses.pause(), self.probe)
            return

        def heard(data: bytes, _who: Credentials | None, _descriptors: list[int]) -> None:
            self.greeted(data, prober.sock)
            prober.close()
            self.pump()

        def again() -> None:
            self.loop.call_later(0.05, self.probe)

        self._prober = prober = Channel(self.loop, sock, heard, again, longest=LONGEST_MESSAGE)

    # --- whose turn it is ---

    def request(self, request: Request) -> None:
        """Queues a front-end's command; each of them has one here at most."""
        self._users.setdefault(request.asker.uid, deque()).append(request)
        self.pump()

    def withdraw(self, request: Request) -> None:
        """Its front-end has gone."""
        if request is self._running:
            if request.run is not None:
                request.run.cancel()
            self._running = None
            self.pump()
            return
        line = self._users.get(request.asker.uid)
        if line is not None and request in line:
            line.remove(request)
            if not line:
                del self._users[request.asker.uid]

    def pump(self) -> None:
        """Starts what may start: one session, one hand-over; front-ends and hand-overs by turns, users by turns."""
        if self._pumping or self.quiet:
            return
        self._pumping = True
        try:
            while self._running is None:
                if self.handing:
                    if not (self.open_to_questions and self._start_request(questions_only=True)):
                        return
                elif self._front_end_next and self._start_request():
                    self._front_end_next = False
                elif not self.is_down and self._begin():
                    self._front_end_next = True
                elif not self._start_request():
                    return
        finally:
            self._pumping = False
            if self.is_down:  # the timer may have been an earlier one
                self.wake_at(self._down_until)

    def _start_request(self, *, questions_only: bool = False) -> bool:
        uid = next((one for one, line in self._users.items() if not (questions_only and line[0].sets)), None)
        if uid is None:
            return False
        line = self._users[uid]
        request = line.popleft()
        if line:
            self._users.move_to_end(uid)
        else:
            del self._users[uid]
        self._running = request
        self.altered = self.altered or request.sets
        request.run = Run(
            self,
            [request.command],
            request.asker,
            request.patience,
            lambda session, why: self._answered(request, session, why),
        )
        return True

    def _answered(self, request: Request, session: FrontEndSession | None, why: str) -> None:
        self._running = None
        self.loop.call_soon(self.pump)
        request.done(session, why)

    def wake_at(self, when: float | None) -> None:
        """Pumps again at this time of the loop's clock."""
        if when is None or (self._timer is not None and self._timer.when() <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self.pump()
