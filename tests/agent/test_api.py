"""The api apart: it has no rights, it may be flooded, stopped, killed or hostile, and the agent goes on."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpsagent.agent import api_side
from mpsagent.agent.showing import Showing
from mpsagent.api.history import History
from mpsagent.api.metrics import Metrics
from mpsagent.api.received import OtherVersion, Received, _Reader
from mpsagent.core import transitions as tr
from mpsagent.core.model import State, Status
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.snapshot import page as pages
from mpsagent.snapshot.page import HAS, LENGTH, LOOK, SAID, SHOWS, Frame
from mpsagent.system.names import Names
from tests.agent.stage import A, B, Stage
from tests.coroutines import until

PYTHON = shutil.which("python3", path="/usr/bin:/bin") or sys.executable
root = pytest.mark.root


def test_the_agent_loads_nothing_that_is_for_people() -> None:
    """Neither HTTP nor SQL, nor what a page is made with."""
    code = "import sys, mpsagent.agent.main; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    wrong = {"aiohttp", "sqlite3", "prometheus_client", "click", "pydantic", "http.server", "http.client"} & set(found)
    ours = [one for one in found if one.startswith("mpsagent.api.")]
    assert (wrong, ours) == (set(), [])


@root
def test_the_api_has_no_rights(stage: Stage) -> None:
    agent = stage.with_agent()
    status = Path(f"/proc/{stage.api(agent)}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert "0" not in fields["Uid"].split()
    assert fields["Groups"].strip() == ""
    assert {fields[name].strip("0 ") for name in ("CapPrm", "CapEff", "CapAmb")} == {""}
    assert fields["NoNewPrivs"].strip() == "1"


@root
def test_an_api_that_was_killed_is_started_again_and_has_every_record(stage: Stage) -> None:
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n")
    first, before = stage.client(A, "sleep", 600), stage.api(agent)
    first.working()
    os.kill(before, signal.SIGKILL)
    first.kill()
    second = stage.client(B, "sleep", 600)
    second.working()
    stage.until(lambda: stage.api(agent) not in (0, before), "another api")
    for pid, kind in ((first.pid, "client.ended"), (second.pid, "client.connected")):
        stage.record(kind, pid=pid)
    stage.until(lambda: "users" in agent.api.status(), "it has the agent's page")
    assert [one["uid"] for one in agent.api.status()["users"]] == [B]
    numbers = [one["seq"] for one in stage.records()]
    assert numbers == sorted(set(numbers))
    marks = [(one["kind"], one["at"], one.get("pid"), one.get("action")) for one in stage.records()]
    assert len(marks) == len(set(marks)), "nothing is on record twice"


@root
def test_an_agent_comes_back_while_the_api_of_the_killed_one_is_still_there(stage: Stage) -> None:
    agent = stage.with_agent()
    before = stage.api(agent)
    os.kill(before, signal.SIGSTOP)
    os.kill(agent.pid, signal.SIGKILL)
    agent.started.process.wait()
    stage.agents.remove(agent)
    agent = stage.start_agent()
    time.sleep(1.0)
    os.kill(before, signal.SIGCONT)
    stage.answering(agent)
    assert stage.api(agent) != before


@root
def test_while_the_api_is_stopped_users_are_served_and_orders_are_carried_out(stage: Stage) -> None:
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n")
    api = stage.api(agent)
    os.kill(api, signal.SIGSTOP)
    try:
        stage.exact(A, 50)
        assert agent.api.order("drain")[1]["draining"]
        assert stage.cli(agent, "resume") == (0, "Waiting users are admitted.\n")
    finally:
        os.kill(api, signal.SIGCONT)
    stage.record("drain.resumed")


@root
def test_a_silent_agent_is_said(stage: Stage) -> None:
    """In the words that a person reads, with the exit status that scripts read; what is shown is of before."""
    agent = stage.with_agent()
    os.kill(agent.pid, signal.SIGSTOP)
    try:
        stage.until(lambda: "the agent is silent" in stage.cli(agent, "probe")[1], "probe says so")
        status, text = stage.cli(agent, "status")
        assert status == 1
        assert "the agent is silent" in text
        status, said = agent.api.ask("/healthz")
        assert (status, said["ok"]) == (503, False)
    finally:
        os.kill(agent.pid, signal.SIGCONT)
    stage.no_problem(agent)


_FLOOD = """
import socket, sys, threading
def loop():
    while True:
        sock = socket.socket(socket.AF_UNIX); sock.settimeout(5)
        try:
            sock.connect(sys.argv[1])
            sock.sendall(b"GET /v1/status HTTP/1.0\\r\\nHost: m\\r\\n\\r\\n")
            while sock.recv(65536): pass
        except OSError: pass
        sock.close()
for _ in range(4): threading.Thread(target=loop, daemon=True).start()
print("on", flush=True)
sys.stdin.read()
"""


@contextmanager
def flooding(path: Path, uids: range, program: str = _FLOOD) -> Iterator[None]:
    floods = [
        subprocess.Popen(
            [PYTHON, "-c", program, str(path)], user=uid, group=uid, extra_groups=[], cwd="/", env={},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for uid in uids
    ]  # fmt: skip
    try:
        for one in floods:
            assert one.stdout is not None
            assert one.stdout.readline() == b"on\n"
        yield
        assert all(one.poll() is None for one in floods), "a flood that stops proves nothing"
    finally:
        for one in floods:
            one.kill()
            one.communicate()


def ticks(pid: int) -> int:
    """Processor time of a process."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@root
def test_a_flood_of_readers_costs_the_agent_nothing(stage: Stage) -> None:
    """They meet the api: it works for them, and the agent works as it did before."""
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n")
    api = stage.api(agent)
    with flooding(agent.api.path, range(20011, 20015)):
        begun = ticks(agent.pid), ticks(api)
        stage.until(lambda: ticks(api) > begun[1] + 50, "the flood has cost the api half a second")
        assert ticks(agent.pid) - begun[0] < (ticks(api) - begun[1]) / 2
        stage.exact(A, 50)
        assert agent.api.order("drain")[0] == 200
        assert agent.api.order("resume")[0] == 200


_PIPELINES = """
import socket, sys
socks = [socket.socket(socket.AF_UNIX) for _ in range(16)]
text = b"GET /v1/status HTTP/1.1\\r\\nHost: m\\r\\n\\r\\n" * 4000
for sock in socks:
    sock.connect(sys.argv[1])
    sock.setblocking(False)
    try:
        sock.send(text)
    except OSError:
        pass
print("on", flush=True)
sys.stdin.read()
"""


def memory(pid: int) -> float:
    """MiB."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024


@root
def test_requests_without_end_that_nobody_reads_the_answers_of_take_little_memory(stage: Stage) -> None:
    """16 connections of each of 20 users, 4,000 requests on each (833 MiB, when the agent answered them itself)."""
    agent = stage.with_agent("")
    api = stage.api(agent)
    assert api is not None
    agent.api.get("/openapi.json")
    before = memory(agent.pid), memory(api)
    with flooding(agent.api.path, range(20011, 20031), _PIPELINES):
        for _ in range(20):
            assert agent.api.status()["control"]
        after = memory(agent.pid), memory(api)
    assert after[0] - before[0] < 20
    assert after[1] - before[1] < 20, f"{before} {after}"


# --- the parts --------------------------------------------------------------------------------------------------------


class Api:
    """The other end of :class:`Showing`: what it was shown."""

    def __init__(self) -> None:
        self.server, self.client = socket.socketpair()
        self.frames: list[Frame] = []

    async def connect(self) -> socket.socket:
        return self.client

    async def take(self) -> Frame:
        loop = asyncio.get_running_loop()
        self.server.setblocking(False)
        data = b""
        while len(data) < LENGTH.size or len(data) < LENGTH.size + LENGTH.unpack_from(data)[0]:
            size = LENGTH.size if len(data) < LENGTH.size else LENGTH.size + LENGTH.unpack_from(data)[0]
            data += await loop.sock_recv(self.server, size - len(data))
        frame: Frame = _Reader(BytesIO(data[LENGTH.size :])).load()
        self.frames.append(frame)
        return frame

    def say(self, what: bytes, number: int) -> None:
        self.server.send(SAID.pack(what, number))


def play(scenario: Callable[[Showing, Api], Any], page: Callable[[], Any] = lambda: None) -> None:
    async def main() -> None:
        api, looked = Api(), []

        async def look() -> None:
            looked.append(1)

        showing = Showing(api.connect, page, look)
        async with asyncio.timeout(60):
            await scenario(showing, api)
            api.server.close()
            await showing.close()

    asyncio.run(main())


def test_records_wait_for_the_api_in_a_bound_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.agent.showing.ROOM", 5)

    async def scenario(showing: Showing, api: Api) -> None:
        for number in range(8):
            assert showing.append("x", float(number), n=number) == number + 1
        assert (showing.lost, len(showing.kept)) == (3, 5)
        showing.start(1.0)
        frame = await api.take()
        assert (frame.lost, [one[0] for one in frame.records]) == (3, [4, 5, 6, 7, 8])
        assert len(showing.kept) == 5, "until it is written down"
        api.say(HAS, 8)
        while showing.kept:
            await asyncio.sleep(0.01)

    play(scenario)


def test_what_the_api_says_can_do_no_more_than_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of the future, garbage, looks without end: nothing is forgotten that it was not sent."""

    async def scenario(showing: Showing, api: Api) -> None:
        showing.start(1.0)
        showing.append("x", 1.0)
        await api.take()
        for what in (HAS, SHOWS, LOOK, b"?"):
            api.say(what, 2**64 - 1)
        api.server.send(os.urandom(1000))
        showing.append("y", 2.0)
        found: list[str] = []
        while "y" not in found:
            found += [one[1] for one in (await api.take()).records]
        assert [one[1] for one in showing.kept] == ["y"]

    play(scenario)


