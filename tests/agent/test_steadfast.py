"""Whatever goes wrong inside, the agent says it and goes on: one that has silently stopped protects nobody."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from mpsagent.agent import conditions, gate_keeper, gpus, host, lane, node
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.host import Agent
from mpsagent.agent.people import MOST_QUESTIONS, People
from mpsagent.agent.records import LINES_AN_HOUR, UNKNOWN_A_MINUTE, UNSERVED_A_MINUTE, JournalLines, Sparingly
from mpsagent.agent.settings import Settings
from mpsagent.core import actions as act
from mpsagent.core import caps
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.inputs import Peer
from mpsagent.core.sentences import sentence
from mpsagent.core.waiting import waiting
from mpsagent.linux.lock import AlreadyLocked
from mpsagent.linux.proc import start_time
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.system import store
from mpsagent.system.control import ControlProblem, ProblemKind
from mpsagent.system.names import Names
from mpsagent.wire import link
from tests.agent.inside import NoDaemon, node_of, play, records, topics
from tests.core.said import knocked
from tests.coroutines import until


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a")


def test_a_mistake_in_a_decision_is_said_and_it_decides_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback would otherwise end all deciding without a word."""

    async def scenario(agent: Agent) -> None:
        real, calls = Core.receive_all, 0

        def broken(core: Core, *arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise ZeroDivisionError("a mistake")
            return real(core, *arguments)

        monkeypatch.setattr(Core, "receive_all", broken)
        agent.take([ev.Unknown(agent.clock.now(), "control", "x")])
        assert "agent: deciding failed" in topics(agent)
        await until(lambda: calls >= 3)
        agent.take([ev.Unknown(agent.clock.now(), "control", "y")])
        await until(lambda: records(agent, "log.unknown"))
        assert len(records(agent, "agent.error")) == 1, "not once a second"

    play(place, scenario)


def test_a_task_and_a_look_that_fail_are_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks go on: they see what announces itself by nothing."""

    async def scenario(agent: Agent) -> None:
        async def broken() -> None:
            raise RuntimeError("a mistake")

        agent.spawn(broken())
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await until(lambda: {"agent: a task failed", "agent: a callback failed"} <= topics(agent))
        looks: list[int] = []

        def once(*_: object) -> list[inp.Input]:
            looks.append(1)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(host, "TICK", 0.01)
        monkeypatch.setattr(agent.observer, "once", once)
        await until(lambda: len(looks) > 3)
        assert "agent: a regular look at the node failed" in topics(agent)

    play(place, scenario)


def test_the_looks_at_the_machine_go_on_after_a_mistake(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the gate's socket is there, daemons of others, users' control daemons that are needed no more."""
    monkeypatch.setattr(node, "LOOK", 0.01)

    async def scenario(agent: Agent) -> None:
        looks: list[int] = []

        def look(*_: object) -> None:
            looks.append(1)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(node_of(agent), "_look_at_opens", look)
        await asyncio.wait_for(until(lambda: len(looks) > 3), 20)
        assert "agent: a regular look at the node failed" in topics(agent)

    play(place, scenario)


@pytest.mark.parametrize("error", [AlreadyLocked("another agent has it"), ValueError("a mistake of ours")], ids=str)
def test_a_user_apart_whose_instance_cannot_be_made_is_told_of_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Another agent has its directory. What was begun of it is let go, without a second mistake; who waits sees why,
    and it is on record."""

    async def scenario(agent: Agent) -> None:
        def taken(*_: object) -> int:
            raise error

        monkeypatch.setattr(lane.lock, "take", taken)
        hello = link.Hello(1, 0.0), link.Synced(), link.Knock(1, os.getpid(), 1001, 1001, 1, 0.0)
        for message in hello:
            agent.gate.receive(message, None)
        agent.gate.decide()
        await until(lambda: "apart" in topics(agent))
        assert "agent: a task failed" not in topics(agent)
        assert set(agent.lanes) == set(agent.core.engines) == {None}
        (failed,) = records(agent, "action.failed")
        assert (failed["action"], failed["uid"], failed["text"]) == ("OpenDaemon", 1001, str(error))
        await until(lambda: str(error) in waiting(agent.core.view(None), agent.clock.now())[0].why.text)

    play(place, scenario, instance='sharing = "per-user"')


def test_a_stopped_server_goes_before_the_directory_by_which_it_is_known(place: Path) -> None:
    """`make hostile`, H6, apart, once of four: the user's lane was taken away while the agent still looked for it."""
    program = place / "nvidia-cuda-mps-server"
    shutil.copy("/bin/sleep", program)

    async def scenario(agent: Agent) -> None:
        for message in (link.Hello(1, 0.0), link.Synced(), link.Knock(1, os.getpid(), 1001, 1001, 1, 0.0)):
            agent.gate.receive(message, None)
        agent.gate.decide()
        await until(lambda: 1001 in agent.lanes)
        hidden = agent.lanes[1001].where.hidden
        server = subprocess.Popen([program, "60"], env={"CUDA_MPS_PIPE_DIRECTORY": hidden})
        try:
            server.send_signal(signal.SIGSTOP)
            await agent._close(act.CloseDaemon(uid=1001, reason="", rule=""))
            await until(lambda: server.poll() is not None)
        finally:
            server.kill()
            server.wait()
        assert not Path(hidden).exists()

    play(place, scenario, instance='sharing = "per-user"')


def test_a_record_that_cannot_be_written_stops_nothing(place: Path) -> None:
    async def scenario(agent: Agent) -> None:
        class Odd:
            def __repr__(self) -> str:
                raise RuntimeError("cannot be shown")

            __str__ = __repr__

        assert agent.record("odd", agent.clock.now(), value=Odd()) == 0
        assert "records" in topics(agent)
        assert agent.record("even", agent.clock.now()) > 0

    play(place, scenario)


def test_a_page_that_cannot_be_made_is_said_and_records_go_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(agent: Agent) -> None:
        monkeypatch.setattr(agent.shown, "_page", lambda: 1 / 0)
        agent.shown.changed()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: agent.shown, sock=ours)
            await until(lambda: "agent: a callback failed" in topics(agent))
            transport.abort()

    play(place, scenario)


