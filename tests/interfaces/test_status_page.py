"""The status page is written once for those who ask at the same time, and never older than the question."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp import web
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.test_utils import make_mocked_request

from mpsagent.interfaces import client, views
from mpsagent.interfaces.api import Api
from mpsagent.interfaces.peers import Bounds, Connection, Peer, Peers, Share
from tests.interfaces.stand_in import START, Served, StandIn, serve


class Draining(StandIn):
    """An order takes hold at once, within the turn of the loop in which it was given."""

    async def drain(self, timeout: float | None, by: int, instance: str | None = None) -> Any:
        self.say("drained")
        return {"ok": True}

    def say(self, what: str) -> None:
        self.conditions = (views.Condition(what, START),)


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(Draining()) as one:
        yield one


def said(body: bytes) -> str:
    return str(json.loads(body)["health"]["problems"][0]["what"])


def test_the_page_shows_what_was_so_when_it_was_asked_for(served: Served) -> None:
    """Also while others ask without a pause, whose pages may be taken."""
    backend, enough = served.backend, threading.Event()
    assert isinstance(backend, Draining)
    backend.say("begun")

    def ask() -> None:
        while not enough.is_set():
            client.request(str(served.path), "GET", "/v1/status", timeout=60)

    others = [threading.Thread(target=ask) for _ in range(4)]
    for other in others:
        other.start()
    try:
        for number in range(50):
            backend.say(f"number {number}")
            assert said(client.request(str(served.path), "GET", "/v1/status", timeout=60)[1]) == f"number {number}"
    finally:
        enough.set()
        for other in others:
            other.join()


def test_an_order_is_on_the_page_that_is_asked_for_in_the_same_breath(served: Served) -> None:
    """Three requests in one packet: all may be answered in one turn of the loop."""
    backend = served.backend
    assert isinstance(backend, Draining)
    backend.say("as before")
    look = b"GET /v1/status HTTP/1.1\r\nHost: m\r\n\r\n"
    order = b"POST /v1/drain HTTP/1.1\r\nHost: m\r\nContent-Length: 2\r\n\r\n{}"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(served.path))
        sock.sendall(look + order + look)
        with sock.makefile("rb") as answers:
            bodies = [body(answers) for _ in range(3)]
    assert (said(bodies[0]), json.loads(bodies[1]), said(bodies[2])) == ("as before", {"ok": True}, "drained")


def test_within_one_turn_of_the_loop_a_page_is_shared_until_an_order_is_given() -> None:
    """Whether requests come in one turn is up to the kernel, and on Python 3.11 those of one connection never do; so
    their handlers are called here, one after the other, and nothing else has had its turn meanwhile."""
    backend, other_turns = Draining(), list[int]()

    async def nobody(_uid: int) -> bool:
        return False

    async def scene() -> list[str]:
        api = Api(backend, nobody)
        transport = Mock(asyncio.Transport)
        peers = Peers(Bounds(), asyncio.Protocol)
        transport.get_protocol.return_value = Connection(peers, Peer(1, 0, 0), Share.RESERVE)
        app = api._runner.app

        async def asked(method: str, path: str) -> bytes:
            request = make_mocked_request(method, path, transport=transport, payload=EMPTY_PAYLOAD)
            answer = await api._guard(request, (await app.router.resolve(request)).handler)
            assert isinstance(answer, web.Response)
            assert isinstance(answer.body, bytes)
            return answer.body

        asyncio.get_running_loop().call_soon(other_turns.append, 1)
        backend.say("as before")
        pages = [said(await asked("GET", "/v1/status"))]
        backend.say("something")  # it cannot have been seen from outside so far
        pages.append(said(await asked("GET", "/v1/status")))
        await asked("POST", "/v1/drain")
        pages.append(said(await asked("GET", "/v1/status")))
        backend.say("later")
        assert other_turns == []
        await asyncio.sleep(0)
        return [*pages, said(await asked("GET", "/v1/status"))]

    assert asyncio.run(scene()) == ["as before", "as before", "drained", "later"]


def body(answers: Any) -> bytes:
    length = 0
    while (line := answers.readline().lower()) not in (b"\r\n", b""):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return bytes(answers.read(length))
