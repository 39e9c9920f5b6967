"""HTTP and JSON on a Unix socket. Everyone may read; acting needs root or the admin group; a user may end own clients.

Who asks is what the kernel says about the peer. Nothing here decides anything: each route is one call of the backend.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from importlib import resources
from typing import Any

from aiohttp import web

from mpsagent.interfaces import metrics
from mpsagent.interfaces.allowance import Slices, cost
from mpsagent.interfaces.backend import Backend, CursorGone, Json, Problem
from mpsagent.interfaces.peers import Bounds, Connection, Peer, Peers, Share
from mpsagent.interfaces.views import iso
from mpsagent.mps.units import parse_duration

IsAdmin = Callable[[int], Awaitable[bool]]
"""Whether a uid is in the admin group. May ask the name service, so it is awaited, with a deadline."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ASK_NAMES = 5.0
_MOST_EVENTS = 1000
_AT_ONCE = 100
"""Events of a stream that are taken at a time."""
_SCANNED = 2000
"""Records of the history that are passed over for a token."""
_silent = logging.getLogger("mpsagent.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False  # aiohttp logs what peers send; a peer must not be able to fill the journal


LAST_WORDS, TURN = 0.25, 0.01
"""Seconds that a connection which was accepted just before the end has for its request; how often it is looked for."""


class Api:
    """The API on its listening sockets. ``failed`` is told of a handler's unexpected exception."""

    def __init__(
        self,
        backend: Backend,
        is_admin: IsAdmin,
        bounds: Bounds | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._backend = backend
        self._is_admin = is_admin
        self._bounds = bounds or Bounds()
        self._failed = failed
        self._closing = asyncio.Event()
        self._started = False
        self._slices = Slices()
        self._openapi = resources.files("mpsagent.interfaces").joinpath("openapi.json").read_bytes()
        app = web.Application(middlewares=[self._guard], client_max_size=self._bounds.body_size)
        get, post = app.router.add_get, app.router.add_post
        get("/healthz", self._healthz)
        get("/metrics", self._metrics)
        get("/openapi.json", self._openapi_json)
        get("/v1/status", self._status)
        get("/v1/servers", self._servers)
        get("/v1/clients", self._clients)
        get("/v1/queue", self._queue)
        get("/v1/policy", self._policy)
        get("/v1/policy/explain", self._explain)
        get("/v1/events", self._events)
        post("/v1/clients/{pid}/terminate", self._terminate)
        post("/v1/drain", self._drain)
        post("/v1/resume", self._resume)
        post("/v1/restart", self._restart)
        post("/v1/reload", self._reload)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            logger=_silent,
            auto_decompress=False,
            keepalive_timeout=4 * self._bounds.idle_time,  # a connection's own is stricter
            lingering_time=1.0,
            shutdown_timeout=1.5,
        )

    async def start(self, sock: socket.socket, administrators: socket.socket | None = None) -> None:
        """Serve on listening Unix sockets. ``administrators``: one that only root and the admin group can connect to,
        so that no other user can fill its backlog."""
        await self._runner.setup()
        inner = self._runner.server
        assert inner is not None
        self.peers = Peers(self._bounds, inner)
        self.peers.listen(sock, Share.USERS)
        if administrators is not None:
            self.peers.listen(administrators, Share.RESERVE)
        self._started = True

    async def close(self) -> None:
        """Accept no more, end the streams, let requests finish for a moment."""
        self._closing.set()
        if self._started:
            self.peers.close()
            # Who has just been let in may still ask; the others wait in systemd's socket.
            latest = time.monotonic() + LAST_WORDS
            await asyncio.sleep(TURN)
            while self.peers.unheard and time.monotonic() < latest:
                await asyncio.sleep(TURN)
        await self._runner.cleanup()

    # --- for each request

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = _connection(request)
        connection.request_begins()
        try:
            return await handler(request)
        except Problem as problem:
            return _json(problem.body(), problem.status)
        except web.HTTPException as error:
            return _http_problem(request, error)
        except TimeoutError:
            return _json(Problem(503, "the answer took too long", request.path, "try again").body(), 503)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._failed(error)
            text = Problem(500, f"a fault in mpsagent: {type(error).__name__}", request.path, "see the journal").body()
            return _json(text, 500)
        finally:
            connection.request_ends()

    async def _body(self, request: web.Request, allowed: Mapping[str, type | tuple[type, ...]]) -> Json:
        """The JSON object in the body, each key checked; an empty body is an empty object."""
        async with asyncio.timeout(self._bounds.body_time):
            raw = await request.read()
        if not raw.strip():
            return {}
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body is not JSON: {error}", "body", 'send an object, like {"now": true}') from None
        if not isinstance(body, dict):
            raise Problem(400, "the body is not a JSON object", "body", 'send an object, like {"now": true}')
        for key, value in body.items():
            if key not in allowed:
                raise Problem(400, f"unknown key {key[:50]!r}", "body", f"known: {', '.join(allowed) or 'none'}")
            if not isinstance(value, allowed[key]) or (isinstance(value, bool) and bool not in _types(allowed[key])):
                names = " or ".join(kind.__name__ for kind in _types(allowed[key]))
                raise Problem(400, f"{key!r} is not of type {names}", "body")
        return body

    async def _acting(self, request: web.Request, what: str, owner: int | None = None) -> Peer:
        """The peer, if it may act: root, the admin group, or ``owner`` on what is its own."""
        peer = _peer(request)
        if peer.uid == 0 or (owner is not None and peer.uid == owner):
            return peer
        async with asyncio.timeout(_ASK_NAMES):
            if await self._is_admin(peer.uid):
                return peer
        raise Problem(
            403,
            f"uid {peer.uid} may not {what}",
            request.path,
            "ask an administrator: this needs root or mpsagent's admin group",
        )

    # --- reading

    async def _answer(self, request: web.Request, key: str, items: Iterable[Any], **more: Any) -> web.Response:
        """``{key: [items], ...more}``, written in slices and charged to the user."""
        lines, work = await self._slices.lines(_peer(request).uid, items)
        rest = "".join(f",{json.dumps(name)}:{json.dumps(value)}" for name, value in more.items())
        body = b"{%s:[%s]%s}\n" % (json.dumps(key).encode(), b",".join(lines), rest.encode())
        _connection(request).charge(cost(len(body), work))
        return web.Response(body=body, content_type="application/json")

    async def _one(self, request: web.Request, make: Callable[[], Any], status: int = 200) -> web.Response:
        """One object that is made at once."""
        begun = time.perf_counter()
        body = _line(make())
        _connection(request).charge(cost(len(body), time.perf_counter() - begun))
        return web.Response(body=body, status=status, content_type="application/json")

    async def _healthz(self, request: web.Request) -> web.Response:
        ok, problems = self._backend.health()
        return _json({"ok": ok, "problems": problems}, 200 if ok else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        begun = time.perf_counter()
        text = metrics.text(self._backend.status(), self.peers.connected, self.peers.dropped, self.peers.turned_away)
        _connection(request).charge(cost(len(text), time.perf_counter() - begun))
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _openapi_json(self, request: web.Request) -> web.Response:
        _connection(request).charge(cost(len(self._openapi), 0.0))
        return web.Response(body=self._openapi, content_type="application/json")

    async def _status(self, request: web.Request) -> web.Response:
        return await self._one(request, self._backend.status)

    async def _servers(self, request: web.Request) -> web.Response:
        return await self._answer(request, "servers", self._backend.servers())

    async def _clients(self, request: web.Request) -> web.Response:
        return await self._answer(request, "clients", self._backend.clients())

    async def _queue(self, request: web.Request) -> web.Response:
        return await self._answer(request, "queue", self._backend.queue())

    async def _policy(self, request: web.Request) -> web.Response:
        return await self._one(request, self._backend.policy)

    async def _explain(self, request: web.Request) -> web.Response:
        user = _query(request, {"user"}).get("user", "")
        if not user or len(user) > 256:
            raise Problem(400, "which user?", "user", "/v1/policy/explain?user=NAME-OR-UID")
        async with asyncio.timeout(_ASK_NAMES):
            found = await self._backend.explain(user)
        return await self._one(request, lambda: found)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        query = _query(request, {"cursor", "limit", "follow"})
        cursor = _number(query, "cursor", 0, 1 << 62)
        limit = _number(query, "limit", 1, _MOST_EVENTS)
        follow = query.get("follow", "0").lower()
        if follow not in ("", "0", "1", "true", "false", "no", "yes"):
            raise Problem(400, f"follow={follow[:20]!r}", "follow", "follow=1 or leave it out")
        if follow in ("", "1", "true", "yes"):
            return await self._follow(request, cursor, 10 if limit is None else limit)
        found = self._read(request, cursor, 100 if limit is None else limit)
        at = self._after(found, cursor)
        return await self._answer(request, "events", map(self._backend.event, found), cursor=at)

    def _read(self, request: web.Request, cursor: int | None, limit: int) -> list[Json]:
        """Records, as they are kept; passing over newer ones costs too."""
        if cursor is not None:
            newer = max(0, self._backend.newest() - cursor)
            _connection(request).charge(newer / _SCANNED)
        return self._backend.records(cursor, limit)

    def _after(self, found: list[Json], cursor: int | None) -> int:
        """The cursor to go on with."""
        if found:
            return int(found[-1]["seq"])
        return self._backend.newest() if cursor is None else cursor

    async def _follow(self, request: web.Request, cursor: int | None, limit: int) -> web.StreamResponse:
        """One event a line, for as long as the reader reads. A heartbeat carries the cursor and finds dead peers. A
        user whose streams cost more than its allowance gets them later, several at a time."""
        connection = _connection(request)
        found = self._read(request, cursor, limit)
        stream = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await stream.prepare(request)
        at = self._after(found, cursor)
        try:
            while not self._closing.is_set() and not connection.lost.done():
                await self._send(stream, connection, found, at)
                found = self._backend.records(at, _AT_ONCE)
                if not found:
                    await self._news(connection, at)
                    found = self._backend.records(at, _AT_ONCE)
                at = self._after(found, at)
        except CursorGone as gone:  # so slow that the history went past it
            async with asyncio.timeout(self._bounds.write_time):
                await stream.write(_line(gone.body()))
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return stream

    async def _send(self, stream: web.StreamResponse, connection: Connection, found: list[Json], at: int) -> None:
        if found:
            lines, work = await self._slices.lines(connection.peer.uid, map(self._backend.event, found))
        else:
            lines, work = [_line({"heartbeat": iso(time.time()), "cursor": at})[:-1]], 0.0
        data = b"\n".join(lines) + b"\n"
        async with asyncio.timeout(self._bounds.write_time):
            await stream.write(data)
        wait = connection.charge(1.0 + cost(len(data), work))
        if wait:
            await self._first(asyncio.sleep(min(wait, self._bounds.heartbeat)), connection)

    async def _news(self, connection: Connection, at: int) -> None:
        """Wait for an event, the heartbeat's time, the reader's going or our own end."""
        await self._first(self._backend.wait_events(at, self._bounds.heartbeat), connection)

    async def _first(self, what: Coroutine[Any, Any, Any], connection: Connection) -> None:
        """Wait for ``what``, the reader's going or our own end."""
        tasks = [asyncio.ensure_future(what), asyncio.ensure_future(self._closing.wait())]
        try:
            waited: set[asyncio.Future[Any]] = {*tasks, connection.lost}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # --- acting

    async def _terminate(self, request: web.Request) -> web.Response:
        text = request.match_info["pid"]
        if not (text.isascii() and text.isdecimal() and len(text) <= 10):
            raise Problem(400, "not a process id", "pid", "/v1/clients/PID/terminate")
        pid = int(text)
        body = await self._body(request, {"now": bool, "dry_run": bool})
        owner = self._backend.owner(pid)
        if owner is None:
            raise Problem(404, f"process {pid} is not a client of MPS", "pid", "see `mpsagent-cli clients`")
        peer = await self._acting(request, f"end client {pid}", owner)
        now, dry_run = bool(body.get("now")), bool(body.get("dry_run"))
        return _json(await self._backend.terminate(pid, now=now, dry_run=dry_run, by=peer.uid))

    async def _drain(self, request: web.Request) -> web.Response:
        peer = await self._acting(request, "drain")
        timeout = (await self._body(request, {"timeout": (str, int, float, type(None))})).get("timeout")
        try:
            seconds = parse_duration(timeout) if isinstance(timeout, str) else timeout
            if seconds is not None and not 0 <= seconds <= 366 * 86400:
                raise ValueError("it is negative, or longer than a year")
        except ValueError as error:
            raise Problem(400, f"timeout: {error}", "timeout", 'seconds, or a text like "10m"') from None
        return _json(await self._backend.drain(None if seconds is None else float(seconds), peer.uid))

    async def _resume(self, request: web.Request) -> web.Response:
        return await self._act(request, "resume", self._backend.resume)

    async def _restart(self, request: web.Request) -> web.Response:
        return await self._act(request, "restart MPS", self._backend.restart)

    async def _reload(self, request: web.Request) -> web.Response:
        return await self._act(request, "reload the policy", self._backend.reload)

    async def _act(self, request: web.Request, what: str, call: Callable[[int], Awaitable[Json]]) -> web.Response:
        peer = await self._acting(request, what)
        await self._body(request, {})
        return _json(await call(peer.uid))


def _connection(request: web.Request) -> Connection:
    transport = request.transport
    connection = None if transport is None else transport.get_protocol()
    if not isinstance(connection, Connection):
        raise ConnectionResetError("the peer has gone")
    return connection


def _peer(request: web.Request) -> Peer:
    return _connection(request).peer


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=_line(body), status=status, content_type="application/json")


def _line(body: Any) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _query(request: web.Request, allowed: set[str]) -> dict[str, str]:
    unknown = sorted(set(request.query) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed))
        raise Problem(400, f"unknown parameter {unknown[0][:50]!r}", request.path, f"known: {known}")
    return dict(request.query)


def _number(query: dict[str, str], key: str, least: int, most: int) -> int | None:
    text = query.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise Problem(400, f"{key}={text[:30]!r} is not a number from {least} to {most}", key)
    return int(text)


def _types(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _http_problem(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own errors (no such path, wrong method, body too long) in our form."""
    hint = {
        404: "GET /openapi.json lists what there is",
        405: f"allowed: {error.headers.get('Allow', '')}",
        413: "the body may have 64 KiB",
    }.get(error.status, "")
    answer = _json(Problem(error.status, error.reason, request.path[:200], hint).body(), error.status)
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer
