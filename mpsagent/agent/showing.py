"""The agent's side of the stream to the api, of pages and records.

The api has no rights, so nothing that it says is believed: it says how far it has the records, and that somebody asks
for the GPUs to be looked at. It may be slow, stopped or away: then pages are left out, and records wait, as many as
there is room for; how many were lost is said.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import mpsagent
from mpsagent.core.transitions import Transition
from mpsagent.linux.backoff import Backoff
from mpsagent.snapshot.page import HAS, LENGTH, LOOK, SAID, SHOWS, Frame, Page, Record, as_bytes

EVERY = 0.1
"""Seconds between two pages at least, so that a reader's is hardly older."""
SHARE = 50
"""And so many times as long as making one takes: with 2,000 users at the gate that is 14 to 24 ms."""
BEAT = 1.0
"""Seconds after which the api hears of the agent again, although nothing has changed."""
QUIET = 0.4
"""From so many seconds after a frame on a look whether something has changed tells it so: each second's look is then
the sign of life, and the machine is not woken a second time for it."""
ROOM = 10_000
"""Records that wait for the api."""
AT_ONCE = 1000
AGAIN, AGAIN_MOST = 0.25, 5.0
"""Seconds until an api that has gone is looked for again, doubling."""


class Showing(asyncio.Protocol):
    """``connect`` leads to the api; ``page`` makes one; ``look`` looks at the GPUs again."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[socket.socket]],
        page: Callable[[], Page],
        look: Callable[[], Awaitable[None]],
    ) -> None:
        self._connect, self._page, self._look = connect, page, look
        self._records: deque[Record] = deque()
        self._found: list[tuple[str, Transition]] = []
        self._last = self._sent = self._has = 0
        self._number = self._shown = self._looked = 0
        self._said = b""
        self._transport: asyncio.Transport | None = None
        self._paused = self._changed = self._unmade = False
        self._told: Page | None = None
        """The last one that was sent on this connection."""
        self._timer: asyncio.TimerHandle | None = None
        self._earliest = self._quiet = float("-inf")
        """Until when there is no frame, and none that says nothing."""
        self._task: asyncio.Task[None] | None = None
        self._looking: set[asyncio.Task[None]] = set()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._gone = asyncio.Event()
        self.run = 0.0
        self.away: str | None = "it has not been reached yet"
        """Why the api is not there."""
        self.lost = 0
        """Records for which there was no room while it was away."""

    @property
    def kept(self) -> Sequence[Record]:
        """Records that the api does not have yet."""
        return self._records

    def start(self, run: float) -> None:
        self.run = run
        self._task = asyncio.get_running_loop().create_task(self._reach())

    async def close(self) -> None:
        """What is left goes to the api, if that takes it."""
        await self.written(1.0)
        for task in (self._task, *self._looking):
            if task is not None:
                task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # --- what is to be shown

    def append(self, kind: str, at: float, **fields: object) -> int:
        """A record; its number in this run. Raises where a field cannot be written down."""
        text = json.dumps(fields, default=str, separators=(",", ":"))
        self._last += 1
        self._records.append((self._last, kind, at, text))
        if len(self._records) > ROOM:
            self._records.popleft()
            self.lost += 1
        self._soon()
        return self._last

    def found(self, instance: str, happened: Sequence[Transition]) -> None:
        """In the logs, of the time before this agent: the api knows what of it is on record."""
        self._found += [(instance, one) for one in happened[-ROOM:]]

    def changed(self) -> None:
        self._changed = True
        self._soon()

    async def written(self, timeout: float) -> None:
        """Returns when the api shows the present state and has written it down, or is away, or after that time."""
        if self._transport is None:
            return
        self._changed, self._earliest = True, float("-inf")
        self._go()
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((self._number + self._paused, self._last, done))
        self._wake()
        await asyncio.wait({done}, timeout=timeout)
        self._waiting = [one for one in self._waiting if one[2] is not done]

    # --- when

    def _soon(self) -> None:
        if self._transport is not None and not self._paused:
            self._at(max(self._earliest, asyncio.get_running_loop().time()))

    def _at(self, when: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._go)

    def _go(self) -> None:
        """One frame; the next one when this has been taken."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        transport = self._transport
        if transport is None or self._paused:
            return
        loop = asyncio.get_running_loop()
        begun, changed, self._changed = loop.time(), self._changed, False
        first = self._records[0][0] if self._records else 0
        skip = max(0, self._sent + 1 - first)
        records = [self._records[at] for at in range(skip, min(len(self._records), skip + AT_ONCE))]
        self._sent = records[-1][0] if records else self._sent
        found, self._found = self._found[:AT_ONCE], self._found[AT_ONCE:]
        frame = Frame(mpsagent.__version__, self.run, self._number, self._looked, self.lost, records, found, None)
        data = self._with_page(frame) if changed else None
        empty = data is None and not records and not found and begun < self._quiet
        data = data or as_bytes(frame._replace(number=self._number + self._unmade))
        now = loop.time()
        self._earliest = now + max(EVERY, SHARE * (now - begun))
        if empty:
            self._at(self._quiet - QUIET + BEAT)
            return
        self._quiet = now + QUIET
        transport.write(LENGTH.pack(len(data)) + data)
        if self._transport is not None and not self._paused:
            self._at(self._earliest if self._found or self._sent < self._last else now + BEAT)

    def _with_page(self, frame: Frame) -> bytes | None:
        """None: the api has this page, or it could not be made."""
        try:
            page, self._unmade = self._page(), False
            if page != self._told:
                data = as_bytes(frame._replace(number=self._number + 1, page=page))
                self._number, self._told = self._number + 1, page
                return data
        except Exception as error:  # a mistake of ours; the records have nothing to do with it
            self._unmade = True
            what = {"message": "a page could not be made", "exception": error}
            asyncio.get_running_loop().call_exception_handler(what)
        self._waiting = [(min(number, self._number), last, done) for number, last, done in self._waiting]
        self._wake()
        return None

    # --- the connection

    async def _reach(self) -> None:
        loop, again = asyncio.get_running_loop(), Backoff(AGAIN, AGAIN_MOST)
        while True:
            begun = loop.time()
            try:
                sock = await self._connect()
                self._gone.clear()
                await loop.create_connection(lambda: self, sock=sock)
                await self._gone.wait()
                self.away = "it has ended, and is started again"
            except OSError as error:
                self.away = error.strerror or str(error)
            if loop.time() > begun + 2 * AGAIN_MOST:
                again.reset()
            await asyncio.sleep(again.pause())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)
        self._transport, self.away, self._said, self._paused = transport, None, b"", False
        self._sent = self._has
        self._number = self._shown = 0
        self._told, self._quiet = None, float("-inf")
        self.changed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for _, _, done in self._waiting:
            if not done.done():
                done.set_result(None)
        self._gone.set()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._soon()

    def data_received(self, data: bytes) -> None:
        said = self._said + data
        whole = len(said) - len(said) % SAID.size
        self._said = said[whole:]
        for what, number in SAID.iter_unpack(said[:whole]):
            if what == HAS:
                self._has = min(max(self._has, number), self._sent)
                while self._records and self._records[0][0] <= self._has:
                    self._records.popleft()
            elif what == SHOWS:
                self._shown = min(number, self._number)
            elif what == LOOK and not self._looking:
                self._looking.add(asyncio.get_running_loop().create_task(self._have_looked(number)))
        self._wake()

    def _wake(self) -> None:
        for number, last, done in self._waiting:
            if self._shown >= number and self._has >= last and not done.done():
                done.set_result(None)

    async def _have_looked(self, number: int) -> None:
        try:
            with suppress(TimeoutError):
                await self._look()
            self._looked, self._quiet = number, float("-inf")
            self.changed()
        finally:
            self._looking.clear()
