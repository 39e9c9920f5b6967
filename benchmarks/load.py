"""Load for the API, from a process of its own: ``requests SOCKET TARGET CONNECTIONS SECONDS`` prints as JSON what it
measured. ``hello SOCKET`` is the smallest server that aiohttp can be.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time

HEAD = b"\r\n\r\n"


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
    return {"p99": statistics.quantiles(times, n=100)[98], "rate": len(times) / (time.perf_counter() - began)}


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


def main() -> None:
    word, socket, *rest = sys.argv[1:]
    if word == "hello":
        asyncio.run(_hello(socket))
    else:
        print(json.dumps(asyncio.run(_requests(socket, rest[0], int(rest[1]), float(rest[2])))), flush=True)


if __name__ == "__main__":
    os.umask(0)  # any user may connect
    main()