def test_unknown_lines_cannot_wash_the_history_away(place: Path) -> None:
    """A driver with other texts, or a broken log: the records of a month must outlive that."""

    async def scenario(agent: Agent) -> None:
        now = agent.clock.now()
        for number in range(2000):
            agent.take([ev.Unknown(now, "control", f"line {number}")])
        assert agent.state.unknown_lines == 2000
        kept = records(agent, "log.unknown")
        assert 0 < len(kept) <= UNKNOWN_A_MINUTE

    play(place, scenario)


def test_a_user_who_comes_and_leaves_cannot_wash_the_history_away(place: Path) -> None:
    """9,550 times in 8 s, watched; the history has room for 10,000 records. It is said once, and others' are kept."""

    async def scenario(agent: Agent) -> None:
        now = agent.clock.now()
        for number in range(2 * UNSERVED_A_MINUTE):
            agent.take([knocked(now, number, Peer(number, 1001, 1001, 1), now), inp.GateSaid(now, link.Left(number))])
        agent.take([inp.GateSaid(now, link.FrontEnd(7, 0, "root's", now))])
        agent.take([knocked(now, 10_000, Peer(10_000, 1002, 1002, 1), now)])
        assert len(records(agent, "client.waiting")) + len(records(agent, "client.left")) == UNSERVED_A_MINUTE + 1
        assert records(agent, "client.waiting")[-1]["uid"] == 1002
        assert [one["command"] for one in records(agent, "front_end")] == ["root's"]
        assert [(one["uid"], one["most"]) for one in records(agent, "user.flood")] == [(1001, UNSERVED_A_MINUTE)]

    play(place, scenario)