def test_an_order_is_answered_when_the_api_shows_it_or_is_away() -> None:
    async def scenario(showing: Showing, api: Api) -> None:
        await showing.written(60.0)
        showing.start(1.0)
        await api.take()
        showing.append("ordered", 1.0)
        waiting = asyncio.ensure_future(showing.written(60.0))
        frame = await api.take()
        while not frame.records:
            frame = await api.take()
        api.say(SHOWS, frame.number)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        api.say(HAS, 1)
        await waiting

    play(scenario)


def test_a_page_that_the_api_has_is_not_sent_again() -> None:
    """The agent looks each second whether anything has changed: mostly nothing has. An order is answered all the same,
    and the api goes on hearing of the agent."""
    so = ["a page"]

    async def scenario(showing: Showing, api: Api) -> None:
        showing.start(1.0)
        assert (await api.take()).page == ["a page"]
        api.say(SHOWS, 1)
        for _ in range(3):
            showing.changed()
            beat = await api.take()
            assert (beat.page, beat.number, list(beat.records)) == (None, 1, [])
        await showing.written(60.0)
        so.append("with a change")
        waiting = asyncio.ensure_future(showing.written(60.0))
        frame = await api.take()
        while frame.page is None:
            frame = await api.take()
        assert (frame.page, frame.number) == (["a page", "with a change"], 2)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        api.say(SHOWS, 2)
        await waiting

    play(scenario, lambda: list(so))


def test_lines_without_end_that_change_nothing_do_not_have_a_page_made_for_each() -> None:
    made = []

    async def scenario(showing: Showing, api: Api) -> None:
        showing.start(1.0)
        await api.take()
        for _ in range(200):
            showing.changed()
            await asyncio.sleep(0.001)
        assert len(made) < 100

    def page() -> list[str]:
        made.append(1)
        return ["a page"]

    play(scenario, page)


