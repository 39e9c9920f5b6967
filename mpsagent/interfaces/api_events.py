"""Events over HTTP: a list of them, or a stream of lines that goes on for as long as its reader reads."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from mpsagent.interfaces import http
from mpsagent.interfaces.allowance import Slices, cost
from mpsagent.interfaces.api_reads import listed
from mpsagent.interfaces.backend import Backend, CursorGone, Json, Problem
from mpsagent.interfaces.http import line
from mpsagent.interfaces.news import News
from mpsagent.interfaces.peers import Bounds, Connection
from mpsagent.interfaces.queries import FILTERS, number, parameters, wanted_records
from mpsagent.interfaces.rights import connection_of
from mpsagent.interfaces.streamed import Streamed
from mpsagent.interfaces.views import iso

_AT_ONCE = 100
"""Events of a stream that are taken at a time."""
_SCANNED, _IN_MEMORY = 2000, 10_000
"""Records of the history that are passed over for a token; how many there are at most."""


class Events:
    """``end`` ends the streams."""

    def __init__(self, backend: Backend, bounds: Bounds, slices: Slices) -> None:
        self._backend, self._bounds, self._slices = backend, bounds, slices
        self._streamed = Streamed(backend.event)
        self._news = News(backend.newest, backend.wait_events)
        self.end = self._news.end

    async def events(self, request: web.Request) -> web.StreamResponse:
        query = parameters(request, {"cursor", "limit", "follow", *FILTERS})
        cursor = number(query, "cursor", 0, 1 << 62)
        limit = number(query, "limit", 1, http.MOST)
        follow = query.get("follow", "0").lower()
        if follow not in ("", "0", "1", "true", "false", "no", "yes"):
            raise Problem(400, f"follow={follow[:20]!r}", "follow", "follow=1 or leave it out")
        filtered = [name for name in FILTERS if name in query]
        if follow in ("", "1", "true", "yes"):
            if filtered:
                raise Problem(400, f"a stream takes no {filtered[0]}=", filtered[0], "leave out follow=1")
            return await self._follow(request, cursor, 10 if limit is None else limit)
        if filtered:
            wanted = wanted_records(query, cursor, 100 if limit is None else limit)
            found, work = await self._backend.find(query.get("user"), wanted)
            connection_of(request).charge(cost(0, work))
        else:
            found = await self._read(request, cursor, 100 if limit is None else limit)
        at = self._after(found, cursor)
        return await listed(self._slices, request, "events", map(self._backend.event, found), cursor=at)

    async def _read(self, request: web.Request, cursor: int | None, limit: int) -> list[Json]:
        """Records, as they are kept; passing over newer ones costs too."""
        if cursor is not None:
            newer = min(_IN_MEMORY, max(0, self._backend.newest() - cursor))
            connection_of(request).charge(newer / _SCANNED)
        return await self._backend.records(cursor, limit)

    def _after(self, found: list[Json], cursor: int | None) -> int:
        """The cursor to go on with."""
        if found:
            return int(found[-1]["seq"])
        return self._backend.newest() if cursor is None else cursor

    async def _follow(self, request: web.Request, cursor: int | None, limit: int) -> web.StreamResponse:
        """One event a line, for as long as the reader reads. A heartbeat carries the cursor and finds dead peers. A
        user whose streams cost more than its allowance gets them later, several at a time."""
        connection = connection_of(request)
        found = await self._read(request, cursor, limit)
        stream = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await stream.prepare(request)
        at = self._after(found, cursor)
        try:
            while not self._news.ended and not connection.lost.done():
                await self._send(stream, connection, found, at)
                found = await self._backend.records(at, _AT_ONCE)
                if not found:
                    await self._news.wait(self._bounds.heartbeat, connection.lost, at)
                    found = await self._backend.records(at, _AT_ONCE)
                at = self._after(found, at)
        except CursorGone as gone:  # so slow that the history went past it
            async with asyncio.timeout(self._bounds.write_time):
                await stream.write(line(gone.body()))
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return stream

    async def _send(self, stream: web.StreamResponse, connection: Connection, found: list[Json], at: int) -> None:
        if found:
            lines, work = await self._slices.lines(connection.peer.uid, map(self._streamed.line, found))
        else:
            lines, work = [line({"heartbeat": iso(time.time()), "cursor": at})[:-1]], 0.0
        data = b"\n".join(lines) + b"\n"
        async with asyncio.timeout(self._bounds.write_time):
            await stream.write(data)
        wait = connection.charge(1.0 + cost(len(data), work))
        if wait:
            await self._news.wait(min(wait, self._bounds.heartbeat), connection.lost)
