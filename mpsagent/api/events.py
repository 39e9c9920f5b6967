"""Events over HTTP: a list of them, or a stream of lines that goes on for as long as its reader reads."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from mpsagent.agent.problem import Json, Problem
from mpsagent.api import http
from mpsagent.api.http import json_answer, line
from mpsagent.api.instances import CursorGone, Everything
from mpsagent.api.query import FILTERS, number, parameters, wanted_records
from mpsagent.api.reads import OneEach
from mpsagent.mps.units import iso

_AT_ONCE = 100
"""Events of a stream that are taken at a time."""


class Events:
    def __init__(self, backend: Everything, heartbeat: float) -> None:
        self._backend, self._heartbeat = backend, heartbeat
        self._questions = OneEach()
        self._streams: set[asyncio.Task[object]] = set()
        self._ended = False

    def end(self) -> None:
        """No stream goes on."""
        self._ended = True
        for task in self._streams:
            task.cancel()

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
            async with self._questions.of(request):
                found = await self._backend.find(query.get("user"), wanted)
        else:
            found = await self._backend.records(cursor, 100 if limit is None else limit)
        return json_answer({"events": list(map(self._backend.event, found)), "cursor": self._after(found, cursor)})

    async def sessions(self, request: web.Request) -> web.Response:
        query = parameters(request, {"cursor", "limit", *FILTERS})
        cursor = number(query, "cursor", 0, 1 << 62)
        wanted = wanted_records(query, cursor, number(query, "limit", 1, http.MOST) or 100)
        async with self._questions.of(request):
            found = await self._backend.sessions(query.get("user"), wanted)
        return json_answer({"sessions": found, "cursor": found[-1]["cursor"] if found else cursor or 0})

    def _after(self, found: list[Json], cursor: int | None) -> int:
        """The cursor to go on with."""
        if found:
            return int(found[-1]["seq"])
        return self._backend.newest() if cursor is None else cursor

    async def _follow(self, request: web.Request, cursor: int | None, limit: int) -> web.StreamResponse:
        """One event a line. A heartbeat carries the cursor and finds dead peers."""
        found = await self._backend.records(cursor, limit)
        stream = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await stream.prepare(request)
        task = asyncio.current_task()
        if request.method == "HEAD" or self._ended or task is None:
            return stream
        self._streams.add(task)
        try:
            await self._send(stream, self._after(found, cursor), found)
        except CursorGone as gone:  # so slow that the history went past it
            await stream.write(line(gone.body()))
        except asyncio.CancelledError:
            if not self._ended:
                raise
        finally:
            self._streams.discard(task)
        return stream

    async def _send(self, stream: web.StreamResponse, at: int, found: list[Json]) -> None:
        while True:
            lines = b"".join(line(self._backend.event(one)) for one in found)
            await stream.write(lines or line({"heartbeat": iso(time.time()), "cursor": at}))
            await self._backend.wait_events(at, self._heartbeat)
            found = await self._backend.records(at, _AT_ONCE)
            at = self._after(found, at)
