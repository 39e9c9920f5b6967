"""HTTP and JSON on a Unix socket: which calls there are, and what holds for all of them. Everybody may read, and
nothing else can be done here."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import date, timedelta
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from aiohttp import web

from mpsagent.api import http, metrics, shapes
from mpsagent.api.connections import Bounds, Handler, Peers, uid_of
from mpsagent.api.database import Query
from mpsagent.api.http import json_answer, line, problem_answer
from mpsagent.api.instances import CursorGone, Everything
from mpsagent.api.query import asked
from mpsagent.linux.sent_descriptors import accept_descriptors
from mpsagent.mps.units import iso
from mpsagent.snapshot.problem import Json, Problem

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_silent = logging.getLogger("mpsagent.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False  # aiohttp logs what peers send; a peer must not be able to fill the journal
KEPT: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""systemd's sockets stay at the end, and may not be removed from here."""
_AT_ONCE = 100
"""Events of a stream that are taken at a time."""
_GPU_WAIT = 1.0
"""Seconds that a list of clients waits for the GPUs to say what memory each uses."""
_ASK_NAMES = 5.0
_OPENAPI = resources.files("mpsagent.api").joinpath("openapi.json").read_bytes()


class Calls:
    """What is answered: a page's JSON, or an answer of HTTP. ``given``: what stands behind the ?."""

    def __init__(self, backend: Everything, metered: metrics.Metrics, peers: Peers) -> None:
        self._backend, self._metered, self._peers = backend, metered, peers
        self._page: tuple[Json | None, bytes] = (None, b"")
        """The status page that was written last."""
        self._asking: set[int] = set()
        self._streams: set[asyncio.Task[object]] = set()
        self._ended = False

    def end(self) -> None:
        """No stream goes on."""
        self._ended = True
        for task in self._streams:
            task.cancel()

    @asynccontextmanager
    async def _question(self, request: web.Request) -> AsyncIterator[None]:
        """To the history's file, as much as seconds of a core: one at a time of each user."""
        uid = uid_of(request.transport)
        if uid in self._asking:
            what = "the history is asked one question of a user at a time"
            raise Problem(429, what, f"uid {uid}", "wait for its answer")
        self._asking.add(uid)
        try:
            yield
        finally:
            self._asking.discard(uid)

    async def healthz(self, request: web.Request, given: Json) -> web.Response:
        ok, problems = self._backend.health()
        body = {"ok": ok, "drains": self._backend.drains(), "problems": problems}
        return json_answer(body, 200 if ok else 503)

    async def metrics(self, request: web.Request, given: Json) -> web.Response:
        peers = self._peers
        text = self._metered.text(self._backend.status(), peers.connected, peers.dropped, peers.turned_away)
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def openapi_json(self, request: web.Request, given: Json) -> web.Response:
        return web.Response(body=_OPENAPI, content_type="application/json")

    async def status(self, request: web.Request, given: Json) -> web.Response:
        await self._backend.look_again(0.0)
        page = self._backend.status()
        if page is not self._page[0]:
            self._page = (page, line(page))
        return web.Response(body=self._page[1], content_type="application/json")

    async def servers(self, request: web.Request, given: Json) -> Json:
        return {"servers": list(self._backend.servers())}

    async def clients(self, request: web.Request, given: Json) -> Json:
        await self._backend.look_again(_GPU_WAIT)
        return {"clients": list(self._backend.clients())}

    async def queue(self, request: web.Request, given: Json) -> Json:
        return {"queue": list(self._backend.queue())}

    async def leases(self, request: web.Request, given: Json) -> Json:
        return {"leases": list(self._backend.leases())}

    async def policy(self, request: web.Request, given: Json) -> Json:
        return self._backend.policy()

    async def explain(self, request: web.Request, given: Json) -> Json:
        async with asyncio.timeout(_ASK_NAMES):
            return await self._backend.explain(given["user"], given.get("cgroup"))

    async def report(self, request: web.Request, given: Json) -> Json:
        """Of the last 30 days, where none are named."""
        by, job, last = given.get("by", "user"), given.get("job"), given.get("last") or date.today()
        if job is not None and by != "job":
            raise Problem(400, "job= is for by=job", "job")
        first = given.get("first") or max(last, date.min + timedelta(days=29)) - timedelta(days=29)
        async with self._question(request):
            return await self._backend.report(by, first.isoformat(), last.isoformat(), job)

    async def sessions(self, request: web.Request, given: Json) -> Json:
        async with self._question(request):
            found = await self._backend.sessions(given.get("user"), _query(given))
        return {"sessions": found, "cursor": found[-1]["cursor"] if found else given.get("cursor", 0)}

    async def events(self, request: web.Request, given: Json) -> Json | web.StreamResponse:
        cursor, limit = given.get("cursor"), given.get("limit", 100)
        filtered = [name for name in _FILTERS if name in given]
        if given.get("follow"):
            if filtered:
                raise Problem(400, f"a stream takes no {filtered[0]}=", filtered[0], "leave out follow=1")
            return await self._follow(request, cursor, given.get("limit", 10))
        if filtered:
            async with self._question(request):
                found = await self._backend.find(given.get("user"), _query(given))
        else:
            found = await self._backend.records(cursor, limit)
        return {"events": list(map(self._backend.event, found)), "cursor": self._after(found, cursor)}

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
            await self._backend.wait_events(at, self._peers.bounds.heartbeat)
            found = await self._backend.records(at, _AT_ONCE)
            at = self._after(found, at)