def test_nor_with_processes_whose_environment_lifts_their_limits(place: Path) -> None:
    """One record of each that waits: what a user can cause by coming and going."""

    async def scenario(agent: Agent) -> None:
        now = agent.clock.now()
        agent.take([inp.DevicesFound(now, (Device(0, "GPU-0", "assumed", 140 << 30, 132),))])
        for number in range(1000, 1000 + UNSERVED_A_MINUTE + 100):
            agent.take([knocked(now, number, Peer(number, 1001, 1001, 1), now)])
            agent.take([inp.ProcessesSeen(now, frozenset(), {}, {number: inp.Lifts(1, memory="x")})])
            agent.take([inp.GateSaid(now, link.Left(number))])
        kinds = ("client.waiting", "client.left", "client.environment")
        assert records(agent, "client.environment")
        assert sum(len(records(agent, kind)) for kind in kinds) == UNSERVED_A_MINUTE

    play(place, scenario, text='[limits]\nmemory_limit = "4G"\n')


def test_the_journal_has_a_bounded_number_of_lines_of_a_user_and_one_that_says_how_many_are_missing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 loops of a program that is served and exits: 10.8 GB of journal a day, and with it went the lines of sshd."""
    told: list[dict[str, Any]] = []

    async def scenario(agent: Agent) -> None:
        monkeypatch.setattr(agent.telling, "tell", lambda record, _: told.append(dict(record)))
        now = agent.clock.now()
        monkeypatch.setattr(agent.clock, "now", lambda: now)
        before = agent.shown.append("x", now)
        for number in range(2000):
            for kind in ("client.connected", "client.ended"):
                agent.record(kind, now, pid=number, uid=1001, outcome="ok", waited=0.0, seconds=1.0)
            agent.record("client.end_ordered", now, pid=number, uid=1001, by=1001)
        assert agent.shown.append("x", now) - before == 6001, "the history has all"
        agent.record("client.end_ordered", now, pid=1, uid=1001, by=0)
        agent.record("client.connected", now, pid=5000, uid=1002, waited=0.0)
        agent.record("control.started", now, pid=5001)
        assert [one.get("by", one["kind"]) for one in told[-3:]] == [0, "client.connected", "control.started"]
        assert sum(one.get("uid") == 1001 for one in told) == 2 * LINES_AN_HOUR + 1
        told.clear()
        now += 3601.0
        agent.record("client.connected", now, pid=6000, uid=1001, waited=0.0)
        assert [(one["kind"], one.get("count")) for one in told] == [
            ("journal.left_out", 6000 - 2 * LINES_AN_HOUR),
            ("client.connected", None),
        ]
        assert "user 1001" in sentence(told[0])

    play(place, scenario)


def test_the_journal_names_the_users_with_most_lines_left_out_and_counts_the_others() -> None:
    """Subordinate ids: 65,536 users are a line each no more than 20."""
    lines = JournalLines()
    for number in range(10 * LINES_AN_HOUR):
        lines.may({"kind": "client.connected", "uid": number % 5000}, 1.0)
    found = list(lines.left_out(3700.0))
    assert len(found) == 21
    assert found[-1]["users"] == 5000 - 20
    assert sum(int(str(one["count"])) for one in found) == 5 * LINES_AN_HOUR
    assert "4980 other users" in sentence(found[-1])
    assert list(lines.left_out(3700.0)) == []


def test_many_uids_of_one_user_cannot_either() -> None:
    """Subordinate ids; a minute later there is room again."""
    sparingly = Sparingly(300, 1500)
    assert sum(sparingly.may(uid, 1.0) for uid in range(5000)) == 1500
    assert not sparingly.may(1, 60.9)
    assert sparingly.may(1, 61.0)


def test_a_mistake_of_an_hour_ago_is_no_condition_any_more() -> None:
    """Healthy again by itself, but only for what nobody would notice the end of."""
    conditions = Conditions()
    conditions.set("a", "happened once", 0.0, until=10.0)
    conditions.set("b", "lasts", 0.0)
    conditions.expire(9.9)
    assert len(conditions.all()) == 2
    conditions.expire(10.0)
    assert [one.what for one in conditions.all()] == ["lasts"]
    assert conditions.set("b", "lasts, differently", 5.0)
    assert not conditions.set("b", "lasts, differently", 6.0)
    assert conditions.all()[0].since == 0.0


# --- what is wrong with the machine -----------------------------------------------------------------------------------


def test_a_program_that_is_not_installed_is_said_at_once(place: Path) -> None:
    """The most frequent mistake of a first installation; READY is not held up by it (see tests/daemon)."""

    class Missing(NoDaemon):
        problem = ControlProblem(ProblemKind.MISSING, "control is not installed", ("apt install nvidia-cuda-mps",))

    async def scenario(agent: Agent) -> str:
        await until(lambda: "control daemon" in topics(agent))
        return next(one.what for one in agent.conditions.all() if "not installed" in one.what)

    assert "apt install" in play(place, scenario, supervisor=Missing())


def test_a_driver_without_shared_servers_gets_servers_of_their_own(place: Path) -> None:
    """Drivers before 560: the policy asks for what cannot be had, and users are served all the same."""
    asked: list[bool] = []

    class Old(NoDaemon):
        async def start(self, environment: object, threads: float, *, multiuser: bool = False) -> ControlProblem:
            asked.append(multiuser)
            kind = ProblemKind.UNSUPPORTED if multiuser else ProblemKind.FAILED
            return ControlProblem(kind, "control of this driver does not know --multiuser-server")

    async def scenario(agent: Agent) -> None:
        await until(lambda: "shared server" in topics(agent))

    play(place, scenario, supervisor=Old(), instance='server_scope = "all"')
    assert asked[:2] == [True, False]


def test_a_store_that_cannot_be_written_is_said_until_it_can(place: Path) -> None:
    """A full disk in the middle of maintenance: the next agent would know of no drain."""

    async def scenario(agent: Agent) -> None:
        agent.store.problem = "state.json cannot be written: No space left on device"
        agent._note_conditions()
        assert "store" in topics(agent)
        agent.store.problem = None
        agent._note_conditions()
        assert "store" not in topics(agent)

    play(place, scenario)


def test_a_mistake_in_one_rule_is_a_condition_and_the_others_decide(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError("a mistake")

    async def scenario(agent: Agent) -> None:
        monkeypatch.setattr(caps, "decide", broken)
        now = agent.clock.now()
        peer = Peer(70, 1001, 1001, 7)
        agent.take(
            [inp.GateSaid(now, link.Hello(1, 1000.0)), knocked(now, 1, peer, now), inp.GateSaid(now, link.Synced())]
        )
        assert "agent: caps failed, everything else goes on" in topics(agent)
        assert agent.core.engines[None].memories.admission.sent is not None
        for _ in range(50):
            agent.take([inp.DaemonSilent(now, True), inp.DaemonSilent(now, False)])
        await until(lambda: records(agent, "agent.error"))
        assert len(records(agent, "agent.error")) == 1

    play(place, scenario)


# --- people -----------------------------------------------------------------------------------------------------------


class Slow(Names):
    """A name service that knows some and does not answer about the others."""

    def __init__(self, some: dict[int, Identity]) -> None:
        super().__init__(deadline=60)
        self.some = some

    def known(self, uid: int) -> Identity | None:
        return self.some.get(uid)

    async def look_up(self, uid: int) -> Identity:
        await asyncio.sleep(60)
        return Identity(uid)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_thousands_of_uids_are_neither_asked_about_at_once_nor_kept() -> None:
    """A user with a range of uids of his own (containers) may come as each of them."""

    async def scenario() -> None:
        people = People(Slow({}), lambda: None)
        people.meet(range(100_000, 165_000))
        assert len(people._asking) == MOST_QUESTIONS
        people.close()
        people = People(Slow({uid: Identity(uid) for uid in range(5000)}), lambda: None)
        people.meet(range(5000))
        people.keep({1, 2})
        assert set(people.known) == {1, 2}

    run(scenario())


def test_users_about_whom_the_name_service_is_silent_keep_nobody_else_from_being_asked_about() -> None:
    """A directory that is away, with many of its users waiting, and a user of the machine's own files."""
    local = MOST_QUESTIONS

    class Half(Names):
        async def look_up(self, uid: int) -> Identity:
            if uid == local:
                self._known[uid] = (time.monotonic(), Identity(uid, "local"))
            return Identity(uid)

    async def scenario() -> None:
        people = People(Half(), lambda: None)
        while local not in people.known:
            people.meet(range(local + 1))
            await asyncio.sleep(0)
        people.close()

    run(asyncio.wait_for(scenario(), 90))


