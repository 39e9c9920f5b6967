"""A peer that is slow, big, many or broken is dropped; others do not notice."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from mpsagent.interfaces import client
from mpsagent.interfaces.allowance import Allowances, Rates
from mpsagent.interfaces.peers import Bounds
from tests.interfaces.stand_in import Served, serve, until
from tests.lingering import SECONDS, lingering, needs_refusal

TIGHT = Bounds(
    connections_per_uid=6,
    header_time=1.5,
    body_time=1.0,
    idle_time=2.0,
    write_time=1.5,
    write_buffer=32768,
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
    return client.request(str(served.path), "GET", "/healthz")[0] == 200


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


@pytest.mark.parametrize(
    "header",
    [b"X: " + b"a" * 20000 + b"\r\n", b"".join(b"X-%d: %s\r\n" % (i, b"b" * 200) for i in range(100))],
    ids=["one long line", "many lines"],
)
def test_a_header_of_more_than_16_kib_is_refused(served: Served, header: bytes) -> None:
    """431 in our form, before anything has grown."""
    with connect(served) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: m\r\n" + header + b"\r\n")
        got = answer(sock)
    assert got.startswith(b"HTTP/1.1 431 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["hint"] == "at most 16384 bytes"
    assert alive(served)


def test_a_body_of_more_than_16_kib_is_refused(served: Served) -> None:
    """413 as soon as its length is known; 411 for one in chunks, whose length is not."""
    with connect(served) as sock:
        sock.sendall(b"POST /v1/resume HTTP/1.1\r\nHost: m\r\nContent-Length: 17000\r\n\r\n" + b"x" * 17000)
        assert answer(sock).startswith(b"HTTP/1.1 413 ")
    with connect(served) as sock:
        sock.sendall(b"POST /v1/resume HTTP/1.1\r\nHost: m\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert answer(sock).startswith(b"HTTP/1.1 411 ")
    assert served.backend.asked == []
    assert alive(served)


def test_a_body_that_never_comes_is_answered_and_dropped(served: Served) -> None:
    """body_time for all of it."""
    with connect(served) as sock:
        sock.sendall(b"POST /v1/resume HTTP/1.1\r\nHost: m\r\nContent-Length: 100\r\n\r\n{")
        assert answer(sock).startswith(b"HTTP/1.1 503 ")
    assert served.backend.asked == []


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


def test_a_slow_reader_of_a_stream_is_dropped_and_others_are_not(served: Served) -> None:
    """Promise of the design: dropped, never waited for. A second reader gets every event meanwhile."""
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
        assert served.api is not None
        until(lambda: served.api is not None and served.api.peers.dropped >= 1)
        until(lambda: served.api is not None and served.api.peers.connected <= 1)


def test_a_reader_that_does_not_take_a_plain_answer_is_dropped_too(served: Served) -> None:
    """Pipelined requests whose answers are not read fill the buffer and end the connection."""
    for _ in range(500):
        served.backend.happen("big", text="x" * 4000)
    with connect(served) as sock:
        sock.settimeout(0.5)
        with pytest.raises(OSError):  # noqa: PT012
            for _ in range(10000):
                sock.sendall(b"GET /v1/events?limit=500 HTTP/1.1\r\nHost: m\r\n\r\n")
                time.sleep(0.005)
    assert alive(served)


def test_more_connections_than_allowed_are_told_so(served: Served) -> None:
    """And when one closes, the next may come."""
    most = TIGHT.connections_per_uid
    with ExitStack() as stack:
        held = [stack.enter_context(connect(served)) for _ in range(most)]
        for sock in held:
            sock.sendall(b"GET /v1/events?follow=1 HTTP/1.1\r\nHost: m\r\n\r\n")
        with connect(served) as sock:
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


def test_pipelined_requests_are_answered_one_after_the_other(served: Served) -> None:
    """Many in one packet, with and without bodies, each gets its answer in its turn; too many at once are dropped."""
    with connect(served) as sock:
        request = b'POST /v1/resume HTTP/1.1\r\nHost: m\r\nContent-Length: 7\r\n\r\n{"x":1}'
        sock.sendall((request + b"GET /healthz HTTP/1.1\r\nHost: m\r\n\r\n") * 20)
        got = b""
        while got.count(b"HTTP/1.1 ") < 40 or not got.endswith(b"}\n"):
            data = sock.recv(65536)
            assert data, got
            got += data
        assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"400", b"200"] * 20
    with connect(served) as sock, pytest.raises(OSError):  # noqa: PT012
        sock.settimeout(5)
        for _ in range(1000):
            sock.sendall(b"GET /v1/policy/explain?user=slow HTTP/1.1\r\nHost: m\r\n\r\n" * 100)
    assert alive(served)


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_one_answer_of_a_user_is_read_before_the_next_is_made() -> None:
    """An answer that is not read holds up its own user's others for write_time, and nobody else; a stream holds up
    none."""
    with serve(bounds=replace(TIGHT, rates=Rates(rate=1e5, burst=1e5, rate_all=1e5, burst_all=1e5))) as served:
        for _ in range(500):
            served.backend.happen("big", text="x" * 4000)
        code = """
import socket, sys
def ask(target):
    sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
    sock.sendall(b"GET " + target + b" HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n")
    return sock
stream = ask(b"/v1/events?follow=1")
assert stream.recv(100)
unread = ask(b"/v1/events?limit=500&cursor=0")
assert unread.recv(100)
second = ask(b"/healthz")
print("asked", flush=True)
sys.stdin.readline()
second.setblocking(False)
try: print(second.recv(12), flush=True)
except BlockingIOError: print("waits", flush=True)
second.setblocking(True)
print(second.recv(12), flush=True)
"""
        with subprocess.Popen(
            [shutil.which("python3", path="/usr/bin:/bin") or "python3", "-c", code, str(served.path)],
            user=20011, group=20011, extra_groups=[], cwd="/", env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == "asked\n"
            assert alive(served)
            child.stdin.write("go\n")
            child.stdin.flush()
            assert child.stdout.readline() == "waits\n"
            assert child.stdout.readline() == "b'HTTP/1.1 200'\n"


def test_a_flood_of_requests_waits_its_turn() -> None:
    """One user's requests beyond the burst come at the rate; none is refused, and another user is not held up."""
    allowances = Allowances(Rates(rate=10, burst=5))
    assert [round(allowances.charge(7, 1, 100.0), 3) for _ in range(8)] == [0, 0, 0, 0, 0, 0.1, 0.2, 0.3]
    assert allowances.charge(8, 1, 100.0) == 0
    assert [allowances.charge(0, 1, 100.0) for _ in range(100)] == [0.0] * 100
    assert allowances.charge(7, 1, 200.0) == 0
    for uid in range(1, 10000):
        allowances.charge(uid, 1, 300.0 + uid)
    assert len(allowances._due) < 5000, "who has not asked for long is forgotten"


def test_an_answer_costs_what_it_is_worth() -> None:
    """A request for many events is not one request: who asks for much at a time waits longer, to a bound."""
    allowances = Allowances(Rates(rate=10, burst=5, debt=30))
    assert allowances.charge(7, 25, 100.0) == 2.0
    assert allowances.charge(7, 1e9, 100.0) == 30.0, "a debt is paid some day"
    assert allowances.charge(8, 1, 100.0) == 1.0, "all users together have a bound too: one may have thousands of uids"
    assert allowances.charge(0, 1, 100.0) == 0.0
    assert allowances.charge(9, 1, 100.0, shared=False) == 0.0, "administrators do not wait for others"


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
