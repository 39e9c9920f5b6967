"""A control daemon for each user: when it starts, when it ends, and that the section has none."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core.waiting import waiting
from mpsagent.policy import apart
from mpsagent.policy.policy import Policy
from tests.core.harness import ALICE, BOB, CAROL, POLICY, Stage, policy

APART = '[instance.gpu]\nsharing = "apart"\napart_idle_timeout = "60s"\n'
DENY = '[user.carol]\naccess = "deny"\n'


class Users(Stage):
    """alice's own instance of one that is apart."""

    def _policy(self, text: str) -> Policy:
        return apart.of_user(policy(text), ALICE)


def of_alice() -> Users:
    stage = Users(POLICY + APART)
    stage.start_agent()
    stage.run(5)
    return stage


def quits(stage: Stage) -> list[float]:
    return stage.times(act.QuitControl)


def test_it_starts_when_its_user_comes_and_gives_exactly_the_limits() -> None:
    stage = of_alice()
    assert not stage.actions(act.StartControl)
    one, other = stage.client(ALICE), stage.client(ALICE)
    stage.run(2)
    assert len(stage.actions(act.StartControl)) == 1
    assert stage.working(one)
    assert stage.working(other)
    assert stage.given(one) == [stage.limits(ALICE)] * 2
    stage.run(10_000)
    assert not quits(stage)
    assert stage.turns() == []


def test_it_ends_when_its_user_has_had_no_client_for_so_long_and_starts_again() -> None:
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    ended = stage.now
    stage.run(200)
    (at,) = quits(stage)
    assert at == pytest.approx(ended + 60, abs=1)
    assert stage.core is not None
    assert not stage.core.view().control_alive
    assert len(stage.actions(act.StartControl)) == 1
    again = stage.client(ALICE)
    stage.run(2)
    assert stage.working(again)


@pytest.mark.parametrize("early", [0.2, 0.05, 0.005, 0.002, 0.001, 0.0, -0.001, -0.002, -0.005, -0.05])
def test_who_comes_while_it_ends_is_held_and_served(early: float) -> None:
    """By the old one or by the next, but never refused or lost."""
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    stage.run(60 - early)
    late = stage.client(ALICE)
    stage.run(30)
    assert stage.working(late)
    assert stage.given(late) == [stage.limits(ALICE)] * 2


def test_a_quit_that_is_lost_is_asked_again_and_holds_nobody_for_good() -> None:
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    stage.front_end_fails = True
    stage.run(200)
    assert len(quits(stage)) >= 2
    stage.front_end_fails = False
    late = stage.client(ALICE)
    stage.run(30)
    assert stage.working(late)


def test_the_section_starts_no_daemon_holds_everyone_and_refuses_who_is_denied() -> None:
    stage = Stage(POLICY + APART + DENY)
    stage.start_agent()
    alice, carol = stage.client(ALICE), stage.client(CAROL)
    stage.run(100)
    assert not stage.actions(act.StartControl)
    assert not stage.working(alice)
    assert stage.refused == [CAROL]
    assert not stage.working(carol)


def test_the_old_way_holds_until_nothing_works_and_then_the_daemon_ends() -> None:
    stage = Stage(POLICY).up()
    alice = stage.client(ALICE)
    stage.run(2)
    assert stage.working(alice)
    stage.reload(POLICY + APART)
    stage.run(5)
    assert stage.working(alice)
    assert not quits(stage)
    bob = stage.client(BOB)
    stage.ends(alice)
    stage.run(100)
    assert len(quits(stage)) == 1
    assert not stage.working(bob)  # held, until an instance of his own is there
    assert stage.core is not None
    assert not stage.core.view().control_alive
    assert stage.core.view().sharing == "apart"


def test_who_comes_while_it_ends_is_told_that_it_ends() -> None:
    """It said that he is let in next, and nobody was."""
    stage = of_alice()
    one = stage.client(ALICE)
    stage.run(2)
    stage.ends(one)
    while not quits(stage):
        stage.run(0.0005)
    assert stage.core is not None
    stage.client(ALICE)
    stage.run(0.0012)
    view = stage.core.view()
    assert view.state.control is not None
    assert view.state.control.quitting is None
    (why,) = (one.why for one in waiting(view, stage.now))
    assert why.text == "the control daemon is quitting"
