"""Whatever goes wrong inside, the agent says it and goes on: one that has silently stopped protects nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from mpsagent.agent import gpus, host
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.host import Agent
from mpsagent.agent.people import MOST_QUESTIONS, People
from mpsagent.agent.records import UNKNOWN_A_MINUTE
from mpsagent.agent.settings import Settings
from mpsagent.core import inputs as inp
from mpsagent.core.engine import Core
from mpsagent.core.inputs import Peer
from mpsagent.mps import events as ev
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.system.control import Problem, ProblemKind
from mpsagent.system.names import Names
from tests.agent.inside import NoDaemon, play, records, topics, until


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

        def once() -> list[inp.Input]:
            looks.append(1)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(host, "TICK", 0.01)
        monkeypatch.setattr(agent.observer, "once", once)
        await until(lambda: len(looks) > 3)
        assert "agent: looking around failed" in topics(agent)

    play(place, scenario)


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


def test_unknown_lines_cannot_wash_the_history_away(place: Path) -> None:
    """A driver with other texts, or a broken log: the records of a month must outlive that."""

    async def scenario(agent: Agent) -> None:
        now = agent.clock.now()
        for number in range(2000):
            agent.take([ev.Unknown(now, "control", f"line {number}")])
        assert agent.state.unknown_lines == 2000
        kept = [one for one in agent.history._records if one["kind"] == "log.unknown"]
        assert 0 < len(kept) <= UNKNOWN_A_MINUTE

    play(place, scenario)


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
        problem = Problem(ProblemKind.MISSING, "control is not installed", ("apt install nvidia-cuda-mps",))

    async def scenario(agent: Agent) -> str:
        await until(lambda: "control daemon" in topics(agent))
        return next(one.what for one in agent.conditions.all() if "not installed" in one.what)

    assert "apt install" in play(place, scenario, supervisor=Missing())


def test_a_driver_without_shared_servers_gets_servers_of_their_own(place: Path) -> None:
    """Drivers before 560: the policy asks for what cannot be had, and users are served all the same."""
    asked: list[bool] = []

    class Old(NoDaemon):
        async def start(self, environment: object, threads: float, *, multiuser: bool = False) -> Problem:
            asked.append(multiuser)
            kind = ProblemKind.UNSUPPORTED if multiuser else ProblemKind.FAILED
            return Problem(kind, "control of this driver does not know --multiuser-server")

    async def scenario(agent: Agent) -> None:
        await until(lambda: "shared server" in topics(agent))

    play(place, scenario, supervisor=Old(), instance='server = "shared"')
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


def test_what_a_policy_surely_does_not_mean_is_said_and_forgotten(place: Path) -> None:
    """A user who does not exist has limits that nobody gets; the policy stays in force."""
    path = place / "policy.toml"

    async def scenario(agent: Agent) -> None:
        def said() -> list[str]:
            return [one.what for one in agent.conditions.all() if "nosuchuser" in one.what]

        await until(said)
        assert f"{path}:3" in said()[0]
        path.write_text(path.read_text().replace("[user.nosuchuser]", "[user.root]"))
        assert await agent.load_policy() == ()
        await until(lambda: not said())

    play(place, scenario, text="[limits]\nthreads = 20\n[user.nosuchuser]\nthreads = 10\n")


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
    policy, errors = load([("p", '[limits]\nmemory = "25%"\nthreads = { sms = 26 }\n')])
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
        from mpsagent.gate import link
        from mpsagent.mps.limits import Limits

        agent.gate.receive(link.Hello(7, 1.0), None)
        agent.gate.receive(link.Synced(), None)
        passed = link.Passed(1, 4_000_001, 1001, 99, Limits(20.0), 0.1, agent.clock.now(), False, True)
        agent.gate.receive(passed, None)
        assert Peer(4_000_001, 1001, 0, 99) in [one.peer for one in agent.state.clients.values()]
        await until(lambda: not agent.state.clients)

    play(place, scenario)
