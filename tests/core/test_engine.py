"""The engine as an object: one order of things, a deadline that is kept, and costs that do not grow with the queue."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.core import confirmation, coordinator, engine, reduce
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core, Step
from mpsagent.core.queue import Held, Queue
from mpsagent.core.rule import Decision
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.policy.identity import Identity
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, PATIENT, Stage, policy
from tests.core.said import knocked


def test_an_empty_world_starts_the_daemon_and_nothing_else() -> None:
    core = Core()
    step = core.receive(inp.PolicyChanged(0.0, policy("")), 0.0)
    assert [type(a) for a in step.actions] == [act.StartControl]
    assert core.tick(0.1) == Step((), ())


def test_what_is_absorbed_is_decided_upon_later() -> None:
    core = Core()
    core.absorb([inp.PolicyChanged(0.0, policy("")), inp.ControlRuns(0.0, 10, 0.0, "/s")])
    assert [type(a) for a in core.receive(ev.ConnectionLine(1.0, "NEW UI"), 1.0).actions] == [act.Reconcile]


def test_whose_a_server_is_that_was_listed_while_it_started_is_asked_again_soon() -> None:
    """Not when MPS is asked next because nothing has happened for long."""
    stage = Stage(PATIENT).up()
    core = stage.core
    assert core is not None
    core.receive(inp.ServersListed(stage.now, {900: 0}, frozenset()), stage.now)
    assert core.state.servers[900].uid is None
    deadline = core.deadline()
    assert deadline is not None
    assert deadline <= stage.now + confirmation.SERVER_FOR
    assert act.Reconcile in [type(one) for one in core.tick(deadline).actions]


def test_a_line_that_changes_nothing_is_no_reason_to_decide() -> None:
    """But it does not put off what is due."""
    stage = Stage(PATIENT).up()
    core = stage.core
    assert core is not None
    passes = 0
    one_pass = core._pass

    def count(now: float) -> object:
        nonlocal passes
        passes += 1
        return one_pass(now)

    core._pass = count  # type: ignore[method-assign, assignment]
    for _ in range(100):
        core.receive(ev.ConnectionLine(stage.now, "NEW UI"), stage.now)
    assert passes == 0
    deadline = core.deadline()
    assert deadline is not None
    core.receive(ev.ConnectionLine(deadline, "NEW UI"), deadline)
    assert passes > 0


class Broken(Exception):
    """A mistake in a rule."""


@pytest.mark.parametrize("name", [name for name, _ in (*coordinator._RULES, *engine.RULES)])
def test_a_mistake_in_one_rule_stops_no_other(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It is told, asked again a second later, and decides again once it can."""
    core, asked = Core(), []
    where = (coordinator, "_RULES") if name in dict(coordinator._RULES) else (engine, "RULES")
    rules = dict(getattr(*where))

    class Mistaken:
        note = staticmethod(getattr(rules[name], "note", lambda memory, done: memory))

        @staticmethod
        def decide(view: object, memory: object, now: float) -> object:
            asked.append(now)
            if now < 10:
                raise Broken
            return rules[name].decide(view, memory, now)  # type: ignore[arg-type]

    class Last:
        @staticmethod
        def decide(_view: object, memory: object, now: float) -> Decision[object]:
            others.append(now)
            return Decision(memory)

    others: list[float] = []
    monkeypatch.setattr(*where, tuple((one, Mistaken if one == name else rules[one]) for one in rules))
    monkeypatch.setattr(engine.ladder, "decide", Last.decide)
    step = core.receive(inp.PolicyChanged(0.0, policy("")), 0.0)
    assert [(rule, type(error)) for rule, error in step.mistakes] == [(name, Broken)]
    assert [type(one) for one in step.actions] == ([] if name == "hangs" else [act.StartControl])
    assert others
    for tenth in range(1, 100):
        more = core.receive(inp.DevicesFound(tenth / 10, (Device(0, str(tenth), "", 1, 1),)), tenth / 10)
        assert len(more.mistakes) == (tenth % 10 == 0)
        deadline = core.deadline()
        assert deadline is not None
        assert tenth / 10 < deadline <= tenth / 10 + engine.RETRY
    assert len(asked) == len(set(asked)) == 10, "no busy loop"
    assert core.tick(10.0).mistakes == ()
    assert asked[-1] == 10.0


