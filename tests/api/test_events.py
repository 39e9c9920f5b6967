"""Events with a cursor: a reader that comes back misses nothing, and one that comes too late is told."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mpsagent.api import database, history
from mpsagent.api.connections import Bounds
from mpsagent.api.database import NAME, Query
from mpsagent.api.history import History
from mpsagent.api.instances import CursorGone, Everything
from mpsagent.api.metrics import Metrics
from mpsagent.api.received import Received
from mpsagent.cli import client
from mpsagent.snapshot.problem import Problem
from mpsagent.system.names import Names
from tests.api.stand_in import Served, StandIn, serve
from tests.coroutines import until as until_so
from tests.waiting import until


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
            while served.backend.newest() - (got[-1] if got else 0) > 40 and not enough.wait(0.001):
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
        status, raw = client.request(str(served.path), target)
        error = json.loads(raw)
        assert (status, error["oldest"]) == (410, 30)
    status, raw = client.request(str(served.path), "/v1/events?cursor=30&limit=1000")
    assert [event["cursor"] for event in json.loads(raw)["events"]] == list(range(31, 81))


def test_without_a_cursor_the_newest_come(served: Served) -> None:
    """And the answer's cursor goes on from there."""
    assert json.loads(client.request(str(served.path), "/v1/events")[1]) == {"events": [], "cursor": 0}
    for _ in range(9):
        served.backend.happen("x")
    body = json.loads(client.request(str(served.path), "/v1/events?limit=2")[1])
    assert ([event["cursor"] for event in body["events"]], body["cursor"]) == ([8, 9], 9)
    body = json.loads(client.request(str(served.path), "/v1/events?cursor=9")[1])
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
    served.backend.history.newest += 1000
    served.backend.happen("later")
    last = [json.loads(line) for line in stream][-1]
    assert last["oldest"] == 1000


def test_a_reader_that_hangs_up_is_forgotten(served: Served) -> None:
    """Its connection no longer counts, long before the heartbeat of an hour."""
    with serve(bounds=Bounds(heartbeat=3600)) as other:
        stream = client.lines(str(other.path), "/v1/events?follow=1", 60)
        next(stream)
        stream.close()
        until(lambda: other.api is not None and not other.api.peers.connected)


def received(place: Path) -> tuple[Everything, Received]:
    one = Received(History(str(place)), Names(), Metrics())
    return Everything(one), one


def said(backend: Everything) -> str:
    return "; ".join(one.what for one in backend._conditions())


def test_a_history_that_is_broken_is_said_and_a_new_one_begun(tmp_path: Path) -> None:
    """Nothing waits for it: `status` and the record say where the old one is."""

    async def scenario() -> None:
        (tmp_path / NAME).write_bytes(b"no database")
        backend, one = received(tmp_path)
        assert ".broken-" in said(backend)
        assert ".broken-" in said(backend), "for a while"
        await one.history.wait(0)
        assert [record["kind"] for record in await backend.records(None, 10)] == ["history.broken"]
        one.history.close()

    asyncio.run(scenario())


def test_a_history_that_takes_nothing_is_said_until_it_does_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program holds the file, as a backup may; who follows does not wait for the disk."""
    monkeypatch.setattr(database, "BUSY", 0.05)
    monkeypatch.setattr(history, "RETRY_LAST", 0.05)

    async def scenario() -> None:
        backend, one = received(tmp_path)
        other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        number = one.append("first", 1.0)
        await until_so(lambda: "only in memory" in said(backend))
        assert one.history.newest >= number
        other.execute("COMMIT")
        other.close()
        await until_so(lambda: "only in memory" not in said(backend) and not one.history._pending)
        query = Query(after=number - 1)
        assert (await one.history.ask(lambda path: database.find(path, query)))[0]["kind"] == "first"
        one.history.close()

    asyncio.run(scenario())


def test_a_cursor_reaches_back_as_far_as_the_file_does(tmp_path: Path) -> None:
    """A reader that was away for a month misses nothing that is kept."""

    async def scenario() -> None:
        backend, one = received(tmp_path)
        first = one.append("first", 1.0, uid=1000)
        for number in range(20):
            one.append("more", 2.0, number=number)
        await until_so(lambda: one.history.newest == one.history.last)
        one.history._records.clear()  # as after 10,000 others
        found = await backend.records(first - 1, 3)
        assert [(record["seq"], record["kind"]) for record in found] == [
            (first, "first"), (first + 1, "more"), (first + 2, "more"),
        ]  # fmt: skip
        last = one.append("last", 3.0)
        await until_so(lambda: one.history.newest == last)
        assert [record["seq"] for record in await backend.records(last - 2, 5)] == [last - 1, last]
        with pytest.raises(CursorGone):
            await backend.records(last + 1, 5)
        one.history._path = None
        with pytest.raises(Problem) as refused:
            await backend.report("user", "2026-01-01", "2026-01-02")
        assert refused.value.status == 503
        one.history.close()

    asyncio.run(scenario())
