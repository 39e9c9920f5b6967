"""Turns: who has the GPU, for how long, and who is next. Each in both forms of server."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.turns import TAKE_UP
from tests.core import toy
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, POLICY, Stage, all_of

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


@both
def test_all_processes_of_the_user_are_let_in_and_nobody_else(shared: bool) -> None:
    """A program whose processes wait for each other must never be split."""
    stage = Stage(PATIENT, shared=shared).up()
    mine = [stage.client(ALICE) for _ in range(5)]
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    mine += [stage.client(ALICE) for _ in range(5)]
    stage.run(2)
    assert all_of(mine, stage)
    assert not stage.working(bob)


def test_a_turn_is_not_over_before_its_server_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on two H200 where servers took 9 s: with turns of 5 s no one was served any more, each in turn."""
    monkeypatch.setattr(toy, "START", 20.0)
    stage = Stage(POLICY).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(20)
    assert stage.working(alice)
    stage.run(13)  # turn.time_limit and grace are 10 and 5 s
    assert stage.working(alice)
    stage.run(30)
    assert not stage.working(alice)
    assert stage.working(bob)


def test_a_server_that_refuses_to_make_way_is_asked_once_a_second_and_then_seldom() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.front_end_fails = True
    stage.ends(alice)
    stage.run(2.5)
    assert 3 <= len(stage.actions(act.ShutdownServer)) <= 6
    stage.front_end_fails = False
    stage.run(2)
    assert stage.at_work() == {BOB}


@both
def test_who_has_had_a_turn_goes_behind_all_who_waited_for_its_end(shared: bool) -> None:
    """With more processes than fit, a user's next ones would else be first in the queue for ever."""
    stage = Stage(shared=shared).up()
    crowd = [stage.client(ALICE, contexts=1) for _ in range(60)]
    stage.run(3)
    most = 36 if shared else 48
    assert sum(stage.working(p) for p in crowd) == most
    bob = stage.client(BOB)
    stage.run(0.1)
    carol = stage.client(CAROL)
    stage.run(22)
    assert stage.working(bob)
    assert len([p for p in crowd if p.pid in stage.procs]) == 60 - most
    stage.run(20)
    assert stage.working(carol)
    stage.run(20)
    assert stage.turns() == [ALICE, BOB, CAROL, ALICE]


def test_a_user_who_is_alone_is_not_shut_out_for_hand_overs_in_vain() -> None:
    """Nobody waits for the place: it is tried for as long as that user wants."""
    stage = Stage(PATIENT).up()
    stage.client(ALICE, dead=True)  # the toy's daemon closes on it, again and again
    stage.run(4 * TAKE_UP)
    assert stage.turns() == [ALICE]
    assert stage.happened(tr.TurnEnded) == []
    assert set(stage.gate.table.users) == {ALICE}


def test_another_form_of_server_takes_hold_also_where_the_only_user_is_never_served() -> None:
    """The turn of that user never ended, and with it no client was there for the old form to be kept for."""
    stage = Stage(f'{PATIENT}[instance.gpu]\nsharing = "turns"\nserver_scope = "user"\n').up()
    stage.client(ALICE, dead=True)
    stage.run(5)
    stage.reload(f'{PATIENT}[instance.gpu]\nsharing = "turns"\nserver_scope = "all"\n')
    stage.run(2 * TAKE_UP)
    assert stage.mps.shared
    assert set(stage.gate.table.users) == {ALICE}
