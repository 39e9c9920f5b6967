"""A peer that is slow, big, many or broken is dropped; others do not notice."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest

from mpsagent.api.connections import Bounds
from mpsagent.cli import client
from tests.api.stand_in import Served, serve
from tests.lingering import SECONDS, lingering, needs_refusal
from tests.waiting import until

TIGHT = Bounds(
    connections_per_uid=6,
    header_time=1.5,
    idle_time=2.0,
    heartbeat=0.2,
)


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(bounds=TIGHT) as one:
        yield one


def connect(served: Served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(str(served.path))
    return sock


def answer(sock: socket.socket) -> bytes:
    """Everything until the other side closes; a reset counts as closed."""
    received = b""
    try:
        while data := sock.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def alive(served: Served) -> bool:
    return client.request(str(served.path), "/healthz")[0] == 200


def test_a_header_that_never_ends_is_dropped(served: Served) -> None:
    """The peer that sends a byte now and then (slow loris) has header_time for all of it, not for each byte."""
    with connect(served) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nX: ")
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(200):
                sock.sendall(b"a")
                time.sleep(0.02)
    assert alive(served)


@pytest.mark.root
def test_a_descriptor_that_takes_long_to_close_is_not_taken(served: Served) -> None:
    """The agent stood still for as long as its sender liked: it is the receiver of a message who closes what came."""
    needs_refusal()
    begun = time.monotonic()
    with lingering(served.path, socket.SOCK_STREAM, 20001) as became:
        assert became == "refused"
        assert alive(served)
        assert time.monotonic() - begun < SECONDS / 2


def test_a_silent_connection_is_dropped(served: Served) -> None:
    """Nothing is sent at all."""
    with connect(served) as sock:
        assert answer(sock) == b""


def test_a_line_of_more_than_16_kib_is_refused(served: Served) -> None:
    """In our form, before anything has grown."""
    with connect(served) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: m\r\nX: " + b"a" * 20000 + b"\r\n\r\n")
        got = answer(sock)
    assert b" 400 " in got[:20], got
    assert alive(served)


@pytest.mark.parametrize(
    "text",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_and_closed(served: Served, text: bytes) -> None:
    """A 400 or nothing, never a hang or a fault of ours."""
    with connect(served) as sock:
        sock.sendall(text)
        got = answer(sock)
    assert got == b"" or got.split(b" ")[1][:1] in (b"4", b"5")
    assert served.failures == []
    assert alive(served)


def test_a_slow_reader_of_a_stream_holds_up_no_other(served: Served) -> None:
    """A second reader gets every event meanwhile."""
    with connect(served) as slow:
        slow.sendall(b"GET /v1/events?follow=1&cursor=0 HTTP/1.1\r\nHost: m\r\n\r\n")
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(400):
            served.backend.happen("big", text="x" * 4000)
        got = []
        for line in client.lines(str(served.path), "/v1/events?follow=1&cursor=0"):
            event = json.loads(line)
            if "heartbeat" not in event:
                got.append(event["cursor"])
            if len(got) == 400:
                break
        assert got == list(range(1, 401))


def test_more_connections_than_allowed_are_told_so(served: Served) -> None:
    """And when one closes, the next may come."""
    most = TIGHT.connections_per_uid
    with ExitStack() as stack:
        held = [stack.enter_context(connect(served)) for _ in range(most)]
        for sock in held:
            sock.sendall(b"GET /v1/events?follow=1 HTTP/1.1\r\nHost: m\r\n\r\n")
        with connect(served) as sock:
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: m\r\n\r\n")
            got = answer(sock)
        assert got.startswith(b"HTTP/1.1 429 ")
        assert "too many" in json.loads(got.partition(b"\r\n\r\n")[2])["detail"]
        held[0].close()

        def let_in() -> bool:
            try:
                return alive(served)
            except client.Unreachable:
                return False

        until(let_in)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become other users")
def test_when_all_places_are_taken_the_oldest_makes_way() -> None:
    """One user may come with thousands of uids, each with a connection: nobody is locked out by them."""
    code = """
import os, socket, sys
held = []
for uid in range(20100, 20108):
    os.seteuid(uid)
    sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
    sock.sendall(b"GET /v1/events?follow=1 HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n")
    assert sock.recv(12) == b"HTTP/1.1 200"
    held.append(sock)
    os.seteuid(0)
print("on", flush=True)
sys.stdin.read()
"""
    with serve(bounds=replace(TIGHT, connections=4)) as served:
        command = [shutil.which("python3", path="/usr/bin:/bin") or "python3", "-c", code, str(served.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "on\n"
            assert all(alive(served) for _ in range(10))
            child.communicate("", timeout=60)
        assert served.api is not None
        assert served.api.peers.dropped >= 5


def test_who_asks_on_and_on_without_reading_is_dropped_and_a_few_requests_ahead_are_answered() -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: m\r\n\r\n"
    with serve() as served:
        with connect(served) as sock:
            sock.sendall(10 * request)
            got = b""
            while got.count(b'"problems":[]}\n') < 10:
                data = sock.recv(65536)
                assert data, "closed"
                got += data
        with connect(served) as sock:
            answers = 0
            with suppress(ConnectionError):
                sock.sendall(4000 * request)
                while (data := sock.recv(65536)) and answers < 4000:
                    answers += data.count(b'"problems":[]}\n')
            assert answers < 4000


def test_requests_one_after_the_other_on_one_connection() -> None:
    """Keep-alive works, also for a header that comes in pieces."""
    with serve() as served, connect(served) as sock:
        for _ in range(5):
            for piece in (b"GET /healthz HT", b"TP/1.1\r\nHost: m\r", b"\n\r", b"\n"):
                sock.sendall(piece)
                time.sleep(0.01)
            got = b""
            while b'"problems":[]}\n' not in got:
                data = sock.recv(65536)
                assert data, "closed"
                got += data
            assert got.startswith(b"HTTP/1.1 200 ")
