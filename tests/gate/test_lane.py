"""When the way to a control daemon starts the next hand-over by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mpsagent.gate.lane import Lane


def test_a_rest_beyond_an_earlier_wake_ends_by_itself(tmp_path: Path) -> None:
    """The wake of a client that paused fell into the rest and was the only one: without an agent nobody was served
    after the daemon was back until another connection came."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        begun: asyncio.Future[float] = loop.create_future()

        def begin() -> bool:
            if not begun.done():
                begun.set_result(loop.time())
            return False

        lane = Lane(loop, tmp_path, begin, lambda _greeting, _pid: None)
        lane.quiet = False
        now = loop.time()
        lane.wake_at(now + 0.02)
        lane.rest(0.1)
        assert await asyncio.wait_for(begun, 10) >= now + 0.1

    asyncio.run(play())