def test_a_silent_name_service_is_a_condition_and_its_user_is_held(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "NAME_WAIT", 0.0)

    async def scenario(agent: Agent) -> None:
        agent.people = People(Slow({}), lambda: None)
        now = agent.clock.now()
        peer = Peer(70, 1001, 1001, 7)
        agent.take(
            [inp.GateSaid(now, link.Hello(1, 1000.0)), knocked(now, 1, peer, now), inp.GateSaid(now, link.Synced())]
        )
        await until(lambda: "names" in topics(agent))
        (said,) = (one for one in agent.conditions.all() if "name service" in one.what)
        assert "uid 1001" in said.what
        assert agent.core.view().turn is None
        agent.people.known[1001] = Identity(1001, "alice")
        agent.take([])
        await until(lambda: "names" not in topics(agent))

    play(place, scenario, text="[limits]\nactive_threads = '20%'\n[user.alice]\nactive_threads = '10%'\n")


def test_who_has_joined_a_group_is_known_as_such_without_a_reload() -> None:
    async def scenario() -> None:
        names = Slow({1000: Identity(1000, "alice", ("users",))})
        people = People(names, lambda: None)
        people.meet([1000])
        names.some[1000] = Identity(1000, "alice", ("users", "students"))
        people.meet([1000])
        assert people.known[1000].groups == ("users", "students")
        del names.some[1000]
        people.meet([1000])
        assert people.known[1000].name == "alice", "a silent name service makes nobody a stranger"
        people.close()

    run(scenario())


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_the_gpus_of_yesterday_serve_until_the_driver_answers(tmp_path: Path) -> None:
    """NVML may take seconds or hang; limits in bytes and percent of memory must hold all the same."""
    settings = Settings(state_directory=str(tmp_path))
    found = gpus.UNKNOWN[:1]
    assert gpus.remembered(settings, ()) == ()
    gpus.remember(settings, ("GPU-1",), found)
    assert gpus.remembered(settings, ("GPU-1",)) == found
    assert gpus.remembered(settings, ()) == (), "other GPUs are visible now"
    (tmp_path / gpus.CACHE).write_text("{")
    assert gpus.remembered(settings, ("GPU-1",)) == ()


