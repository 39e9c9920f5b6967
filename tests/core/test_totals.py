"""Totals of users: who does not fit is held, harms no one, and is let in when it fits."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core.rule import Reason
from mpsagent.core.waiting import waiting
from mpsagent.gate.places import KEPT
from mpsagent.policy.identity import Identity
from tests.core.harness import ALICE, BOB, CAROL, Stage

GIB = 1 << 30
TEXT = """
[limits]
active_threads = '20%'
memory_limit = "4G"
total_active_threads = '50%'
[user.bob]
active_threads = '30%'
memory_limit = "6G"
total_active_threads = '100%'
total_memory_limit = "13G"
[turn]
time_limit = "never"
"""
both = pytest.mark.parametrize("together", [False, True], ids=["turns", "together"])


def why(stage: Stage, uid: int) -> Reason:
    assert stage.core is not None
    return next(one.why for one in waiting(stage.core.view(), stage.now) if one.uid == uid)


@both
def test_the_next_process_waits_until_its_own_limits_fit(together: bool) -> None:
    stage = Stage(TEXT, together=together).up()
    crowd = [stage.client(ALICE) for _ in range(4)]
    stage.run(1)
    assert [stage.working(one) for one in crowd] == [True, True, False, False]
    reason = why(stage, ALICE)
    assert reason.word == "total"
    assert "40 of 50 % of threads" in reason.text
    assert "needs 20" in reason.text
    stage.run(1000)
    assert [stage.working(one) for one in crowd] == [True, True, False, False]
    stage.ends(crowd[0])
    stage.run(1)
    assert [stage.working(one) for one in crowd[1:]] == [True, True, False]
    assert all(one.limits == stage.limits(one.uid) for one in stage.gate.given)


@both
def test_a_process_without_a_context_takes_no_part_of_a_total(together: bool) -> None:
    """torchrun is such a client for the whole time of its ranks. A new agent learns this from the gate."""
    stage = Stage(TEXT, together=together).up()
    launcher = stage.client(ALICE, contexts=0)
    ranks = [stage.client(ALICE) for _ in range(2)]
    stage.run(1)
    assert [stage.working(one) for one in ranks] == [True, False], "it may still make a context"
    stage.run(KEPT)
    assert [stage.working(one) for one in ranks] == [True, True]
    stage.kill_agent()
    stage.start_agent()
    stage.run(1)
    late = stage.client(ALICE)
    stage.run(10)
    assert not stage.working(late)
    assert f"own processes {ranks[0].pid}, {ranks[1].pid} can make room" in why(stage, ALICE).text
    launcher.contexts = 1
    stage.gate.knock(launcher)
    stage.run(1)
    stage.ends(late)
    stage.run(1)
    assert not launcher.made
    assert why(stage, ALICE).text.startswith(
        f"process {launcher.pid} has no context yet, and its first one waits: this"
    )
    stage.ends(ranks[0])
    stage.run(1)
    assert launcher.made
    stage.client(ALICE)
    stage.run(1)
    assert why(stage, ALICE).text.startswith("this user's total is in use: 40 of 50 %")


def test_a_client_that_waits_for_its_first_context_does_not_run() -> None:
    """Its ranks had the whole of the total, and then it would have been ended for the time that it waited."""
    stage = Stage(TEXT.replace("active_threads = '20%'", 'active_threads = "20%"\nmax_runtime = "1m"')).up()
    launcher = stage.client(ALICE, contexts=0)
    stage.run(KEPT + 1)
    ranks = [stage.client(ALICE) for _ in range(2)]
    stage.run(1)
    launcher.contexts = 1
    stage.gate.knock(launcher)
    stage.run(55)
    for one in ranks:
        stage.ends(one)
    stage.run(1)
    assert launcher.made
    stage.run(50)
    assert not stage.actions(act.TerminateClient)
    stage.run(15)
    assert [one.pid for one in stage.actions(act.TerminateClient)] == [launcher.pid]


def test_with_limits_that_are_only_reported_it_is_not_one_too_many() -> None:
    text = "mode = 'report'\n" + TEXT.replace("active_threads = '20%'", "active_threads = '20%'\nmax_clients = 2")
    stage = Stage(text).up()
    stage.client(ALICE, contexts=0)
    stage.run(KEPT + 1)
    for _ in range(2):
        stage.client(ALICE)
    stage.run(10)
    assert not [one for one in stage.actions(act.Report) if one.kind == "client.over"]


@pytest.mark.parametrize("pausing", [False, True], ids=["terminate", "pause"])
def test_no_turn_ends_for_a_user_of_whom_no_process_ever_fits(pausing: bool) -> None:
    """alice's programs were ended for one who could not come in afterwards either."""
    text = TEXT.replace(
        'time_limit = "never"', 'time_limit = "10s"\ngrace = "5s"\npause_slice = "10s"\non_expiry = "terminate"'
    )
    text += "[group.large]\nactive_threads = '45%'\n[group.small]\ntotal_active_threads = '30%'\n"
    stage = Stage(text.replace("terminate", "pause") if pausing else text, pausing=pausing)
    stage.identities[CAROL] = Identity(CAROL, "carol", ("large", "small"))
    stage.up()
    alice = stage.client(ALICE)
    stage.run(5)
    carol = stage.client(CAROL)
    stage.run(120)
    assert stage.working(alice)
    assert not alice.frozen
    assert not stage.reports("turn.warning")
    assert "no process of this user fits" in why(stage, CAROL).text
    bob = stage.client(BOB)
    stage.run(60)
    assert bob.pid in stage.served, "who came later is not behind one who never comes in"
    for proc in (alice, bob):
        stage.ends(proc)
    stage.run(5)
    assert not stage.working(carol)
    assert "no process of this user fits" in why(stage, CAROL).text
