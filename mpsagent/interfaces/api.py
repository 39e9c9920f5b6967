"""HTTP and JSON on a Unix socket. Everyone may read; acting needs root or the admin group; a user may end own clients.

Who asks is what the kernel says about the peer. Nothing here decides anything: each route is one call of the backend.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from importlib import resources
from typing import Any

from aiohttp import web

from mpsagent.interfaces import http, metrics
from mpsagent.interfaces.allowance import Slices, cost
from mpsagent.interfaces.backend import Backend, CursorGone, Json, Problem
from mpsagent.interfaces.http import json_answer, line, problem_answer
from mpsagent.interfaces.idempotency import Idempotency
from mpsagent.interfaces.lease_body import KEYS
from mpsagent.interfaces.peers import Bounds, Connection, Peer, Peers, Share
from mpsagent.interfaces.queries import FILTERS, number, parameters, wanted_days, wanted_records
from mpsagent.interfaces.streamed import Streamed
from mpsagent.interfaces.views import iso
from mpsagent.mps.units import parse_duration

IsAdmin = Callable[[int], Awaitable[bool]]
"""Whether a uid is in the admin group. May ask the name service, so it is awaited, with a deadline."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_ASK_NAMES = 5.0
_GPU_WAIT = 1.0
"""Seconds that a list of clients waits for the GPUs to say what memory each uses."""
_AT_ONCE = 100
"""Events of a stream that are taken at a time."""
_SCANNED, _IN_MEMORY = 2000, 10_000
"""Records of the history that are passed over for a token; how many there are at most."""
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
        metered: metrics.Metrics | None = None,
    ) -> None:
        self._backend = backend
        self._is_admin = is_admin
        self._bounds = bounds or Bounds()
        self._failed = failed
        self._metered = metered or metrics.Metrics()
        self._closing = asyncio.Event()
        self._started = False
        self._slices = Slices()
        self._streamed = Streamed(backend.event)
        self._page: tuple[Json | None, bytes] = (None, b"")
        """The status page that was written last."""
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
        get("/v1/policy/diff", self._policy_diff)
        get("/v1/events", self._events)
        get("/v1/report", self._report)
        post("/v1/clients/{pid}/terminate", self._terminate)
        post("/v1/drain", self._drain)
        post("/v1/resume", self._resume)
        post("/v1/restart", self._restart)
        post("/v1/reload", self._reload)
        get("/v1/leases", self._leases)
        post("/v1/leases", self._give_lease)
        app.router.add_delete("/v1/leases/{id}", self._end_lease)
        app.on_response_prepare.append(http.unannounced)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, logger=_silent, shutdown_timeout=1.5)
        self._idempotency = Idempotency()

    async def start(self, sock: socket.socket, administrators: socket.socket | None = None) -> None:
        """Serve on listening Unix sockets. ``administrators``: one that only root and the admin group can connect to,
        so that no other user can fill its backlog."""
        await self._runner.setup()
        self.peers = Peers(self._bounds, self._protocol)
        self.peers.listen(sock, Share.USERS)
        if administrators is not None:
            self.peers.listen(administrators, Share.RESERVE)
        self._started = True

    def _protocol(self) -> http.Handler:
        """aiohttp's, for one connection."""
        server = self._runner.server
        assert server is not None
        return http.Handler(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is what it means
            logger=_silent,
            auto_decompress=False,
            keepalive_timeout=4 * self._bounds.idle_time,  # a connection's own is stricter
            lingering_time=1.0,
        )

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
            key = request.headers.get("Idempotency-Key") if request.method == "POST" else None
            return await (handler(request) if key is None else self._once(request, handler, key))
        except Problem as problem:
            return problem_answer(problem)
        except web.HTTPException as error:
            return http.aiohttp_problem(request, error)
        except TimeoutError:
            return problem_answer(Problem(503, "the answer took too long", request.path, "try again"))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            self._failed(error)
            what = f"a fault in mpsagent: {type(error).__name__}"
            return problem_answer(Problem(500, what, request.path, "see the journal"))
        finally:
            connection.request_ends()

    async def _once(self, request: web.Request, handler: _Handler, key: str) -> web.StreamResponse:
        """An action with a key: carried out, or answered as it was when it was carried out."""
        uid = _peer(request).uid
        async with asyncio.timeout(self._bounds.body_time):
            what = request.path.encode() + b"\0" + await request.read()
        known = self._idempotency.begin(uid, key, hashlib.sha256(what).digest(), time.monotonic())
        if known is not None:
            return web.Response(body=known[1], status=known[0], content_type="application/json")
        try:
            answer = await handler(request)
        except BaseException:
            self._idempotency.forget(uid, key)
            raise
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        self._idempotency.done(uid, key, (answer.status, answer.body))
        return answer

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
        if isinstance(items, http.Page):
            more["next"] = items.next
        rest = "".join(f",{json.dumps(name)}:{json.dumps(value)}" for name, value in more.items())
        body = b"{%s:[%s]%s}\n" % (json.dumps(key).encode(), b",".join(lines), rest.encode())
        _connection(request).charge(cost(len(body), work))
        return web.Response(body=body, content_type="application/json")

    async def _one(self, request: web.Request, make: Callable[[], Any], status: int = 200) -> web.Response:
        """One object that is made at once."""
        begun = time.perf_counter()
        body = line(make())
        _connection(request).charge(cost(len(body), time.perf_counter() - begun))
        return web.Response(body=body, status=status, content_type="application/json")

    async def _healthz(self, request: web.Request) -> web.Response:
        ok, problems = self._backend.health()
        return json_answer({"ok": ok, "problems": problems}, 200 if ok else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        begun = time.perf_counter()
        peers = self.peers
        text = self._metered.text(self._backend.status(), peers.connected, peers.dropped, peers.turned_away)
        _connection(request).charge(cost(len(text), time.perf_counter() - begun))
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _openapi_json(self, request: web.Request) -> web.Response:
        _connection(request).charge(cost(len(self._openapi), 0.0))
        return web.Response(body=self._openapi, content_type="application/json")

    async def _status(self, request: web.Request) -> web.Response:
        await self._backend.look_again(0.0)
        begun = time.perf_counter()
        page = self._backend.status()
        if page is not self._page[0]:
            self._page = (page, line(page))
        body = self._page[1]
        _connection(request).charge(cost(len(body), time.perf_counter() - begun))
        return web.Response(body=body, content_type="application/json")

    async def _servers(self, request: web.Request) -> web.Response:
        return await self._answer(request, "servers", self._backend.servers())

    async def _clients(self, request: web.Request) -> web.Response:
        await self._backend.look_again(_GPU_WAIT)
        asked = parameters(request, {"after", "limit"})
        return await self._answer(request, "clients", http.Page(self._backend.clients(), "pid", asked))

    async def _queue(self, request: web.Request) -> web.Response:
        asked = parameters(request, {"after", "limit"})
        return await self._answer(request, "queue", http.Page(self._backend.queue(), "uid", asked))

    async def _policy(self, request: web.Request) -> web.Response:
        return http.tagged(request, await self._one(request, self._backend.policy))

    async def _explain(self, request: web.Request) -> web.Response:
        user = parameters(request, {"user"}).get("user", "")
        if not user or len(user) > 256:
            raise Problem(400, "which user?", "user", "/v1/policy/explain?user=NAME-OR-UID")
        async with asyncio.timeout(_ASK_NAMES):
            found = await self._backend.explain(user)
        return await self._one(request, lambda: found)

    async def _policy_diff(self, request: web.Request) -> web.Response:
        await self._acting(request, "compare the policy files, which it may not be able to read")
        found = await self._backend.policy_diff()
        return await self._one(request, lambda: found)

    async def _events(self, request: web.Request) -> web.StreamResponse:
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
            with self._streamed.following():
                return await self._follow(request, cursor, 10 if limit is None else limit)
        if filtered:
            wanted = wanted_records(query, cursor, 100 if limit is None else limit)
            found, work = await self._backend.find(query.get("user"), wanted)
            _connection(request).charge(cost(0, work))
        else:
            found = await self._read(request, cursor, 100 if limit is None else limit)
        at = self._after(found, cursor)
        return await self._answer(request, "events", map(self._backend.event, found), cursor=at)

    async def _report(self, request: web.Request) -> web.Response:
        found = await self._backend.report(*wanted_days(parameters(request, {"by", "first", "last", "job"})))
        return await self._one(request, lambda: found)

    async def _read(self, request: web.Request, cursor: int | None, limit: int) -> list[Json]:
        """Records, as they are kept; passing over newer ones costs too."""
        if cursor is not None:
            newer = min(_IN_MEMORY, max(0, self._backend.newest() - cursor))
            _connection(request).charge(newer / _SCANNED)
        return await self._backend.records(cursor, limit)

    def _after(self, found: list[Json], cursor: int | None) -> int:
        """The cursor to go on with."""
        if found:
            return int(found[-1]["seq"])
        return self._backend.newest() if cursor is None else cursor

    async def _follow(self, request: web.Request, cursor: int | None, limit: int) -> web.StreamResponse:
        """One event a line, for as long as the reader reads. A heartbeat carries the cursor and finds dead peers. A
        user whose streams cost more than its allowance gets them later, several at a time."""
        connection = _connection(request)
        found = await self._read(request, cursor, limit)
        stream = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await stream.prepare(request)
        at = self._after(found, cursor)
        try:
            while not self._closing.is_set() and not connection.lost.done():
                await self._send(stream, connection, found, at)
                found = await self._backend.records(at, _AT_ONCE)
                if not found:
                    await self._news(connection, at)
                    await self._streamed.gather()
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
        return json_answer(await self._backend.terminate(pid, now=now, dry_run=dry_run, by=peer.uid))

    async def _drain(self, request: web.Request) -> web.Response:
        peer = await self._acting(request, "drain")
        timeout, instance = await self._order(request)
        return json_answer(await self._backend.drain(timeout, peer.uid, instance))

    async def _order(self, request: web.Request, *, timed: bool = True) -> tuple[float | None, str | None]:
        """Seconds and the name of an instance, from a body with at most ``timeout`` and ``instance`` in it."""
        known: dict[str, type | tuple[type, ...]] = {"timeout": (str, int, float, type(None))} if timed else {}
        body = await self._body(request, {**known, "instance": (str, type(None))})
        timeout = body.get("timeout")
        try:
            seconds = parse_duration(timeout) if isinstance(timeout, str) else timeout
            if seconds is not None and not 0 <= seconds <= 366 * 86400:
                raise ValueError("it is negative, or longer than a year")
        except ValueError as error:
            raise Problem(400, f"timeout: {error}", "timeout", 'seconds, or a text like "10m"') from None
        return None if seconds is None else float(seconds), body.get("instance")

    async def _resume(self, request: web.Request) -> web.Response:
        peer = await self._acting(request, "resume")
        _, instance = await self._order(request, timed=False)
        return json_answer(await self._backend.resume(peer.uid, instance))

    async def _restart(self, request: web.Request) -> web.Response:
        peer = await self._acting(request, "restart MPS")
        timeout, instance = await self._order(request)
        return json_answer(await self._backend.restart(timeout, peer.uid, instance))

    async def _reload(self, request: web.Request) -> web.Response:
        peer = await self._acting(request, "reload the policy")
        await self._body(request, {})
        return json_answer(await self._backend.reload(peer.uid))

    async def _leases(self, request: web.Request) -> web.Response:
        return await self._answer(request, "leases", self._backend.leases())

    async def _give_lease(self, request: web.Request) -> web.Response:
        peer = await self._acting(request, "give a lease")
        return json_answer(await self._backend.give_lease(await self._body(request, KEYS), peer.uid), 201)

    async def _end_lease(self, request: web.Request) -> web.Response:
        peer, text = await self._acting(request, "end a lease"), request.match_info["id"]
        known = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
        return json_answer(await self._backend.end_lease(known, peer.uid))


def _connection(request: web.Request) -> Connection:
    transport = request.transport
    connection = None if transport is None else transport.get_protocol()
    if not isinstance(connection, Connection):
        raise ConnectionResetError("the peer has gone")
    return connection


def _peer(request: web.Request) -> Peer:
    return _connection(request).peer


def _types(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)
