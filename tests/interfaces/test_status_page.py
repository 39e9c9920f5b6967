"""The status page is written once for those who ask at the same time, and never older than the question."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpsagent.interfaces import client, views
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


def body(answers: Any) -> bytes:
    length = 0
    while (line := answers.readline().lower()) not in (b"\r\n", b""):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    return bytes(answers.read(length))
