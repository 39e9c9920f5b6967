"""Users who ask for all they can, in loops: root is answered each time, and so is a user who asks for little.

What is asserted is answers, not seconds: a refusal, an empty answer or a time-out of the asker's own fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpsagent.interfaces import client
from mpsagent.interfaces.accept import Listener
from mpsagent.interfaces.allowance import Rates, Slices, cost
from mpsagent.interfaces.peers import Bounds
from mpsagent.system import database
from mpsagent.system.database import Query, Record
from mpsagent.system.history import History
from tests.interfaces.stand_in import Served, StandIn, serve, until

_PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
FLOODERS = (20011, 20012, 20013, 20014)
as_users = pytest.mark.skipif(os.getuid() != 0, reason="needs root to become other users")

# Each child runs as another user, who may not be able to read this checkout.
_CONNECT = """
import socket, sys
print("on", flush=True)
while True:
    sock = socket.socket(socket.AF_UNIX)
    try: sock.connect(sys.argv[1])
    except OSError: pass
    sock.close()
"""
_EVENTS = """
import socket, sys, threading
def loop():
    while True:
        sock = socket.socket(socket.AF_UNIX); sock.settimeout(20)
        try:
            sock.connect(sys.argv[1])
            sock.sendall(b"GET /v1/events?limit=1000&cursor=0 HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n" * 20)
            while sock.recv(65536): pass
        except OSError: pass
        sock.close()
for _ in range(8): threading.Thread(target=loop, daemon=True).start()
print("on", flush=True)
sys.stdin.read()
"""
# Requests of every kind, whole and broken, several at once; each run another order.
_FUZZ = """
import random, select, socket, sys, time
pick = random.Random(int(time.time() * 1e6)).choice
paths = ["/v1/status", "/v1/clients", "/v1/queue", "/v1/servers", "/v1/policy", "/metrics", "/healthz", "/openapi.json",
         "/v1/events?limit=1000&cursor=0", "/v1/events?follow=1", "/v1/policy/explain?user=root", "/v1/drain",
         "/v1/clients/1/terminate", "/v1/events?limit=-1", "/v1/../../etc/passwd", "/" + "x" * 9000, "*", ""]
def request():
    body = pick([b"", b"", b"{}", b"{" * 5000, b"[" * 60000, random.randbytes(300), b'{"timeout": 1e999}'])
    length = pick([len(body), len(body), 0, 10 ** 18, -1, "x"])
    method = pick(['GET', 'GET', 'GET', 'POST', 'HEAD', 'PUT', 'x'])
    head = f"{method} {pick(paths)} HTTP/{pick(['1.1', '1.1', '1.0', '9'])}"
    data = f"{head}\\r\\nHost: m\\r\\nContent-Length: {length}\\r\\n\\r\\n".encode() + body
    return pick([data, data, data * 20, data[:random.randrange(len(data))], random.randbytes(2000)])
print("on", flush=True)
held = []
while True:
    sock = socket.socket(socket.AF_UNIX); sock.settimeout(0.2)
    try:
        sock.connect(sys.argv[1]); sock.sendall(request())
        if pick([True, False]): sock.recv(65536)
    except OSError: pass
    held.append(sock)
    if len(held) > 8: held.pop(random.randrange(8)).close()
"""
_FOLLOW = """
import socket, sys
held = []
for _ in range(16):
    sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
    sock.sendall(b"GET /v1/events?follow=1 HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n"); held.append(sock)
print("on", flush=True)
import select
while True:
    for sock in select.select(held, [], [])[0]:
        if not sock.recv(65536): held.remove(sock)
