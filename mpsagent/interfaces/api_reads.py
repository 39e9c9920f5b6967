"""What the API answers to who reads: lists, written in slices, and single pages. Each is charged to the user."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

from aiohttp import web

from mpsagent.interfaces import http, metrics
from mpsagent.interfaces.allowance import Questions, Slices, cost
from mpsagent.interfaces.backend import Backend, Json, Problem
from mpsagent.interfaces.http import json_answer, line
from mpsagent.interfaces.peers import Peers
from mpsagent.interfaces.queries import parameters, wanted_days
from mpsagent.interfaces.rights import ASK_NAMES, Rights, connection_of, peer_of

_GPU_WAIT = 1.0
"""Seconds that a list of clients waits for the GPUs to say what memory each uses."""


async def listed(slices: Slices, request: web.Request, key: str, items: Iterable[Any], **more: Any) -> web.Response:
    """``{key: [items], ...more}``, written in slices and charged to the user."""
    lines, work = await slices.lines(peer_of(request).uid, items)
    if isinstance(items, http.Page):
        more["next"] = items.next
    rest = "".join(f",{json.dumps(name)}:{json.dumps(value)}" for name, value in more.items())
    body = b"{%s:[%s]%s}\n" % (json.dumps(key).encode(), b",".join(lines), rest.encode())
    connection_of(request).charge(cost(len(body), work))
    return web.Response(body=body, content_type="application/json")


class Reads:
    """``peers``: of the socket, once it listens."""

    def __init__(
        self,
        backend: Backend,
        rights: Rights,
        slices: Slices,
        questions: Questions,
        metered: metrics.Metrics,
        peers: Callable[[], Peers],
    ) -> None:
        self._backend, self._rights, self._slices, self._questions = backend, rights, slices, questions
        self._metered, self._peers = metered, peers
        self._page: tuple[Json | None, bytes] = (None, b"")
        """The status page that was written last."""
        self._of_this_turn: bytes | None = None
        self._openapi = resources.files("mpsagent.interfaces").joinpath("openapi.json").read_bytes()

    async def healthz(self, request: web.Request) -> web.Response:
        ok, problems = self._backend.health()
        return json_answer({"ok": ok, "problems": problems}, 200 if ok else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        begun = time.thread_time()
        peers = self._peers()
        text = self._metered.text(self._backend.status(), peers.connected, peers.dropped, peers.turned_away)
        connection_of(request).charge(cost(len(text), time.thread_time() - begun))
        return web.Response(body=text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def openapi_json(self, request: web.Request) -> web.Response:
        connection_of(request).charge(cost(len(self._openapi), 0.0))
        return web.Response(body=self._openapi, content_type="application/json")

    async def status(self, request: web.Request) -> web.Response:
        if self._of_this_turn is None:
            await self._backend.look_again(0.0)
        begun = time.thread_time()
        body = self._status_page() if self._of_this_turn is None else self._of_this_turn
        connection_of(request).charge(cost(len(body), time.thread_time() - begun))
        return web.Response(body=body, content_type="application/json")

    def _status_page(self) -> bytes:
        """Everybody's. Requests of one turn of the loop share it: they were on their way before anything that happens
        in it could be seen from outside, but for what their own connection has ordered."""
        page = self._backend.status()
        if page is not self._page[0]:
            self._page = (page, line(page))
        self._of_this_turn = self._page[1]
        asyncio.get_running_loop().call_soon(self.look_anew)
        return self._of_this_turn

    def look_anew(self) -> None:
        """The turn is over, or an order was carried out."""
        self._of_this_turn = None

    async def servers(self, request: web.Request) -> web.Response:
        return await listed(self._slices, request, "servers", self._backend.servers())

    async def clients(self, request: web.Request) -> web.Response:
        await self._backend.look_again(_GPU_WAIT)
        asked = parameters(request, {"after", "limit"})
        return await listed(self._slices, request, "clients", http.Page(self._backend.clients(), "pid", asked))

    async def queue(self, request: web.Request) -> web.Response:
        asked = parameters(request, {"after", "limit"})
        return await listed(self._slices, request, "queue", http.Page(self._backend.queue(), "uid", asked))

    async def policy(self, request: web.Request) -> web.Response:
        return await self._one(request, self._backend.policy)

    async def explain(self, request: web.Request) -> web.Response:
        user = parameters(request, {"user"}).get("user", "")
        if not user or len(user) > 256:
            raise Problem(400, "which user?", "user", "/v1/policy/explain?user=NAME-OR-UID")
        async with asyncio.timeout(ASK_NAMES):
            found = await self._backend.explain(user)
        return await self._one(request, lambda: found)

    async def policy_diff(self, request: web.Request) -> web.Response:
        await self._rights.acting(request, "compare the policy files, which it may not be able to read")
        found = await self._backend.policy_diff()
        return await self._one(request, lambda: found)

    async def report(self, request: web.Request) -> web.Response:
        wanted = wanted_days(parameters(request, {"by", "first", "last", "job"}))
        async with self._questions.of(peer_of(request).uid):
            found = await self._backend.report(*wanted)
        return await self._one(request, lambda: found)

    async def leases(self, request: web.Request) -> web.Response:
        return await listed(self._slices, request, "leases", self._backend.leases())

    async def _one(self, request: web.Request, make: Callable[[], Any], status: int = 200) -> web.Response:
        """One object that is made at once."""
        begun = time.thread_time()
        body = line(make())
        connection_of(request).charge(cost(len(body), time.thread_time() - begun))
        return web.Response(body=body, status=status, content_type="application/json")
