"""The agent stops or is upgraded: who was let in is still heard, and others are not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from mpsagent.interfaces import api as module
from mpsagent.interfaces import listen
from mpsagent.interfaces.api import Api
from tests.interfaces.stand_in import StandIn

REQUEST = b"GET /healthz HTTP/1.1\r\nHost: m\r\n\r\n"
LONG = 60.0
Scenario = Callable[[Api, str], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with an API, and allows it half of LAST_WORDS, which is a minute here."""

    async def with_api(scenario: Scenario) -> None:
        backend = StandIn()
        backend.loop, backend.changed = asyncio.get_running_loop(), asyncio.Event()

        async def is_admin(uid: int) -> bool:
            return False

        one = Api(backend, is_admin)
        await one.start(listen.bind(tmp_path / "sock"))
        async with asyncio.timeout(LONG / 2):
            await scenario(one, str(tmp_path / "sock"))

    def run(scenario: Scenario) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "LAST_WORDS", LONG)
            asyncio.run(with_api(scenario))

    return run


async def answer(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n")


def test_one_who_has_not_asked_yet_is_heard(play: Callable[[Scenario], None]) -> None:
    """Its connection left systemd's socket for ours: no other could answer it."""

    async def scenario(api: Api, path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        closing = asyncio.create_task(api.close())
        await asyncio.sleep(0.2)
        assert not closing.done()
        writer.write(REQUEST)
        assert await answer(reader) == b"HTTP/1.1 200 OK\r\n"
        await closing
        writer.close()

    play(scenario)


def test_one_who_goes_without_asking_is_not_waited_for(play: Callable[[Scenario], None]) -> None:
    async def scenario(api: Api, path: str) -> None:
        _, writer = await asyncio.open_unix_connection(path)
        closing = asyncio.create_task(api.close())
        await asyncio.sleep(0.1)
        assert not closing.done()
        writer.close()
        await closing

    play(scenario)


def test_one_who_was_answered_is_not_waited_for(play: Callable[[Scenario], None]) -> None:
    """Nor does a stop without connections take longer than it must."""

    async def scenario(api: Api, path: str) -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(REQUEST)
        await answer(reader)
        await api.close()
        writer.close()

    play(scenario)
