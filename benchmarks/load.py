"""Load for the API, from a process of its own: ``requests SOCKET TARGET CONNECTIONS SECONDS`` and ``streams`` with the
same print what they measured as JSON. ``hello SOCKET`` is the smallest server that aiohttp can be, ``events SOCKET
RATE`` the API with a history on disk, to which a timer appends; with ``bounded`` as a third word it has its usual
bounds, and 2,000 events.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

HEAD = b"\r\n\r\n"


def spread(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"count": len(times), "p50": cuts[49], "p99": cuts[98]}


async def _requests(socket: str, target: str, connections: int, seconds: float) -> dict[str, float]:
    """One after the other on each connection."""
    times: list[float] = []
    began = time.perf_counter()

    async def one() -> None:
        reader, writer = await asyncio.open_unix_connection(socket)
        ask = f"GET {target} HTTP/1.1\r\nHost: m\r\n\r\n".encode()
        while (at := time.perf_counter()) < began + seconds:
            writer.write(ask)
            head = await reader.readuntil(HEAD)
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(head.decode())
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            times.append(time.perf_counter() - at)
        writer.close()

    await asyncio.gather(*(one() for _ in range(connections)))
    return {**spread(times), "rate": len(times) / (time.perf_counter() - began)}


async def _streams(socket: str, target: str, connections: int, seconds: float) -> dict[str, float]:
    """How long after it happened each event comes, on each stream. The first second is not counted."""
    times: list[float] = []
    end = float("inf")

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """One after the other: the server's queue is not what is measured."""
        reader, writer = await asyncio.open_unix_connection(socket)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: m\r\n\r\n".encode())
        if not (head := await reader.readuntil(HEAD)).startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        return reader, writer

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for text in reader:  # chunks and their lengths are lines, too
            now = time.time()
            if now > end:
                break
            if text.startswith(b'{"cursor"') and now > end - seconds:
                times.append(now - json.loads(text)["made"])
        writer.close()

    followers = [asyncio.ensure_future(one(*await connect())) for _ in range(connections)]
    end = time.time() + 1 + seconds
    await asyncio.gather(*followers)
    return {**spread(times), "rate": len(times) / seconds}


async def _hello(socket: str) -> None:
    from aiohttp import web

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _events(socket: str, rate: float, bounded: bool) -> None:
    from mpsagent.api.calls import Api
    from mpsagent.api.connections import Bounds
    from mpsagent.api.history import History
    from mpsagent.system import listen
    from tests.api.stand_in import StandIn

    history = History(Path(socket).parent)

    class Backend(StandIn):
        """As mpsagent.api.instance has it."""

        async def records(self, cursor: int | None, limit: int) -> list[dict[str, object]]:
            return history.since(history.newest if cursor is None else cursor, limit)

        async def wait_events(self, cursor: int, timeout: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await history.wait(cursor)

        def newest(self) -> int:
            return history.newest

    for number in range(2000 if bounded else 0):
        history.append("action", time.time(), action="TerminateClient", pid=number, uid=20001, reason="the turn " * 10)
    bounds = Bounds() if bounded else replace(Bounds(), connections_per_uid=256)

    await Api(Backend(), bounds).start(listen.bind(Path(socket)))
    print("ready", flush=True)
    due = time.monotonic()
    while True:
        history.append("client.waiting", time.time(), pid=7, uid=20001, connection=1, made=time.time())
        due += 1 / rate
        await asyncio.sleep(max(0.0, due - time.monotonic()))


def main() -> None:
    word, socket, *rest = sys.argv[1:]
    if word == "hello":
        asyncio.run(_hello(socket))
    elif word == "events":
        asyncio.run(_events(socket, float(rest[0]), "bounded" in rest))
    else:
        ask: Callable[..., Awaitable[dict[str, float]]] = _requests if word == "requests" else _streams
        found = ask(socket, rest[0], int(rest[1]), float(rest[2]))
        print(json.dumps(asyncio.run(found)), flush=True)  # type: ignore[arg-type]


if __name__ == "__main__":
    os.umask(0)  # any user may connect
    main()
