"""What wakes the streams of events: one task waits for news for all of them, and each has no more than a future."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

EACH, LONGEST = 0.0002, 0.025
"""Seconds for which an event waits for others to go with it: so much for each stream that waits, and at most."""
AGAIN = 15.0
"""Seconds after which the history is asked anew for news that did not come."""


class News:
    """``newest``: the number of the newest record; ``come``: returns when there is one after a number, or after so many
    seconds. ``ended``: no stream goes on."""

    def __init__(self, newest: Callable[[], int], come: Callable[[int, float], Awaitable[None]]) -> None:
        self._newest, self._come = newest, come
        self._waiting: dict[asyncio.Future[None], float] = {}
        """What wakes a stream, and after which number."""
        self._watching: asyncio.Task[None] | None = None
        self.ended = False

    async def wait(self, seconds: float, lost: asyncio.Future[None], at: int | None = None) -> None:
        """Returns after that time, when the reader is lost, at the end, and, with ``at``, when there is a record after
        this number."""
        if self.ended or lost.done() or (at is not None and self._newest() > at):
            return
        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake(_: object = None) -> None:
            if not woken.done():
                woken.set_result(None)

        timer = loop.call_later(seconds, wake)
        lost.add_done_callback(wake)
        self._waiting[woken] = float("inf") if at is None else at
        if at is not None and self._watching is None:
            self._watching = loop.create_task(self._watch(self._newest()))
        try:
            await woken
        finally:
            timer.cancel()
            lost.remove_done_callback(wake)
            self._waiting.pop(woken, None)

    def end(self) -> None:
        """Wake all, for the last time."""
        self.ended = True
        self._wake(float("inf"))
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, at: int) -> None:
        try:
            while self._waiting:
                await self._come(at, AGAIN)
                await asyncio.sleep(min(LONGEST, len(self._waiting) * EACH))
                at = self._newest()
                self._wake(at)
        finally:
            self._watching = None

    def _wake(self, newest: float) -> None:
        for woken, at in self._waiting.items():
            if (at < newest or self.ended) and not woken.done():
                woken.set_result(None)
        self._waiting = {woken: at for woken, at in self._waiting.items() if not woken.done()}