"""


@contextmanager
def flooding(served: Served, code: str, uids: tuple[int, ...] = FLOODERS) -> Iterator[None]:
    children = [
        subprocess.Popen(
            [_PYTHON, "-c", code, str(served.path)], user=uid, group=uid, extra_groups=[], cwd="/", env={},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for uid in uids
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "on\n"
        yield
        assert all(child.poll() is None for child in children), "a flood that stops proves nothing"
    finally:
        for child in children:
            child.kill()
            child.communicate(timeout=60)


@pytest.fixture
def served() -> Iterator[Served]:
    backend = StandIn(events_kept=2000)
    for number in range(2000):
        backend.happen("action", action="TerminateClient", pid=number, uid=20001, server=500, reason="the turn " * 10)
    with serve(backend) as one:
        yield one


_ASK = """
import json, socket, sys
for _ in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    sock.sendall(b"GET /v1/status HTTP/1.0\\r\\nHost: m\\r\\n\\r\\n")
    data = b""
    while part := sock.recv(65536): data += part
    head, _, body = data.partition(b"\\r\\n\\r\\n")
    assert head.startswith((b"HTTP/1.0 200", b"HTTP/1.1 200")), head
    assert json.loads(body)["turn"]["user"] == "alice"
print("answered")
"""


def _another_user(served: Served, count: int = 10) -> None:
    """Who asks for little is answered each time, by everybody's socket."""
    done = subprocess.run(
        [_PYTHON, "-c", _ASK, str(served.path), str(count)], user=20021, group=20021, extra_groups=[], cwd="/", env={},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "answered\n", done.stderr


def _root(served: Served, count: int = 40) -> None:
    for _ in range(count):
        assert client.request(str(served.path), "GET", "/v1/status", timeout=60)[0] == 200


@as_users
@pytest.mark.root
@pytest.mark.parametrize("code", [_CONNECT, _EVENTS, _FUZZ, _FOLLOW], ids=["connect", "events", "fuzz", "follow"])
def test_four_users_in_a_loop_lock_out_no_other(served: Served, code: str) -> None:
    """261 of 338 of root's connections were refused while one process connected in a loop; four users with 16
    connections each locked out the fifth."""
    with flooding(served, code):
        for _ in range(200):
            served.backend.happen("noise", text="x" * 100)
        _root(served)
        _another_user(served)
    assert served.failures == []


_SLOW = """
import socket, sys
kept = []
for _ in range(12):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    sock.sendall(b"GET /v1/events?kind=slow HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n")
    kept.append(sock)
print("on", flush=True)
sys.stdin.read()
"""


@as_users
@pytest.mark.root
def test_questions_that_take_long_do_not_keep_roots_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of the whole history takes seconds; root's waited behind those of four users, 9 s of its 10."""
    history, go_on, under_way = History(str(tmp_path)), threading.Event(), list[Query]()

    def find(path: Path, query: Query) -> list[Record]:
        if query.kind == "slow":
            under_way.append(query)
            go_on.wait(60)
        return []

    class Asked(StandIn):
        async def find(self, user: str | None, query: Query) -> Any:
            return await history.find(query)

    monkeypatch.setattr(database, "find", find)
    try:
        with serve(Asked()) as served, flooding(served, _SLOW):
            until(lambda: len(under_way) >= 2)
            assert client.request(str(served.path), "GET", "/v1/events?kind=quick", timeout=60)[0] == 200
            assert len(under_way) == 2
            go_on.set()
    finally:
        go_on.set()
        history.close()


@as_users
@pytest.mark.root
def test_root_has_a_socket_that_no_other_user_can_fill(served: Served) -> None:
    """The administrators' socket is there for root, and no user can connect to it at all."""
    admin = served.path.with_name("mpsagent-admin.sock")
    assert client._administrators(str(served.path)) == str(admin)
    connect = "socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    code = f"import socket, sys\ntry: {connect}\nexcept PermissionError: print('no')"
    done = subprocess.run(
        [_PYTHON, "-c", code, str(admin)], user=20011, group=20011, extra_groups=[], cwd="/", env={},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "no\n"


@as_users
@pytest.mark.root
def test_who_asked_for_too_much_is_told_and_is_served_again_later() -> None:
    """Who is deep in debt is cut off as it connects: nothing is made for it. The debt is paid with time."""
    with serve() as served:
        assert served.api is not None
        allowances = served.api.peers.allowances
        until(lambda: allowances.charge(20011, 50, time.monotonic()) > 25)
        assert _one_request(served).stdout == ""
        assert served.api.peers.turned_away == 1
        allowances._due.clear()
        assert _one_request(served).stdout == "answered\n"


def _one_request(served: Served) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [_PYTHON, "-c", _ASK, str(served.path), "1"], user=20011, group=20011, extra_groups=[], cwd="/", env={},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


@as_users
@pytest.mark.root
def test_a_request_that_would_wait_for_too_long_is_told_so() -> None:
    """429 with what to do, on a connection that was there before the debt; the answer before it comes whole."""
    with serve(bounds=Bounds(rates=Rates(patience=0.2))) as served:
        assert served.api is not None
        allowances = served.api.peers.allowances
        code = """
import socket, sys
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
request = b"GET /healthz HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n"
sock.sendall(request); print(sock.recv(65536)[:12], flush=True)
sys.stdin.readline()
sock.sendall(request); data = b""
while part := sock.recv(65536): data += part
print(data[:12], b"less at a time" in data)
"""
        with subprocess.Popen(
            [_PYTHON, "-c", code, str(served.path)], user=20011, group=20011, extra_groups=[], cwd="/", env={},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as child:  # fmt: skip
            assert child.stdout is not None
            assert child.stdout.readline() == "b'HTTP/1.1 200'\n"
            until(lambda: allowances.charge(20011, 50, time.monotonic()) > 25)
            assert child.communicate("go\n", timeout=60)[0] == "b'HTTP/1.1 429' True\n"


_UNREAD = """
import socket, sys, threading, time
def loop():
    while True:
        sock = socket.socket(socket.AF_UNIX); sock.settimeout(20)
        try:
            sock.connect(sys.argv[1])
            sock.sendall(b"GET /v1/events?limit=1000&cursor=0 HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n" * 200)
            while True: time.sleep(1); sock.send(b"G")
        except OSError: pass
        sock.close()
for _ in range(16): threading.Thread(target=loop, daemon=True).start()
print("on", flush=True)
sys.stdin.read()
"""
_API = """
import sys
from tests.interfaces.stand_in import StandIn, serve
backend = StandIn(events_kept=2000)
for number in range(2000):
    backend.happen("action", action="TerminateClient", pid=number, uid=20001, server=500, reason="the turn " * 10)
with serve(backend) as served:
    print(served.path, flush=True)
    sys.stdin.read()
"""


@as_users
@pytest.mark.root
def test_twenty_users_who_do_not_read_take_less_than_20_mib() -> None:
    """16 connections of each with 200 requests in each, for long lists, and more as soon as one is dropped: 833 MiB, of
    which much stayed. The API has a process of its own here, so that its memory is its own."""
    code = [sys.executable, "-c", _API]
    checkout = Path(__file__).parents[2]
    with subprocess.Popen(code, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as api:
        assert api.stdout is not None
        served = Served(Path(api.stdout.readline().strip()), StandIn())
        assert client.request(str(served.path), "GET", "/v1/events?limit=1000&cursor=0")[0] == 200
        before, most = _memory(api.pid), 0
        with flooding(served, _UNREAD, tuple(range(20011, 20031))):
            end = time.monotonic() + 15
            while time.monotonic() < end:
                most = max(most, _memory(api.pid))
                time.sleep(0.05)
            _root(served, 5)
        assert most - before < 20 << 20
        api.communicate("")
        assert api.returncode == 0


def _memory(pid: int) -> int:
    """Resident bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- the parts --------------------------------------------------------------------------------------------------------


def test_an_answer_is_charged_for_its_bytes_and_its_work(served: Served) -> None:
    """1,000 events are not one request (they took 11 ms of the loop and counted as one)."""
    assert served.api is not None
    charged: list[tuple[int, float]] = []
    allowances = served.api.peers.allowances
    charge = allowances.charge

    def spy(uid: int, tokens: float, now: float, shared: bool = True) -> float:
        charged.append((uid, tokens))
        return charge(uid, tokens, now, shared)

    allowances.charge = spy  # type: ignore[method-assign]
    status, raw = client.request(str(served.path), "GET", "/v1/events?limit=1000&cursor=0")
    assert (status, len(json.loads(raw)["events"])) == (200, 1000)
    connection, request, passed_over, answer = [tokens for _, tokens in charged]
    assert (connection, request, passed_over) == (1.0, 1.0, 1.0)
    assert answer >= len(raw) / 4096 > 50
    assert cost(4096, 0.003) == 4.0


def test_a_long_answer_leaves_the_loop_its_turns() -> None:
    """Other work is done while 20,000 rows are written, and one user's answers come one after the other."""

    async def scenario() -> None:
        slices, turns = Slices(), 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        rows = [{"number": number, "text": "x" * 50} for number in range(20_000)]
        lines, work = await slices.lines(7, rows)
        assert [json.loads(line)["number"] for line in lines] == list(range(20_000))
        # about a turn for each millisecond of work; fewer where other programs have the processor in between
        assert turns >= work / 0.001 / 50
        assert slices._each._own == {}
        beside.cancel()

    asyncio.run(scenario())


def test_users_take_turns_slice_by_slice() -> None:
    """Who asks for one row does not wait for another user's thousands, however many answers that one wants."""

    async def scenario() -> None:
        slices, done = Slices(), []

        async def ask(uid: int, count: int) -> None:
            await slices.lines(uid, ({"number": number} for number in range(count)))
            done.append(uid)

        many = [asyncio.create_task(ask(7, 50_000)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.create_task(ask(8, 1))
        assert done == [8]
        await asyncio.gather(*many)

    asyncio.run(scenario())


def test_accepting_pauses_when_too_many_come_at_once(tmp_path: Path) -> None:
    """All are taken in the end, and other work is done in between."""

    async def scenario() -> None:
        taken: list[socket.socket] = []
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / "s"))
            sock.listen(1000)
            listener = Listener(sock, taken.append)

            def connect() -> None:
                for _ in range(500):
                    with socket.socket(socket.AF_UNIX) as one:
                        one.connect(str(tmp_path / "s"))

            thread = threading.Thread(target=connect)
            thread.start()
            turns = 0
            async with asyncio.timeout(60):
                while len(taken) < 500:
                    turns += 1
                    await asyncio.sleep(0)
            thread.join()
            assert turns > 1
            listener.close()
        for one in taken:
            one.close()

    asyncio.run(scenario())


def test_no_descriptors_left_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listening socket stays readable then: asked at once, it would turn for ever."""
    monkeypatch.setattr("mpsagent.interfaces.accept.NO_DESCRIPTORS", 0.05)

    class Exhausted:
        """Fails twice, as accept does at the limit."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.failures = sock, 0

        def accept(self) -> tuple[socket.socket, object]:
            self.failures += 1
            if self.failures <= 2:
                raise OSError(24, "Too many open files")
            return self.sock.accept()

        def fileno(self) -> int:
            return self.sock.fileno()

        def setblocking(self, flag: bool) -> None:
            self.sock.setblocking(flag)

        def close(self) -> None:
            self.sock.close()

    async def scenario() -> None:
        taken: list[socket.socket] = []
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(tmp_path / "s"))
        sock.listen()
        exhausted = Exhausted(sock)
        listener = Listener(exhausted, taken.append)  # type: ignore[arg-type]
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(tmp_path / "s"))
            async with asyncio.timeout(60):
                while not taken:
                    await asyncio.sleep(0.01)
        assert exhausted.failures >= 3
        listener.close()
        taken[0].close()

    asyncio.run(scenario())
