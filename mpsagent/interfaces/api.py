"""HTTP and JSON on a Unix socket: which calls there are, and what holds for all of them.

Everyone may read; acting needs root or the admin group; a user may end own clients. Nothing here decides anything: each
call is one of the backend's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from mpsagent.interfaces import http, metrics
from mpsagent.interfaces.allowance import Questions, Slices
from mpsagent.interfaces.api_events import Events
from mpsagent.interfaces.api_orders import Orders
from mpsagent.interfaces.api_reads import Reads
from mpsagent.interfaces.backend import Backend, Problem
from mpsagent.interfaces.http import problem_answer
from mpsagent.interfaces.peers import Bounds, Peers, Share
from mpsagent.interfaces.rights import IsAdmin, Rights, connection_of

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
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
        self._bounds = bounds or Bounds()
        self._failed = failed
        self._metered = metered or metrics.Metrics()
        self._started = False
        rights, slices, questions = Rights(is_admin), Slices(), Questions()
        reads = self._reads = Reads(backend, rights, slices, questions, self._metered, lambda: self.peers)
        events = self._events = Events(backend, self._bounds, slices, questions)
        orders = Orders(backend, rights, self._bounds)
        app = web.Application(middlewares=[self._guard], client_max_size=self._bounds.body_size)
        get, post = app.router.add_get, app.router.add_post
        get("/healthz", reads.healthz)
        get("/metrics", reads.metrics)
        get("/openapi.json", reads.openapi_json)
        get("/v1/status", reads.status)
        get("/v1/servers", reads.servers)
        get("/v1/clients", reads.clients)
        get("/v1/queue", reads.queue)
        get("/v1/policy", reads.policy)
        get("/v1/policy/explain", reads.explain)
        get("/v1/policy/diff", reads.policy_diff)
        get("/v1/events", events.events)
        get("/v1/report", reads.report)
        post("/v1/clients/{pid}/terminate", orders.terminate)
        post("/v1/servers/{pid}/shutdown", orders.shutdown_server)
        post("/v1/drain", orders.drain)
        post("/v1/resume", orders.resume)
        post("/v1/restart", orders.restart)
        post("/v1/reload", orders.reload)
        get("/v1/leases", reads.leases)
        post("/v1/leases", orders.give_lease)
        app.router.add_delete("/v1/leases/{id}", orders.end_lease)
        app.on_response_prepare.append(http.unannounced)
        self._runner = web.AppRunner(app, handle_signals=False, access_log=None, logger=_silent, shutdown_timeout=1.5)

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
        self._events.end()
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
        connection = connection_of(request)
        connection.request_begins()
        try:
            return await http.in_pieces(request, await handler(request), connection.flows)
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
            if request.method != "GET":
                self._reads.look_anew()
            connection.request_ends()
