"""Whatever goes wrong inside, the agent says it and goes on: one that has silently stopped protects nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from mpsagent.agent import catch_up as catching
from mpsagent.agent import gpus, loop
from mpsagent.agent.catch_up import Missed, foreign, not_yet_written, settled
from mpsagent.agent.loop import Agent
from mpsagent.agent.senses import MOST_QUESTIONS, People
from mpsagent.agent.settings import Settings
from mpsagent.agent.troubles import Troubles
from mpsagent.core.model import Control, State
from mpsagent.core.world import World
from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.identity import Identity
from mpsagent.system.control import Trouble, TroubleKind
from mpsagent.system.history import History
from mpsagent.system.names import Names


class NoDaemon:
    """A supervisor that finds and starts nothing."""

    running = None

    async def start(self, environment: object, threads: float) -> Trouble:
        return Trouble(TroubleKind.FAILED, "nothing is started here")

    async def adopt(self) -> Trouble:
        return Trouble(TroubleKind.ABSENT, "nothing runs")

    async def stop(self, grace: float = 5.0) -> None: ...

    def kill(self) -> str:
        return "nothing runs"

    def close(self) -> None: ...


def play(place: Path, scenario: Any) -> Any:
    """Runs ``scenario(agent)`` with an agent that is at work."""
    place.chmod(0o755)
    (place / "devices.json").write_text("[]")
    policy = place / "policy.toml"
    policy.write_text(
        f'[limits]\nthreads = 20\n[instance.x]\npipe_directory = "{place}/p"\nlog_directory = "{place}/log"\n'
        'control_program = "/nonexistent/control"\n'
    )
    settings = Settings(str(policy), None, "", str(place / "state"), devices_file=str(place / "devices.json"))

    async def main() -> Any:
        agent = Agent(settings, History(settings.state_directory), Names())
        await agent.start(lambda policy, gone: NoDaemon())
        try:
            return await asyncio.wait_for(scenario(agent), 30)
        finally:
            await agent.end()

    return asyncio.run(main())


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.01)


def topics(agent: Agent) -> set[str]:
    return set(agent.troubles.topics())


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a")


def test_a_mistake_in_a_decision_is_said_and_it_decides_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback would otherwise end all deciding without a word."""

    async def scenario(agent: Agent) -> None:
        real, calls = loop.decide, 0

        def broken(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < 3:
                raise ZeroDivisionError("a mistake")
            return real(*arguments)

        monkeypatch.setattr(loop, "decide", broken)
        agent._take([ev.ClientQueued(agent.clock.now(), 1, 1000)])
        assert "agent: deciding failed" in topics(agent)
        assert [r["kind"] for r in agent.history._records if r["kind"] == "client.waiting"], "the event is on record"
        await until(lambda: calls >= 3)
        assert len([r for r in agent.history._records if r["kind"] == "agent.error"]) == 1, "not once a second"

    play(place, scenario)


def test_a_fact_that_cannot_be_taken_in_does_not_cost_the_others(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One odd line among many."""

    async def scenario(agent: Agent) -> None:
        real = loop.apply

        def broken(state: State, event: ev.Event) -> State:
            if isinstance(event, ev.ClientAdmitted):
                raise ValueError("a mistake")
            return real(state, event)

        monkeypatch.setattr(loop, "apply", broken)
        monkeypatch.setattr(loop, "apply_all", lambda state, events: [broken(state, e) for e in events][-1])
        now = agent.clock.now()
        agent._take([ev.ClientQueued(now, 1, 1000), ev.ClientAdmitted(now, 9, 1), ev.ClientQueued(now, 2, 1001)])
        assert [w.pid for w in agent.state.waiting] == [1, 2]
        assert "agent: a fact could not be taken in" in topics(agent)

    play(place, scenario)


def test_a_task_and_a_round_that_fail_are_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rounds go on: they see hangs."""

    async def scenario(agent: Agent) -> None:
        async def broken() -> None:
            raise RuntimeError("a mistake")

        agent.spawn(broken())
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await until(lambda: {"agent: a task failed", "agent: a callback failed"} <= topics(agent))
        rounds: list[int] = []

        def once() -> bool:
            rounds.append(1)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(loop, "TICK", 0.01)
        monkeypatch.setattr(agent._rounds, "once", once)
        await until(lambda: len(rounds) > 3)
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
    """Any user may write lines into control.log; the records of a month must outlive that."""

    async def scenario(agent: Agent) -> None:
        now = agent.clock.now()
        for number in range(2000):
            agent._take([ev.Unknown(now, "control", f"line {number}")])
        kept = [r for r in agent.history._records if r["kind"] == "log.unknown"]
        assert 0 < len(kept) <= loop.UNKNOWN_A_MINUTE
        assert agent.counts["Unknown"] == 2000
        assert agent.state.unknown_lines == 2000

    play(place, scenario)


def test_a_mistake_of_an_hour_ago_is_no_trouble_any_more() -> None:
    """Healthy again by itself, but only for what nobody would notice the end of."""
    troubles = Troubles()
    troubles.set("a", "happened once", 0.0, until=10.0)
    troubles.set("b", "is so", 0.0)
    troubles.expire(9.9)
    assert len(troubles.all()) == 2
    troubles.expire(10.0)
    assert [one.what for one in troubles.all()] == ["is so"]
    troubles.set("b", "is still so, differently", 5.0)
    assert troubles.all()[0].since == 0.0


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


# --- logs -------------------------------------------------------------------------------------------------------------


def test_two_equal_lines_are_two_and_a_written_one_is_not_written_again() -> None:
    one = Missed(10.001, "log.unknown", {"text": "x"})
    other = Missed(10.002, "server.ready", {"pid": 5})
    known = [{"seq": 1, "at": 10.001, "kind": "log.unknown", "text": "x"}]
    assert not_yet_written([one, one, other], known) == [one, other]
    assert not_yet_written([one], known) == []


def test_a_state_fits_the_daemon_that_runs() -> None:
    """Rotated: what is left is kept. Another daemon's log: nothing of it. None at all: it has gone."""
    known = Control(7, 100.0, "/p/control")
    assert settled(State(control=known), (7, 99.0), "/p/control", 200.0).control == known
    kept = settled(State(unknown_lines=3), (8, 150.0), "/p/control", 200.0)
    assert (kept.control, kept.unknown_lines) == (Control(8, 150.0, "/p/control"), 3)
    assert settled(State(control=known), (8, 150.0), "/p/control", 200.0).control == Control(8, 150.0, "/p/control")
    gone = settled(State(control=known), None, "/p/control", 200.0)
    assert gone.control is not None
    assert gone.control.exited == 200.0


def test_a_path_with_a_link_is_still_ours(tmp_path: Path) -> None:
    """/var/run and /run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    ours = f"{tmp_path}/run/control"
    assert not foreign(ev.ControlStarted(1.0, 5, ours), ours)
    assert not foreign(ev.ControlStarted(1.0, 5, f"{tmp_path}/link/control"), ours)
    assert foreign(ev.ControlStarted(1.0, 5, f"{tmp_path}/other/control"), ours)
    assert not foreign(ev.ServerReady(1.0, 5), ours)


LINES = (
    "[2026-11-20 23:56:21.000 Control    40] Starting control daemon using socket /p/control\n"
    "[2026-11-20 23:56:21.100 Control    40] NEW CLIENT 51 from user 1000: Server is not ready, "
    "push client to pending list\n"
    "[2026-11-20 23:56:21.200 Control    99] Starting control daemon using socket /q/control\n"
    "[2026-11-20 23:56:21.300 Control    40] NEW CLIENT 52 from user 1001: Server is not re"
)


def test_reading_goes_on_inside_a_line(tmp_path: Path) -> None:
    """The agent starts while MPS writes: the line that was half there must not be lost, nor another daemon's start end
    what is known of ours."""
    path = tmp_path / "control.log"
    path.write_text(LINES)
    parser = LogParser("control")
    nothing = str(tmp_path / "server.log")
    caught = catching.catch_up(str(path), nothing, parser, LogParser("server"), 0.0, "/p/control")
    assert caught.control is not None
    assert caught.control.offset == len(LINES)
    assert [w.pid for w in caught.state.waiting] == [51]
    assert [one.kind for one in caught.records] == ["control.started", "client.waiting"]
    (event,) = parser.feed(b"ady, push client to pending list\n")
    assert isinstance(event, ev.ClientQueued)
    assert event.pid == 52


def test_the_agent_itself_reads_on_inside_a_line(place: Path) -> None:
    """The same by way of the followers."""
    (place / "log").mkdir()
    path = place / "log" / "control.log"
    path.write_text(LINES.replace("/p/control", f"{place}/p/control"))

    async def scenario(agent: Agent) -> None:
        with path.open("a") as file:
            file.write("ady, push client to pending list\n")
        await until(lambda: any(r["kind"] == "client.waiting" and r["pid"] == 52 for r in agent.history._records))
        assert agent.state.unknown_lines == 0

    play(place, scenario)


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
    from mpsagent.policy.files import load

    policy, errors = load([("p", '[limits]\nmemory = "25%"\nthreads = { sms = 26 }\n')])
    assert policy is not None
    assert not errors
    floor = World(State(), policy, devices=gpus.UNKNOWN).floor()
    assert floor.memory == dict.fromkeys(range(8), 1 << 30)
    assert floor.threads <= 100 * 26 / 132
