"""What wakes the streams of events: one task waits for news for all of them, and each has no more than a future.

A stream that has all there is gets what is new from that task, which makes it once for all of them: 200 of them that
each read and write for themselves take 20 ms of a core for each event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

EACH, LONGEST = 0.0001, 0.015
"""Seconds for which an event waits for others to go with it: so much for each stream that waits, and at most."""
AGAIN = 15.0
"""Seconds after which the history is asked anew for news that did not come."""
SLICE = 0.001
"""Seconds of handing out until the loop turns."""


class Batch(NamedTuple):
    """All records after one number up to another: their lines, and these as a chunk of HTTP/1.1."""

    after: int
    newest: int
    lines: bytes
    chunk: bytes


class Reader(Protocol):
    """A stream. ``at``: the number of the last record that it has; ``take``: sends it what comes after that, and says
    whether it goes on waiting: else its own task has to look after it."""

    at: int

    def take(self, batch: Batch) -> bool: ...


class _Waiting:
    """Woken when ``seconds`` have passed since it began to wait, or was sent something."""

    def __init__(self, reader: Reader | None, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.reader, self._seconds = reader, seconds
        self.woken: asyncio.Future[None] = self._loop.create_future()
        self.sent()
        self._timer = self._loop.call_at(self._until, self._late)

    def sent(self) -> None:
        self._until = self._loop.time() + self._seconds

    def wake(self, _: object = None) -> None:
        if not self.woken.done():
            self.woken.set_result(None)

    def over(self) -> None:
        self._timer.cancel()

    def _late(self) -> None:
        if self._loop.time() < self._until:
            self._timer = self._loop.call_at(self._until, self._late)
        else:
            self.wake()


class News:
    """``newest``: the number of the newest record; ``come``: returns when there is one after a number, or after so many
    seconds; ``batch``: what came after a number, None where that is too much to be sent at once. ``ended``: no stream
    goes on."""

    def __init__(
        self,
        newest: Callable[[], int],
        come: Callable[[int, float], Awaitable[None]],
        batch: Callable[[int], Awaitable[Batch | None]],
    ) -> None:
        self._newest, self._come, self._batch = newest, come, batch
        self._waiting: set[_Waiting] = set()
        self._watching: asyncio.Task[None] | None = None
        self.ended = False

    async def wait(self, seconds: float, lost: asyncio.Future[None], reader: Reader | None = None) -> None:
        """Returns when nothing was sent to the reader for that time, when it is lost, at the end, and when there is
        something that it has to be sent by who waits here. Without a reader: after that time, and at the end."""
        if self.ended or lost.done() or (reader is not None and self._newest() > reader.at):
            return
        one = _Waiting(reader, seconds)
        lost.add_done_callback(one.wake)
        self._waiting.add(one)
        if reader is not None and self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(self._newest()))
        try:
            await one.woken
        finally:
            one.over()
            lost.remove_done_callback(one.wake)
            self._waiting.discard(one)

    def end(self) -> None:
        """Wake all, for the last time."""
        self.ended = True
        for one in self._waiting:
            one.wake()
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, at: int) -> None:
        try:
            while self._waiting:
                await self._come(at, AGAIN)
                await asyncio.sleep(min(LONGEST, len(self._waiting) * EACH))
                if self._newest() > at:
                    batch = await self._batch(at)
                    at = self._newest() if batch is None else batch.newest
                    await self._hand_out(batch, at)
        finally:
            self._watching = None
            for one in self._waiting:  # none is left, but after a fault: each meets it by itself then
                one.wake()

    async def _hand_out(self, batch: Batch | None, newest: int) -> None:
        end = time.perf_counter() + SLICE
        for one in tuple(self._waiting):
            reader = one.reader
            if one.woken.done() or reader is None or reader.at >= newest:
                continue
            if batch is not None and reader.at == batch.after and reader.take(batch):
                one.sent()
            else:
                one.wake()
                self._waiting.discard(one)
            if time.perf_counter() >= end:
                await asyncio.sleep(0)
                end = time.perf_counter() + SLICE
