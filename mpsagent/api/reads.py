"""What the API answers to who reads: lists and single pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources

from aiohttp import web

from mpsagent.agent.problem import Json, Problem
from mpsagent.api import metrics
from mpsagent.api.connections import Peers, uid_of
from mpsagent.api.http import json_answer, line
from mpsagent.api.instances import Everything
from mpsagent.api.query import parameters, wanted_days

_GPU_WAIT = 1.0
"""Seconds that a list of clients waits for the GPUs to say what memory each uses."""
_ASK_NAMES = 5.0
_OPENAPI = resources.files("mpsagent.api").joinpath("openapi.json").read_bytes()


class OneEach:
    """Questions to the history's file, each as much as seconds of a core: one at a time of each user."""

    def __init__(self) -> None:
        self._asking: set[int] = set()

    @asynccontextmanager
    async def of(self, request: web.Request) -> AsyncIterator[None]:
        uid = uid_of(request.transport)
        if uid in self._asking:
            raise Problem(
                429, "the history is asked one question of a user at a time", f"uid {uid}", "wait for its answer"
            )
        self._asking.add(uid)
        try:
            yield
        finally:
            self._asking.discard(uid)


class Reads:
    def __init__(self, backend: Everything, metered: metrics.Metrics, peers: Peers) -> None:
        self._backend, self._metered, self._peers = backend, metered, peers
        self._page: tuple[Json | None, bytes] = (None, b"")
        """The status page that was written last."""
        self._questions = OneEach()

    async def healthz(self, request: web.Request) -> web.Response:
        ok, problems = self._backend.health()
        return json_answer({"ok": ok, "problems": problems}, 200 if ok else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        peers = self._peers
        text = self._metered.text(self._backend.status(), peers.connected, peers.dropped, peers.turned_away)
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def openapi_json(self, request: web.Request) -> web.Response:
        return web.Response(body=_OPENAPI, content_type="application/json")

    async def status(self, request: web.Request) -> web.Response:
        await self._backend.look_again(0.0)
        page = self._backend.status()
        if page is not self._page[0]:
            self._page = (page, line(page))
        return web.Response(body=self._page[1], content_type="application/json")

    async def servers(self, request: web.Request) -> web.Response:
        return json_answer({"servers": list(self._backend.servers())})

    async def clients(self, request: web.Request) -> web.Response:
        await self._backend.look_again(_GPU_WAIT)
        return json_answer({"clients": list(self._backend.clients())})

    async def queue(self, request: web.Request) -> web.Response:
        return json_answer({"queue": list(self._backend.queue())})

    async def policy(self, request: web.Request) -> web.Response:
        return json_answer(self._backend.policy())

    async def explain(self, request: web.Request) -> web.Response:
        given = parameters(request, {"user", "cgroup"})
        user = given.get("user", "")
        if not user or len(user) > 256:
            raise Problem(400, "which user?", "user", "/v1/policy/explain?user=NAME-OR-UID")
        async with asyncio.timeout(_ASK_NAMES):
            return json_answer(await self._backend.explain(user, given.get("cgroup")))

    async def report(self, request: web.Request) -> web.Response:
        wanted = wanted_days(parameters(request, {"by", "first", "last", "job"}))
        async with self._questions.of(request):
            return json_answer(await self._backend.report(*wanted))

    async def leases(self, request: web.Request) -> web.Response:
        return json_answer({"leases": list(self._backend.leases())})
