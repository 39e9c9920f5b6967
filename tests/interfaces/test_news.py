"""One wait wakes all streams, and each only for what it has not had. No time is measured: what waits is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mpsagent.interfaces.news import Batch, News

LONG = 3600.0


class Reader:
    """A stream: ``takes``, or is one that cannot be written to just now. ``got`` what it was sent."""

    def __init__(self, at: int, takes: bool) -> None:
        self.at, self.takes, self.got = at, takes, list[Batch]()

    def take(self, batch: Batch) -> bool:
        if self.takes:
            self.got.append(batch)
            self.at = batch.newest
        return self.takes


class Source:
    """A history of numbers; ``asked`` after which of them it was waited for, ``made`` the batches, if any are made."""

    def __init__(self) -> None:
        self.newest, self.asked, self._changed = 0, list[int](), asyncio.Condition()
        self.makes, self.made = True, list[Batch]()
        self.news = News(lambda: self.newest, self.come, self.batch)

    async def batch(self, after: int) -> Batch | None:
        if not self.makes:
            return None
        self.made.append(Batch(after, self.newest, b"", b""))
        return self.made[-1]

    async def come(self, at: int, _: float) -> None:
        self.asked.append(at)
        async with self._changed:
            await self._changed.wait_for(lambda: self.newest > at)

    async def happen(self, count: int = 1) -> None:
        async with self._changed:
            self.newest += count
            self._changed.notify_all()

    def waiting(self, count: int, at: int | None, seconds: float = LONG) -> list[asyncio.Task[None]]:
        return [self.follows(None if at is None else Reader(at, takes=False), seconds) for _ in range(count)]

    def follows(self, reader: Reader | None, seconds: float = LONG) -> asyncio.Task[None]:
        lost = asyncio.get_running_loop().create_future()
        return asyncio.ensure_future(self.news.wait(seconds, lost, reader))


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
        gone = asyncio.ensure_future(source.news.wait(LONG, lost, Reader(0, takes=False)))
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


def test_what_is_new_is_made_once_and_handed_to_who_has_all_before_it() -> None:
    """Who is behind, or cannot take it, is woken and looks after itself; the others go on waiting."""

    async def scene(source: Source) -> None:
        source.newest = 5
        ready = [Reader(5, takes=True) for _ in range(50)]
        tasks, busy = [source.follows(one) for one in ready], source.follows(Reader(5, takes=False))
        await settled()
        source.newest = 6
        behind = source.follows(ahead := Reader(6, takes=True))  # came in between: it has what the others get
        await source.happen()
        await busy
        await behind
        await settled()
        assert source.made == [Batch(5, 7, b"", b"")]
        assert all(one.got == source.made for one in ready)
        assert ahead.got == []
        assert not any(task.done() for task in tasks)
        await source.happen()
        while len(source.made) < 2:
            await asyncio.sleep(0.001)
        await settled()
        assert [one.after for one in ready[0].got] == [5, 7]
        source.makes = False  # more has come than is sent at a time
        await source.happen(1000)
        await asyncio.gather(*tasks)

    run(scene)


def test_who_was_sent_something_is_silent_from_then_on() -> None:
    """A heartbeat comes when nothing else has come for that long, and not in between. The loop's clock is ours."""

    async def scene(source: Source) -> None:
        loop, now = asyncio.get_running_loop(), 1000.0
        loop.time = lambda: now  # type: ignore[method-assign]
        stream = source.follows(Reader(0, takes=True), seconds=15.0)
        await settled()
        now += 10.0
        await source.happen()
        await settled()
        now += 0.1  # what goes together has been gathered
        await settled()
        assert len(source.made) == 1
        now += 14.0
        await settled()
        assert not stream.done()
        now += 1.0
        await stream
        del loop.time

    run(scene)