def test_while_no_gpu_is_known_limits_are_less_never_none() -> None:
    """A percentage of an unknown memory could be anything; a missing limit would be everything."""
    policy, errors = load([("p", '[limits]\nmemory_limit = "25%"\nactive_threads = 26\n')])
    assert policy is not None
    assert not errors
    core = Core()
    core.absorb([inp.PolicyChanged(0.0, policy), inp.DevicesFound(0.0, gpus.UNKNOWN)])
    strictest = core.view().fail_safe()
    assert strictest.memory == dict.fromkeys(range(8), 1 << 30)
    assert strictest.threads <= 100 * 26 / 132


def test_a_client_whose_end_came_before_its_pidfd_is_not_kept_for_ever(place: Path) -> None:
    """It passed and was gone: nothing would tell the agent of its end any more."""

    async def scenario(agent: Agent) -> None:
        from mpsagent.mps.limits import Limits

        agent.gate.receive(link.Hello(7, 1.0), None)
        agent.gate.receive(link.Synced(), None)
        passed = link.Passed(1, 4_000_001, 1001, 99, Limits(20.0), 0.1, agent.clock.now(), False, True)
        agent.gate.receive(passed, None)
        agent.gate.decide()
        await until(lambda: records(agent, "client.ended"))
        assert [len(records(agent, kind)) for kind in ("client.connected", "client.ended")] == [1, 1]
        assert not agent.state.clients

    play(place, scenario)