def test_a_mistake_in_what_a_rule_makes_of_an_outcome_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(_memory: object, _done: act.Done) -> object:
        raise Broken

    core = Core()
    (start,) = core.receive(inp.PolicyChanged(0.0, policy("")), 0.0).actions
    monkeypatch.setattr(engine.starts, "note", note, raising=False)
    step = core.receive(act.Done(1.0, start, False, "no such program"), 1.0)
    assert [rule for rule, _ in step.mistakes] == ["starts"]
    assert core.deadline() is not None, "hangs has heard of it, and tries again"


def test_the_same_happenings_give_the_same_actions() -> None:
    stages = [Stage().up() for _ in range(2)]
    for stage in stages:
        stage.client(ALICE)
        stage.client(BOB)
        stage.run(30)
    assert stages[0].done == stages[1].done
    assert stages[0].told == stages[1].told


def calls(core: Core, event: inp.Input, now: float) -> int:
    """Python functions called for one input: what it costs, without a clock."""
    found = 0

    def count(frame: FrameType, what: str, arg: object) -> None:
        nonlocal found
        found += what == "call"

    sys.setprofile(count)
    try:
        core.receive(event, now)
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("users", [3, 100])
def test_the_cost_of_an_input_does_not_grow_with_the_queue(users: int) -> None:
    """2,000 who wait: one more, one less, a line about a client, a tick."""

    def costs(waiting: int) -> dict[str, int]:
        stage = Stage(PATIENT).up()
        alice = stage.client(ALICE)
        stage.run(1)
        core, now = stage.core, stage.now
        assert core is not None

        def knock(number: int) -> inp.GateSaid[link.Knock]:
            peer = inp.Peer(10_000 + number, 2000 + number % users, 100, 5)
            return knocked(now, 1000 + number, peer, now + number * 1e-6)

        for number in range(waiting):
            core.receive(knock(number), now)
        server = next(iter(stage.mps.servers))
        return {
            "knock": calls(core, knock(waiting), now),
            "line": calls(core, ev.ContextConnected(now, server, alice.pid, 2), now),
            "foreign line": calls(core, ev.ContextConnected(now, server, 7, 1), now),
            "left": calls(core, inp.GateSaid(now, link.Left(1000 + waiting // 2)), now),
            "first left": calls(core, inp.GateSaid(now, link.Left(1000)), now),
        }

    few, many = costs(2 * users), costs(2000)
    for what, cost in many.items():
        assert cost <= 1.5 * few[what] + 50, (what, few, many)


_HELD = st.builds(
    Held,
    st.integers(1, 12),
    st.builds(inp.Peer, st.integers(1, 4), st.integers(1, 3), st.just(0), st.integers(1, 2)),
    st.integers(0, 5).map(float),
    st.sampled_from([None, 1.0]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(_HELD, st.integers(1, 12)), max_size=40))
def test_the_queue_is_what_a_plain_sort_says(changes: list[Held | int]) -> None:
    queue, plain = Queue(), dict[int, Held]()
    for change in changes:
        if isinstance(change, int):
            queue = queue.without(change)
            plain.pop(change, None)
        else:
            queue = queue.put(change)
            plain[change.connection] = change
        in_order = sorted(plain.values(), key=lambda h: (h.since, h.connection))
        assert dict(queue) == plain
        firsts = {held.uid: held for held in reversed(in_order)}
        by_first = sorted(firsts.values(), key=lambda h: (h.since, h.connection))
        assert queue.users() == tuple(held.uid for held in by_first)
        for uid in (1, 2, 3):
            assert list(queue.line(uid)) == [h for h in in_order if h.uid == uid]
            assert queue.hands_over(uid) == any(h.uid == uid and h.handing is not None for h in in_order)
        for pid in (1, 2, 3, 4):
            assert {h.connection for h in queue.of_pid(pid)} == {h.connection for h in in_order if h.peer.pid == pid}


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_mistake_in_what_is_made_of_an_input_keeps_no_other_from_being_taken_in(
    monkeypatch: pytest.MonkeyPatch, absorbed: bool
) -> None:
    """What came together with it was lost: a process that had ended worked for ever."""

    def broken(*_: object) -> None:
        raise Broken

    monkeypatch.setitem(reduce._RULES, inp.DevicesFound, broken)
    core, told = Core(), [inp.DevicesFound(1.0, ()), inp.PeopleKnown(1.0, {7: Identity(7, "zoe")})]
    if absorbed:
        core.absorb(told)
    step = core.tick(1.0) if absorbed else core.receive_all(told, 1.0)
    assert core.state.identities == {7: Identity(7, "zoe")}
    assert [(what, type(error)) for what, error in step.mistakes] == [("reduce(DevicesFound)", Broken)]
    assert core.tick(2.0).mistakes == ()
