"""All users at once on one server: who is let in and when, what holds them, and how the way of sharing changes."""

from __future__ import annotations

import random

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from tests.core.harness import ALICE, BOB, CAROL, POLICY, TOGETHER, USERS, Stage, all_of

DENY = '[user.carol]\naccess = "deny"\n'
OWN = '[instance.gpu]\nserver_scope = "user"\n'
SHARED = '[instance.gpu]\nserver_scope = "all"\n'


def started(text: str = POLICY) -> Stage:
    return Stage(text, together=True).up()


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_all_users_work_at_once_each_with_exactly_its_limits() -> None:
    stage = started()
    crowd = [stage.client(uid) for uid in USERS for _ in range(3)]
    stage.run(1)
    assert all_of(crowd, stage)
    assert stage.at_work() == set(USERS)
    for proc in crowd:
        assert stage.given(proc) == [stage.limits(proc.uid)] * 2
    assert stage.turns() == []


# --- what holds everybody ---------------------------------------------------------------------------------------------


def test_idle_clients_are_ended_only_when_there_is_no_room_for_another_user() -> None:
    stage = started(POLICY.replace("[limits]", '[limits]\nidle_timeout = "5s"'))
    alice = stage.client(ALICE)
    stage.run(1)
    stage.cpu_idle = {alice.pid: stage.now}
    stage.run(10)
    bob = stage.client(BOB)
    stage.run(1)
    assert all_of([alice, bob], stage)
    for number in range(46):
        stage.client((BOB, CAROL)[number % 2])
    stage.run(3)
    stage.client(BOB)
    stage.run(3)
    assert alice.pid in {one.pid for one in stage.actions(act.TerminateClient)}  # type: ignore[attr-defined]


# --- the way of sharing changes ---------------------------------------------------------------------------------------


def test_from_servers_of_their_own_the_daemon_is_replaced_when_the_turn_is_over() -> None:
    """Who works goes on, who waits keeps waiting for the turn's end and not longer."""
    stage = Stage(POLICY + OWN).up()
    alice, bob = stage.client(ALICE, stubborn=True), stage.client(BOB)
    stage.run(1)
    before = stage.mps.control
    stage.together = True
    stage.reload(POLICY + TOGETHER)
    stage.run(5)
    assert stage.working(alice)
    assert stage.mps.control == before
    more = stage.client(CAROL)
    stage.run(60)
    assert stage.mps.control not in (0, before)
    assert all_of([bob, more], stage)
    assert [one.rule for one in stage.actions(act.QuitControl)] == ["instance.gpu.sharing"]


def test_back_to_turns_those_at_work_have_a_turn_each_from_then_on() -> None:
    """Nobody is ended for having worked long before: the time counts from the change."""
    stage = started(POLICY)
    alice, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(1000)
    stage.reload(POLICY + SHARED)
    changed = stage.now
    stage.run(14)  # turn.time_limit and grace are 10 and 5 s
    assert all_of([alice, bob], stage)
    carol = stage.client(CAROL)
    stage.run(60)
    assert not any(stage.working(one) for one in (alice, bob))
    assert stage.working(carol)
    ended = stage.times(act.TerminateClient)
    assert ended[0] - changed >= 15
    assert stage.turns() == [ALICE, BOB, CAROL]


def test_a_driver_that_cannot_is_asked_once() -> None:
    """It was asked for one server for all users and started without: nothing is replaced again and again."""
    stage = Stage(POLICY + SHARED)
    stage.start_agent()
    stage.run(0.01)
    stage.start_fails = True
    stage.run(0.1)
    stage.start_fails = False
    control = stage.mps.start()
    stage.mps.shared = stage.shared = False
    stage.feed(inp.ControlRuns(stage.now, control, stage.now, "/s", multiuser=False, asked=True))
    alice = stage.client(ALICE)
    stage.run(1)
    assert stage.working(alice)
    stage.ends(alice)
    stage.run(60)
    assert stage.mps.control == control


# --- in disorder ------------------------------------------------------------------------------------------------------


def test_who_comes_back_while_no_agent_hears_of_it_is_served_and_so_is_everybody_later() -> None:
    """It had lost its server, and the log's line of it came late. Days of any trouble are in tests/world."""
    chance = random.Random(0)

    def lag() -> float | None:
        return None if chance.random() < 0.05 else chance.choice([0.0, 0.002, 0.002, 0.02, 0.3, 2.0])

    stage = Stage(POLICY, together=True, log_lag=lag).up()
    crowd = [stage.client(ALICE), stage.client(ALICE, stays=True, stubborn=True)]
    crowd += [stage.client(ALICE) for _ in range(5)]
    stage.run(1)
    stage.client(ALICE)
    stage.cut_link()
    stage.mps.exited(next(iter(stage.mps.servers.values())))
    stage.run(0.5)
    stage.client(ALICE)
    stage.client(ALICE)
    stage.comes_back(crowd[0])
    stage.run(3)
    stage.client(ALICE)
    stage.connect()
    stage.feed(inp.RestartOrdered(stage.now, 0))
    for proc in list(stage.procs.values()):
        if not stage.working(proc):
            stage.ends(proc)
    stage.run(120)
    crowd = [stage.client(uid) for uid in USERS]
    stage.run(30)
    assert all_of(crowd, stage)


@pytest.mark.parametrize(
    "bound", [
        "max_clients = 1", "active_threads = '20%'\ntotal_active_threads = '20%'",
        'memory_limit = "1G"\ntotal_memory_limit = "1G"',
    ],
    ids=["max_clients", "total_threads", "total_memory"],
)  # fmt: skip
def test_idle_clients_are_not_ended_for_a_user_whom_another_bound_holds(bound: str) -> None:
    """The server is full, and the user who waits could not come in if it had room."""
    text = POLICY.replace("[limits]", '[limits]\nidle_timeout = "60s"\nmax_contexts = 48') + f"[user.carol]\n{bound}\n"
    stage = started(text)
    hers = stage.client(CAROL)
    stage.run(1)
    crowd = [stage.client(ALICE) for _ in range(47)]
    stage.run(10)
    assert all_of(crowd, stage)
    stage.client(CAROL)
    stage.cpu_idle = {one.pid: stage.now for one in crowd}
    stage.run(120)
    assert all_of(crowd, stage)
    assert stage.actions(act.TerminateClient) == []
    stage.ends(hers)
    stage.client(BOB)
    stage.client(BOB)
    stage.run(15)
    assert stage.actions(act.TerminateClient), "now bob waits for a place"