def test_a_process_that_ends_while_the_gate_tells_of_it_is_not_kept_for_ever(place: Path) -> None:
    """Known at the gate, it came without a pidfd; the next user was not served in a day. One whose pidfd is missing for
    another reason is a client until it ends."""

    async def scenario(agent: Agent) -> None:
        from mpsagent.mps.limits import Limits

        now = agent.clock.now()
        with subprocess.Popen(["sleep", "60"]) as child:
            start = start_time(child.pid)
            assert start is not None
            agent.gate.receive(link.Hello(7, 1.0), None)
            agent.gate.receive(link.Known(4_000_001, 1001, 1001, 99, now, Limits(20.0)), None)
            agent.gate.receive(link.Known(child.pid, 1002, 1002, start, now, Limits(20.0)), None)
            agent.gate.receive(link.Synced(), None)
            agent.gate.decide()
            assert list(agent.state.clients) == [child.pid]
            child.kill()
            await until(lambda: not agent.state.clients)

    play(place, scenario)


def test_a_page_does_not_say_that_the_api_is_away(place: Path) -> None:
    """It says what a look found a moment before the api was reached: /healthz answered 503 with it, of itself."""

    async def scenario(agent: Agent) -> None:
        node = node_of(agent)
        await until(lambda: "api" in topics(agent))
        node.shown.away = None
        assert not [one.what for one in node.page().conditions if "api is away" in one.what]

    play(place, scenario)


def test_the_gpus_are_asked_for_again_at_each_start_of_a_control_daemon(tmp_path: Path) -> None:
    """A GPU was cut into MIG devices, or is another card: limits in percent were those of the old one for good."""
    devices = [
        {"ordinal": 0, "uuid": "GPU-1", "name": "NVIDIA H200", "memory": size << 30, "multiprocessors": 132}
        for size in (140, 20)
    ]
    file = tmp_path / "devices.json"

    async def scenario(agent: Agent) -> None:
        for one in devices:
            file.write_text(json.dumps([one]))
            await until(lambda one=one: [each.memory for each in agent.devices] == [one["memory"]])
        file.write_text("[]")
        await until(lambda: "devices" in topics(agent))
        assert len(agent.devices) == 1, "none at all is no answer"

    play(tmp_path, scenario, instance='sharing = "turns"\nserver_scope = "user"\n')