def _query(given: Json) -> Query:
    """But for the user, whose name is the backend's to know."""
    return Query(
        given.get("cursor"), given.get("limit", 100), None,
        *(given.get(name) for name in ("pid", "kind", "since", "until")),
    )  # fmt: skip


class Route(NamedTuple):
    """``shape``: of the answer, None: an object as the policy has it; ``parameters``: of
    PARAMETERS, with ! those that there have to be. A call without any looks at none."""

    path: str
    about: str
    call: Callable[[Calls, web.Request, Json], Awaitable[Json | web.StreamResponse]]
    shape: Any = None
    parameters: tuple[str, ...] = ()


_FILTERS = ("user", "pid", "kind", "since", "until")
"""What narrows down which events are asked for."""
ROUTES = (
    Route("/healthz", "200 when everything is as it should be, otherwise 503", Calls.healthz, shapes.HealthzShape),
    Route("/metrics", "Prometheus metrics", Calls.metrics, "text format 0.0.4"),
    Route("/openapi.json", "This document", Calls.openapi_json, "OpenAPI 3.1"),
    Route("/v1/status", "Everything that matters on one page", Calls.status, shapes.StatusShape),
    Route("/v1/servers", "MPS servers", Calls.servers, shapes.ServersShape),
    Route("/v1/clients", "Clients of servers, and waiting ones", Calls.clients, shapes.ClientsShape),
    Route("/v1/queue", "Waiting users in the order of being served", Calls.queue, shapes.QueueShape),
    Route("/v1/leases", "Shares that were given to jobs", Calls.leases, shapes.LeasesShape),
    Route("/v1/policy", "The policy in force", Calls.policy),
    Route("/v1/policy/explain", "What applies to a user, where it comes from, what would happen now", Calls.explain,
          parameters=("user!", "cgroup")),
    Route("/v1/events", "Events after a cursor; with follow=1 a stream of lines (application/x-ndjson)", Calls.events,
          shapes.EventsShape, ("cursor", "limit", "follow", *_FILTERS)),
    Route("/v1/sessions", "Who worked and waited when: processes, turns, pauses and faults", Calls.sessions,
          shapes.SessionsShape, ("cursor", "limit", *_FILTERS)),
    Route("/v1/report", "What users had on some days: time with the GPU, waiting, clients, faults", Calls.report,
          shapes.ReportShape, ("by", "job", "first", "last")),
)  # fmt: skip


class Api:
    """The API on its listening sockets. ``failed`` is told of a handler's unexpected exception."""

    def __init__(
        self,
        backend: Everything,
        bounds: Bounds | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
        metered: metrics.Metrics | None = None,
    ) -> None:
        self.peers = Peers(bounds or Bounds())
        self._backend, self._failed = backend, failed
        self._listening: list[asyncio.Server] = []
        self.metered = metered or metrics.Metrics()
        self._calls = Calls(backend, self.metered, self.peers)
        app = web.Application(middlewares=[self._guard])
        for route in ROUTES:
            app.router.add_get(route.path, partial(self._call, route))
        app.on_response_prepare.append(http.unannounced)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, logger=_silent, shutdown_timeout=1.5)

    async def start(self, sock: socket.socket) -> None:
        """Serve on a listening Unix socket."""
        accept_descriptors(sock, yes=False)
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        made = lambda: Handler(server, self.peers, _silent)  # noqa: E731
        self._listening.append(await asyncio.get_running_loop().create_unix_server(made, sock=sock, **KEPT))

    async def close(self) -> None:
        """Accept no more, end the streams, let requests finish for a moment."""
        self._calls.end()
        for one in self._listening:
            one.close()
        await self._runner.cleanup()

    async def _call(self, route: Route, request: web.Request) -> web.StreamResponse:
        given = asked(request, route.parameters) if route.parameters else {}
        answer = await route.call(self._calls, request, given)
        return answer if isinstance(answer, web.StreamResponse) else json_answer(answer)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if isinstance(request.protocol, Handler):
            request.protocol.has_asked()
            if request.protocol.refused is not None:
                answer = problem_answer(request.protocol.refused)
                answer.force_close()
                return answer
        try:
            await self._backend.first()
            return await handler(request)
        except Problem as problem:
            return problem_answer(problem)
        except web.HTTPException as error:
            return http.aiohttp_problem(request, error)
        except TimeoutError:
            hint = "ask for a shorter time; if it was short, try again"
            return problem_answer(Problem(503, "the answer took too long", request.path, hint))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._failed(error)
            what = f"a fault in mpsagent: {type(error).__name__}"
            return problem_answer(Problem(500, what, request.path, "see the journal"))
