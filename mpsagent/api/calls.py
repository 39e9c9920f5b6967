"""HTTP and JSON on a Unix socket: which calls there are, and what holds for all of them. Everybody may read, and
nothing else can be done here."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from mpsagent.agent.problem import Problem
from mpsagent.api import http, metrics
from mpsagent.api.connections import Bounds, Handler, Peers
from mpsagent.api.events import Events
from mpsagent.api.http import problem_answer
from mpsagent.api.instances import Everything
from mpsagent.api.reads import Reads
from mpsagent.gate.sent_descriptors import accept_descriptors

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_silent = logging.getLogger("mpsagent.http")
_silent.addHandler(logging.NullHandler())
_silent.propagate = False  # aiohttp logs what peers send; a peer must not be able to fill the journal
KEPT: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}
"""systemd's sockets stay at the end, and may not be removed from here."""


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
        reads = Reads(backend, self.metered, self.peers)
        events = self._events = Events(backend, self.peers.bounds.heartbeat)
        app = web.Application(middlewares=[self._guard])
        get = app.router.add_get
        get("/healthz", reads.healthz)
        get("/metrics", reads.metrics)
        get("/openapi.json", reads.openapi_json)
        get("/v1/status", reads.status)
        get("/v1/servers", reads.servers)
        get("/v1/clients", reads.clients)
        get("/v1/queue", reads.queue)
        get("/v1/policy", reads.policy)
        get("/v1/policy/explain", reads.explain)
        get("/v1/events", events.events)
        get("/v1/sessions", events.sessions)
        get("/v1/report", reads.report)
        get("/v1/leases", reads.leases)
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
        self._events.end()
        for one in self._listening:
            one.close()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if isinstance(request.protocol, Handler):
            request.protocol.has_asked()
        try:
            await self._backend.first()
            return await handler(request)
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
