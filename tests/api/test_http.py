"""What HTTP has for programs: problem details, pages; and that nothing is announced."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

from tests.api.stand_in import Served


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("mpsagent", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


def ask(served: Served, target: str) -> tuple[int, dict[str, str], Any]:
    """Status, headers (names in small letters), JSON."""
    connection = _Connection(str(served.path))
    connection.request("GET", target)
    answer = connection.getresponse()
    raw = answer.read()
    connection.close()
    found = {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, found, json.loads(raw) if raw else None


def raw(served: Served, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the answer to these bytes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(served.path))
        sock.sendall(request)
        got = b""
        while part := sock.recv(65536):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    return head, body


# What aiohttp answers by itself, what our connection does, and what the handlers do.
NOT_TAKEN = {
    "no HTTP": b"hello\r\n\r\n",
    "a header without a colon": b"GET /v1/status HTTP/1.1\r\nHost m\r\n\r\n",
    "a length that is none": b"POST /v1/status HTTP/1.1\r\nHost: m\r\nContent-Length: x\r\n\r\n",
    "no such path": b"GET /nothing HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n",
    "an order": b"POST /v1/status HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n",
    "a wrong question": b"GET /v1/events?limit=0 HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("what", NOT_TAKEN)
def test_each_refusal_is_a_problem_detail(served: Served, what: str) -> None:
    """One form for programs, whoever refuses; and who answers is not said."""
    head, body = raw(served, NOT_TAKEN[what])
    status = int(head.split()[1])
    problem = json.loads(body)
    assert 400 <= status < 500
    assert b"application/problem+json" in head
    assert (problem["status"], problem["type"]) == (status, "about:blank")
    assert problem["detail"]
    assert b"\r\nserver:" not in head.lower()


@pytest.mark.parametrize("target", ["/healthz", "/metrics", "/openapi.json", "/v1/status", "/v1/clients", "/v1/events"])
def test_no_answer_says_what_software_it_is_from(served: Served, target: str) -> None:
    """Versions of Python and aiohttp help only who looks for holes in them."""
    head, _ = raw(served, f"GET {target} HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n".encode())
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"\r\nserver:" not in head.lower()


def test_a_stream_does_not_say_it_either(served: Served) -> None:
    """It is another kind of answer in aiohttp."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(served.path))
        sock.sendall(b"GET /v1/events?follow=1 HTTP/1.1\r\nHost: m\r\n\r\n")
        got = b""
        while b"\r\n\r\n" not in got:
            got += sock.recv(1000)
    assert b"\r\nserver:" not in got.lower()


def test_an_order_is_told_what_is_allowed_instead(served: Served) -> None:
    head, _ = raw(served, NOT_TAKEN["an order"])
    assert b"\r\nAllow: GET" in head


def test_a_fault_of_our_own_is_an_answer_and_is_reported(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = []

    def fails() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(served.api, "_failed", failures.append)
    monkeypatch.setattr(served.backend, "leases", fails)
    status, _, body = ask(served, "/v1/leases")
    assert (status, "ZeroDivisionError" in body["detail"]) == (500, True)
    assert list(map(type, failures)) == [ZeroDivisionError]
