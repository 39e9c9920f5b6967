"""Events over HTTP: a list of them, or a stream of lines that goes on for as long as its reader reads."""

from __future__ import annotations

import asyncio
import time

from aiohttp import hdrs, web

from mpsagent.interfaces import http
from mpsagent.interfaces.allowance import Questions, Slices, cost
from mpsagent.interfaces.api_reads import listed
from mpsagent.interfaces.backend import Backend, CursorGone, Json, Problem
from mpsagent.interfaces.http import line
from mpsagent.interfaces.news import Batch, News
from mpsagent.interfaces.peers import Bounds, Connection
from mpsagent.interfaces.queries import FILTERS, number, parameters, wanted_records
from mpsagent.interfaces.rights import connection_of
from mpsagent.interfaces.streamed import Streamed
from mpsagent.interfaces.views import iso

_AT_ONCE = 100
"""Events of a stream that are taken at a time."""
_SCANNED, _IN_MEMORY = 2000, 10_000
"""Records of the history that are passed over for a token; how many there are at most."""


class _Follower:
    """One stream. ``at``: the cursor that its reader has; ``owes``: seconds that its user has to wait before more."""

    def __init__(self, connection: Connection, transport: asyncio.Transport, chunked: bool, at: int) -> None:
        self.connection, self._transport, self._chunked, self.at = connection, transport, chunked, at
        self.owes = 0.0

    def pay(self, size: int, work: float = 0.0) -> None:
        self.owes = self.connection.charge(1.0 + cost(size, work))

    def take(self, batch: Batch) -> bool:
        """Past aiohttp, in one write. Not where something has still to be read: then it is written with a deadline."""
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        data = batch.chunk if self._chunked else batch.lines
        transport.write(data)
        self.at = batch.newest
        self.pay(len(data))
        return not self.owes


class Events:
    """``end`` ends the streams."""

    def __init__(self, backend: Backend, bounds: Bounds, slices: Slices, questions: Questions) -> None:
        self._backend, self._bounds, self._slices, self._questions = backend, bounds, slices, questions
        self._streamed = Streamed(backend.event)
        self._news = News(backend.newest, backend.wait_events, self._batch)
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
            connection = connection_of(request)
            async with self._questions.of(connection.peer.uid):
                found, work = await self._backend.find(query.get("user"), wanted)
                connection.charge(cost(0, work))
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
        connection.goes_on()
        found = await self._read(request, cursor, limit)
        stream = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await stream.prepare(request)
        if request.transport is None or request.method == "HEAD":
            return stream
        chunked = "chunked" in stream.headers.get(hdrs.TRANSFER_ENCODING, "")
        one = _Follower(connection, request.transport, chunked, self._after(found, cursor))
        try:
            while not self._news.ended and not connection.lost.done():
                for start in range(0, max(1, len(found)), _AT_ONCE):
                    await self._send(stream, one, found[start : start + _AT_ONCE])
                found = await self._next(one)
        except CursorGone as gone:  # so slow that the history went past it
            async with asyncio.timeout(self._bounds.write_time):
                await stream.write(line(gone.body()))
        except (TimeoutError, ConnectionError):
            request.transport.abort()
        return stream

    async def _send(self, stream: web.StreamResponse, one: _Follower, found: list[Json]) -> None:
        if found:
            lines, work = await self._slices.lines(one.connection.peer.uid, map(self._streamed.line, found))
        else:
            lines, work = [line({"heartbeat": iso(time.time()), "cursor": one.at})[:-1]], 0.0
        data = b"\n".join(lines) + b"\n"
        async with asyncio.timeout(self._bounds.write_time):
            await stream.write(data)
            await one.connection.flows.wait()
        one.pay(len(data), work)

    async def _next(self, one: _Follower) -> list[Json]:
        """What came after what the stream has; nothing when it is time for a heartbeat."""
        lost, heartbeat = one.connection.lost, self._bounds.heartbeat
        while True:
            if one.owes:
                await self._news.wait(min(one.owes, heartbeat), lost)
                one.owes = 0.0
            found = await self._backend.records(one.at, _AT_ONCE)
            if not found:
                await self._news.wait(heartbeat, lost, one)
                if one.owes:
                    continue
                found = await self._backend.records(one.at, _AT_ONCE)
            one.at = self._after(found, one.at)
            return found

    async def _batch(self, after: int) -> Batch | None:
        """For all who have what was before."""
        try:
            found = await self._backend.records(after, _AT_ONCE)
        except CursorGone:
            return None
        if not found or len(found) == _AT_ONCE:
            return None
        lines = b"".join(self._streamed.line(one) + b"\n" for one in found)
        return Batch(after, int(found[-1]["seq"]), lines, b"%x\r\n%b\r\n" % (len(lines), lines))
