"""Events with a cursor: a reader that comes back misses nothing, and one that comes too late is told."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from mpsagent.interfaces import client
from mpsagent.interfaces.peers import Bounds
from tests.interfaces.stand_in import Served, StandIn, serve, until


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(StandIn(events_kept=50), Bounds(heartbeat=0.1)) as one:
        yield one


def test_a_reader_that_reconnects_with_its_cursor_misses_nothing(served: Served) -> None:
    """A hundred events from another thread, while the reader hangs up after every third line."""
    got: list[int] = []
    enough = threading.Event()

    def write() -> None:
        for number in range(100):
            served.backend.happen("count", number=number)
            while served.backend.last - (got[-1] if got else 0) > 40 and not enough.wait(0.001):
                pass

    writer = threading.Thread(target=write)
    writer.start()
    cursor = 0
    try:
        while len(got) < 100:
            stream = client.lines(str(served.path), f"/v1/events?follow=1&cursor={cursor}", 60)
            for number, line in enumerate(stream):
                event = json.loads(line)
                cursor = event["cursor"]
                if "heartbeat" not in event:
                    got.append(cursor)
                if number == 2:
                    stream.close()
                    break
    finally:
        enough.set()
        writer.join()
    assert got == list(range(1, 101))


def test_a_cursor_older_than_the_history_is_410_and_says_the_oldest(served: Served) -> None:
    """With the cursor from the answer everything that is kept can be read."""
    for _ in range(80):
        served.backend.happen("old")
    for target in ("/v1/events?cursor=3", "/v1/events?cursor=3&follow=1"):
        status, raw = client.request(str(served.path), "GET", target)
        error = json.loads(raw)
        assert (status, error["oldest"]) == (410, 30)
    status, raw = client.request(str(served.path), "GET", "/v1/events?cursor=30&limit=1000")
    assert [event["cursor"] for event in json.loads(raw)["events"]] == list(range(31, 81))


def test_without_a_cursor_the_newest_come(served: Served) -> None:
    """And the answer's cursor goes on from there."""
    assert json.loads(client.request(str(served.path), "GET", "/v1/events")[1]) == {"events": [], "cursor": 0}
    for _ in range(9):
        served.backend.happen("x")
    body = json.loads(client.request(str(served.path), "GET", "/v1/events?limit=2")[1])
    assert ([event["cursor"] for event in body["events"]], body["cursor"]) == ([8, 9], 9)
    body = json.loads(client.request(str(served.path), "GET", "/v1/events?cursor=9")[1])
    assert body == {"events": [], "cursor": 9}


def test_a_quiet_stream_has_a_heartbeat_with_the_cursor(served: Served) -> None:
    """So that a reader knows that the agent lives, and a dead reader is noticed."""
    served.backend.happen("x")
    stream = client.lines(str(served.path), "/v1/events?follow=1", 60)
    first, second = json.loads(next(stream)), json.loads(next(stream))
    assert (first["kind"], second["cursor"], "heartbeat" in second) == ("x", 1, True)


def test_who_asks_for_the_head_of_a_stream_gets_no_events(served: Served) -> None:
    """A body behind the head would be taken for the beginning of the next answer."""
    served.backend.happen("count", number=1)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(served.path))
        head = b"HEAD /v1/events?follow=1&cursor=0 HTTP/1.1\r\nHost: m\r\n\r\n"
        sock.sendall(head + b"GET /healthz HTTP/1.1\r\nHost: m\r\nConnection: close\r\n\r\n")
        received = b""
        while len(received.partition(b"\r\n\r\n")[2]) < 13 and (data := sock.recv(65536)):
            received += data
    first, _, second = received.partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 200 "), second


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["no head", "an error"])
def test_a_socket_that_is_not_ours_does_not_fill_the_askers_memory(tmp_path: Path, head: bytes) -> None:
    """It never ends its head, or its error."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        sent: list[int] = []

        def answer() -> None:
            taken, _ = listener.accept()
            with taken, suppress(OSError):
                taken.sendall(head)
                while sum(sent) < 20 << 20:
                    sent.append(taken.send(b"x" * 65536))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(client.Unreachable, match="more than"):
            list(client.lines(str(tmp_path / "s"), "/v1/events?follow=1", 60))
        thread.join()
        assert sum(sent) < 4 << 20


def test_a_stream_overtaken_by_the_history_ends_with_the_reason(served: Served) -> None:
    """The last line says where to go on; nothing is skipped in silence."""
    stream = client.lines(str(served.path), "/v1/events?follow=1&cursor=0", 60)
    next(stream)
    served.backend.last += 1000
    served.backend.happen("later")
    last = [json.loads(line) for line in stream][-1]
    assert last["oldest"] == 1000


def test_an_event_is_written_once_for_all_who_follow() -> None:
    """And every stream has each of them, once and in order, whenever it came."""

    class Counting(StandIn):
        def __init__(self) -> None:
            super().__init__()
            self.shown: list[int] = []

        def event(self, record: Any) -> Any:
            self.shown.append(record["seq"])
            return super().event(record)

    backend = Counting()
    with serve(backend, Bounds(heartbeat=3600)) as other:
        streams = [client.lines(str(other.path), "/v1/events?follow=1&cursor=0", 60) for _ in range(12)]
        for _ in range(100):
            backend.happen("x")
        for number, stream in enumerate(streams):
            assert [json.loads(next(stream))["cursor"] for _ in range(100)] == list(range(1, 101))
            if number == 5:
                for _ in range(20):
                    backend.happen("y")
        for number, stream in enumerate(streams):
            if number % 2:
                stream.close()
            else:
                assert [json.loads(next(stream))["cursor"] for _ in range(20)] == list(range(101, 121))
        assert sorted(backend.shown) == list(range(1, 121))


def test_an_event_is_read_once_for_all_who_have_all_before_it() -> None:
    """And comes to each as it should: in chunks by HTTP/1.1, as plain lines by HTTP/1.0."""

    class Counting(StandIn):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.read = 0, 0

        async def records(self, cursor: int | None, limit: int) -> Any:
            found = await super().records(cursor, limit)
            self.idle, self.read = self.idle + (not found), self.read + bool(found)
            return found

    backend = Counting()
    backend.happen("x")
    with serve(backend, Bounds(heartbeat=3600)) as other, ExitStack() as stack:
        answers: list[Iterator[bytes]] = []
        for number in range(6):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(60)
            sock.connect(str(other.path))
            sock.sendall(b"GET /v1/events?follow=1&cursor=0 HTTP/1.%d\r\nHost: m\r\n\r\n" % (number % 2))
            answer = HTTPResponse(sock)
            answer.begin()
            assert answer.chunked is bool(number % 2)
            answers.append(stack.enter_context(answer))
        for count in range(1, 31):
            assert [json.loads(next(one))["cursor"] for one in answers] == [count] * 6
            until(lambda: backend.idle == 6)  # each waits for more, and none looks by itself any more
            if count < 30:
                backend.happen("y")
        assert backend.read == 6 + 29


def test_a_reader_that_hangs_up_is_forgotten(served: Served) -> None:
    """Its connection no longer counts, long before the heartbeat of an hour."""
    with serve(bounds=Bounds(heartbeat=3600)) as other:
        stream = client.lines(str(other.path), "/v1/events?follow=1", 60)
        next(stream)
        stream.close()
        until(lambda: other.api is not None and not other.api.peers.connected)
