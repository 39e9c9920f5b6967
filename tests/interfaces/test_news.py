"""One wait wakes all streams, and each only for what it has not had. No time is measured: what waits is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mpsagent.interfaces.news import News

LONG = 3600.0


class Source:
    """A history of numbers; ``asked`` after which of them it was waited for."""

    def __init__(self) -> None:
        self.newest, self.asked, self._changed = 0, list[int](), asyncio.Condition()
        self.news = News(lambda: self.newest, self.come)

    async def come(self, at: int, _: float) -> None:
        self.asked.append(at)
        async with self._changed:
            await self._changed.wait_for(lambda: self.newest > at)

    async def happen(self, count: int = 1) -> None:
        async with self._changed:
            self.newest += count
            self._changed.notify_all()

    def waiting(self, count: int, at: int | None, seconds: float = LONG) -> list[asyncio.Task[None]]:
        lost = asyncio.get_running_loop().create_future()
        return [asyncio.ensure_future(self.news.wait(seconds, lost, at)) for _ in range(count)]


async def settled() -> None:
    """Everything that is ready has had its turns."""
    for _ in range(20):
        await asyncio.sleep(0)


def run(scene: Callable[[Source], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60):
            await scene(Source())

    asyncio.run(whole())


def test_one_wait_wakes_all() -> None:
    async def scene(source: Source) -> None:
        streams = source.waiting(200, 0)
        await settled()
        assert source.asked == [0]
        assert not any(stream.done() for stream in streams)
        await source.happen(3)
        await asyncio.gather(*streams)
        await settled()
        assert source.asked == [0]  # nobody waits any more, so nothing is waited for
        again = source.waiting(1, 3)
        await settled()
        assert source.asked == [0, 3]
        await source.happen()
        await asyncio.gather(*again)

    run(scene)


def test_what_happened_before_the_wait_began_is_not_missed() -> None:
    """Between a stream's last look and the first turn of the task that waits for all."""

    async def scene(source: Source) -> None:
        await asyncio.gather(*source.waiting(1, -1))
        assert source.asked == []  # there is something already
        early = source.waiting(1, 0)
        await asyncio.sleep(0)
        source.newest = 1
        await asyncio.gather(*early)

    run(scene)


def test_who_has_it_already_is_not_woken() -> None:
    """A stream that came while the others were being told: it would send a heartbeat for nothing."""

    async def scene(source: Source) -> None:
        early = source.waiting(1, 0)
        await settled()
        source.newest = 2
        late = source.waiting(1, 2)
        await source.happen(0)
        await asyncio.gather(*early)
        await settled()
        assert not late[0].done()
        assert source.asked == [0, 2]
        await source.happen()
        await asyncio.gather(*late)

    run(scene)


def test_a_pause_is_not_ended_by_news() -> None:
    async def scene(source: Source) -> None:
        paused, streams = source.waiting(1, None), source.waiting(1, 0)
        await settled()
        await source.happen()
        await asyncio.gather(*streams)
        await settled()
        assert not paused[0].done()
        await asyncio.gather(*source.waiting(1, None, seconds=0.0))
        source.news.end()
        await asyncio.gather(*paused)

    run(scene)


def test_a_lost_reader_a_heartbeat_and_the_end_wake() -> None:
    async def scene(source: Source) -> None:
        lost = asyncio.get_running_loop().create_future()
        gone = asyncio.ensure_future(source.news.wait(LONG, lost, 0))
        others = source.waiting(3, 0)
        await settled()
        lost.set_result(None)
        await gone
        await asyncio.gather(*source.waiting(1, 0, seconds=0.0))
        assert not any(stream.done() for stream in others)
        others[0].cancel()
        await settled()
        source.news.end()
        await asyncio.gather(*others[1:])
        await asyncio.gather(*source.waiting(3, 0), *source.waiting(3, None))

    run(scene)
