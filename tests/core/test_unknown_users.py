"""Turns while the name service has not said who a user is, so that it is not known which rules are theirs."""

from __future__ import annotations

import pytest

from mpsagent.mps import events as ev
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, POLICY, USERS, Stage, all_of

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


@both
def test_a_user_whose_name_is_not_known_is_held_until_it_is_while_others_are_served(shared: bool) -> None:
    """A slow name service: nobody is let in with limits that are not his."""
    stage = Stage(PATIENT, shared=shared).up()
    stage.know(BOB, CAROL)
    alice = stage.client(ALICE)
    stage.run(60)
    assert not stage.given(alice)
    bob = stage.client(BOB)
    stage.run(1)
    assert stage.working(bob)
    stage.ends(bob)
    stage.run(1)
    stage.know(*USERS)
    stage.run(0.5)
    assert stage.given(alice)[0] == stage.limits(ALICE)


@both
def test_a_policy_that_names_no_name_and_no_group_needs_no_name_service(shared: bool) -> None:
    text = PATIENT.replace("user.alice", f"user.{ALICE}").replace("user.bob", f"user.{BOB}")
    stage = Stage(text, shared=shared).up()
    stage.know()
    alice = stage.client(ALICE)
    stage.run(0.5)
    assert stage.given(alice)[0] == stage.limits(ALICE)


@both
def test_an_agent_that_has_just_come_lets_nobody_in_and_ends_nobody_before_it_knows_who_that_is(shared: bool) -> None:
    """The turn is Alice's, and the new agent does not know yet that her rules are her own. Without them her turn would
    be over."""
    text = POLICY.replace("active_threads = '50%'", 'active_threads = "50%"\nmax_runtime = "10s"')
    text = text.replace(
        "active_threads = '60%'", 'active_threads = "60%"\nmax_runtime = "1h"\nturn.never_preempt = true'
    )
    stage = Stage(text, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(30)
    names, stage.identities = stage.identities, {}
    stage.kill_agent()
    stage.start_agent()
    stage.run(60)
    second = stage.client(ALICE)
    stage.run(60)
    assert stage.working(alice)
    assert not stage.given(second)
    stage.know(*names)
    stage.run(1)
    assert all_of([alice, second], stage)
    assert stage.given(second)[0] == stage.limits(ALICE)
    assert not stage.given(bob)


def test_a_turn_does_not_jump_to_and_fro_while_a_name_is_slow_and_the_gate_closed() -> None:
    """Carol is next, but unknown; Alice's next client is behind her, and cannot be let in because of a fault."""
    stage = Stage(PATIENT.replace("active_threads = '60%'", "active_threads = '60%'\nmax_clients = 1")).up()
    first = stage.client(ALICE)
    stage.run(1)
    stage.client(ALICE)
    stage.know(ALICE, BOB)
    stage.run(0.1)
    carol = stage.client(CAROL)
    stage.run(0.1)
    stage.forge(ev.FaultStarted(stage.now, next(iter(stage.mps.servers))))
    stage.ends(first)
    stage.run(1)
    assert len(stage.turns()) <= 3
    stage.run(5)
    stage.know(*USERS)
    stage.run(5)
    assert stage.at_work()
    assert carol


def test_a_name_that_is_slow_makes_no_busy_loop() -> None:
    """Also for a connection that has waited for long when the agent comes."""
    stage = Stage(PATIENT)
    stage.mps.start()
    stage.clock.now += 100
    stage.identities = {}
    stage.client(ALICE)
    stage.run(100)
    stage.start_agent()
    before = stage.ticks
    stage.run(1.9)
    assert stage.ticks - before < 10
    stage.run(60)
    assert stage.ticks - before < 20
    stage.know(*USERS)
    stage.run(1)
    assert stage.at_work() == {ALICE}