def test_an_order_that_changes_nothing_is_answered_when_the_api_goes_on_reading() -> None:
    async def scenario(showing: Showing, api: Api) -> None:
        showing.start(1.0)
        await api.take()
        api.say(SHOWS, 1)
        showing.pause_writing()
        waiting = asyncio.ensure_future(showing.written(60.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        showing.resume_writing()
        await waiting

    play(scenario, lambda: ["a page"])


def test_a_policy_is_written_once_and_read_once_without_what_it_remembers_of_users() -> None:
    policy = Policy(digest="a test")
    policy.rules(Identity(1000, "alice"))
    frame = Frame("1", 0.0, 1, 0, 0, [], [], None)._replace(page=cast("Any", [policy, policy]))
    first = pages.as_bytes(frame)
    policy.rules(Identity(1001, "bob"))
    assert pages.as_bytes(frame) == first
    assert b"alice" not in first
    one, other = cast("list[Policy]", _Reader(BytesIO(first)).load().page)
    (again, _) = cast("list[Policy]", _Reader(BytesIO(first)).load().page)
    assert one == policy
    assert one is other is again


def test_a_page_is_made_of_our_own_values_alone() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("true",)

    class Member:
        def __init__(self, of: object) -> None:
            self.of = of

        def __reduce__(self) -> Any:
            return getattr, (self.of, "ACTIVE")

    assert _Reader(BytesIO(pickle.dumps(Member(Status)))).load() is Status.ACTIVE
    with pytest.raises(TypeError):
        _Reader(BytesIO(pickle.dumps(Member("text")))).load()
    with pytest.raises(pickle.UnpicklingError):
        _Reader(BytesIO(pickle.dumps(Evil()))).load()


def frame(number: int, *records: Any, run: float = 1.0, version: str | None = None) -> Frame:
    from mpsagent import __version__

    return Frame(version or __version__, run, number, 0, 0, records, (), None)


def test_a_page_that_cannot_be_made_is_not_taken_for_what_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent went on to give signs of life, and an hour-old page was shown as healthy."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        pages: list[Any] = ["first"]
        showing = Showing(
            lambda: asyncio.sleep(0, ours), lambda: cast("Any", pages[0 if pages else 1]), asyncio.Event().wait
        )
        received = Received(History(None), Names(), Metrics())
        monkeypatch.setattr(received, "_show", lambda page: None)
        asyncio.get_running_loop().set_exception_handler(lambda loop, what: None)
        showing.start(1.0)
        listening = asyncio.create_task(received.listen(*await asyncio.open_unix_connection(sock=theirs)))

        await until(lambda: received.old is None)
        pages.clear()
        showing.changed()
        await until(lambda: received.old is not None)
        assert received.old is not None
        assert received.old[1] == "the agent cannot show its state"
        pages.append("first")  # what was told last holds again
        showing.changed()
        await until(lambda: received.old is None)
        listening.cancel()
        await showing.close()

    asyncio.run(scenario())


def test_records_that_an_api_had_written_before_it_was_killed_come_once(tmp_path: Path) -> None:
    """It was killed before it could say that it had them, so they are sent again; their numbers go on."""

    async def scenario() -> None:
        records = [(n, "action" if n == 2 else "x", float(n), '{"begun":2}' if n == 3 else "{}") for n in range(1, 5)]
        for given in (records[:3], records):
            history = History(str(tmp_path))
            received = Received(history, Names(), Metrics())
            received._take(frame(1, *given))
            await history.wait(history.last - 1)
            history.close()
        history = History(str(tmp_path))
        found = [dict(one) for one in history.since(0)]
        history.close()
        assert [(one["seq"], one["at"]) for one in found] == [(n, float(n)) for n in range(1, 5)]
        assert found[2]["begun"] == 2

    asyncio.run(scenario())


def test_what_logs_say_of_the_time_before_an_agent_is_on_record_in_the_order_of_time() -> None:
    """The daemon was found at 10, and its log was read after that (world, habits, seeds 668265954 and 668270375)."""
    history = History(None)
    history.append("gate.lost", 1.0)
    found = [(f"gpu{one}", tr.ControlStarted(10.0 + one, 70 + one)) for one in range(2)]
    found[1:1] = [("gpu0", tr.ServerReady(6.0, 80, 1001))]
    found += [("gpu1", tr.ServerReady(5.0, 81, 1001))]
    Received(history, Names(), Metrics())._take(frame(1)._replace(found=found))
    told = [(one["kind"], one["at"]) for one in history.since(1)]
    assert told == [("server.ready", 5.0), ("server.ready", 6.0), ("control.started", 10.0), ("control.started", 11.0)]


def test_clients_that_have_ended_with_their_users_own_control_daemon_end_on_record() -> None:
    """While no agent was there. Their lane was closed before the api saw it (world, habits, seed 668263913)."""
    history = History(None)
    client = {"instance": "gpu-u1001", "uid": 1001, "waited": 0.0}
    history.append("client.connected", 5.0, pid=71, **client)
    history.append("client.connected", 6.0, pid=72, **{**client, "instance": "removed-u1001"})
    received = Received(history, Names(), Metrics())
    received._before = history.last
    page = SimpleNamespace(
        single=False, first="gpu", instances=[SimpleNamespace(name="gpu", view=SimpleNamespace(state=State()))],
        started=9.0, moved=0.0, offset=0.0,
    )  # fmt: skip
    received.page = cast("Any", page)
    received._catch_up(cast("Any", page))
    (ended,) = history.since(2)
    assert (ended["kind"], ended["pid"], ended["instance"]) == ("client.ended", 71, "gpu-u1001")
    assert [one.pid for one in history.sessions.open.values()] == [72], "what the policy has no more is not known"


def test_an_agent_of_another_version_is_not_understood() -> None:
    """The package was upgraded: the api ends, and its unit starts the new one."""
    with pytest.raises(OtherVersion):
        Received(History(None), Names(), Metrics())._take(frame(1, version="0.0.0"))


@root
def test_a_history_that_an_agent_wrote_itself_is_the_apis(tmp_path: Path) -> None:
    """And nothing is taken from the api, or given to it, once the directory is its own."""
    before, there = tmp_path / "state", tmp_path / "state-api"
    before.mkdir()
    there.mkdir()
    for name in ("history.db", "history.db-wal"):
        (before / name).write_text("old")
    api_side._prepare(there, before, 65534)
    assert sorted(one.name for one in there.iterdir()) == ["history.db", "history.db-wal"]
    assert {one.stat().st_uid for one in (there, *there.iterdir())} == {65534}
    assert list(before.iterdir()) == []
    (before / "history.db").write_text("planted")
    api_side._prepare(there, before, 65534)
    assert (there / "history.db").read_text() == "old"