def test_an_order_that_cannot_be_saved_says_so(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk a drain and a lease were answered like a success, and ended with the agent."""

    def full(_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def scenario(agent: Agent) -> None:
        acting = node_of(agent).acting
        monkeypatch.setattr(store, "_whole", full)
        for answer in (
            await acting.drain(None, 0),
            await acting.give_lease({"uid": 20001, "active_threads": "30%", "until": "1h"}, 0),
        ):
            assert "No space left on device" in answer["unsaved"]
        monkeypatch.undo()

    async def good(agent: Agent) -> None:
        assert "unsaved" not in await node_of(agent).acting.drain(None, 0)

    play(place, scenario)
    play(place, good)


def test_a_client_whose_process_ends_while_the_gate_tells_all_is_not_kept_for_ever(place: Path) -> None:
    """Its pidfd says so between the gate's word about it and the end of all that the gate tells."""

    async def scenario(agent: Agent) -> None:
        from mpsagent.mps.limits import Limits

        with subprocess.Popen(["sleep", "60"]) as child:
            start = start_time(child.pid)
            assert start is not None
            agent.gate.receive(link.Hello(7, 1.0), None)
            agent.gate.receive(link.Known(child.pid, 1002, 1002, start, agent.clock.now(), Limits(20.0)), None)
            assert agent.clients.get(child.pid, start) is not None
            child.kill()
            await until(lambda: agent.clients.get(child.pid, start) is None)
            agent.gate.receive(link.Synced(), None)
            agent.gate.decide()
            assert not agent.state.clients

    play(place, scenario)


def test_directories_that_could_not_be_made_at_the_start_are_no_problem_for_ever(place: Path) -> None:
    """The next start of the control daemon made them, and `status` said until the agent's end that they cannot be."""

    async def scenario(agent: Agent) -> None:
        agent.conditions.set("directories", "the directory is another user's", agent.clock.now())
        started = act.StartControl(threads=100.0, multiuser=False, reason="none runs", rule="test")

        async def perform(action: act.Action) -> act.Done:
            return act.Done(agent.clock.now(), action, True)

        agent.lanes[None].executor.perform = perform  # type: ignore[method-assign]
        await agent._perform(started)
        assert "directories" not in agent.conditions.topics()

    play(place, scenario)


def test_a_control_daemon_that_is_not_wanted_any_more_is_no_problem_because_it_did_not_start(tmp_path: Path) -> None:
    """Since the policy gives each user one, none is started for all, and `status` ended with 1 for good."""

    async def scenario(agent: Agent) -> None:
        agent.lanes[None].executor.front_end_problem = "no such file"
        agent.conditions.set("log disk", "the disk is full", agent.clock.now())
        await until(lambda: {"control daemon", "front-end"} <= {*agent.conditions.topics()})
        path = tmp_path / "policy.toml"
        path.write_text(path.read_text().replace('sharing = "turns"', 'sharing = "per-user"'))
        await node_of(agent).acting.reload(0)
        topics = {"control daemon", "control daemon failed", "front-end", "log disk"}
        await until(lambda: not topics & {*agent.conditions.topics()})

    play(tmp_path, scenario, instance='sharing = "turns"\nserver_scope = "user"\n')


def test_what_was_wrong_with_the_gate_is_over_when_its_keeper_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without systemd: another hand has started it again, and `status` said for good that it has ended."""
    monkeypatch.setattr(gate_keeper, "is_keeper", lambda pid: True)

    async def scenario(agent: Agent) -> None:
        keeper, now, topics = node_of(agent).keeper, agent.clock.now(), node_of(agent).conditions.topics
        wrong = {"gate keeper", "gate directory", "public directory taken"}
        for topic in wrong:
            keeper._conditions.set(topic, "it has ended", now)
        assert wrong <= {*topics()}
        monkeypatch.setattr(keeper, "_gate", os.getpid)
        assert keeper._hold_running()
        assert not wrong & {*topics()}

    play(tmp_path, scenario)


def test_a_name_that_became_known_unnoticed_is_taken_in_with_the_next_decision(place: Path) -> None:
    """A user whose clients an earlier agent had kept was never identified for the engine, and what waited of that user
    waited for ever (world, habits, seed 297555296)."""

    async def scenario(agent: Agent) -> None:
        agent.people.known[1001] = Identity(1001, "alice")
        agent.take([ev.Unknown(agent.clock.now(), "control", "x")])
        await until(lambda: agent.core.state.identities.get(1001) == Identity(1001, "alice"))

    play(place, scenario)
