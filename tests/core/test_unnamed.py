"""Drivers before 580, whose server.log does not say which client a line is about: no decision rests on what it leaves
out."""

from __future__ import annotations

from mpsagent.agent.conditions import Conditions, note_conditions
from mpsagent.core import actions as act
from tests.core.harness import ALICE, BOB, PATIENT, POLICY, Stage

KILLS = (act.KillServer, act.KillControl)


def test_users_take_turns_by_what_the_gate_knows() -> None:
    stage = Stage(POLICY, named=False).up()
    first, second = stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.ends(first)
    stage.run(1)
    assert not stage.working(bob), "one of two has gone"
    stage.ends(second)
    stage.run(2)
    assert stage.working(bob)
    assert stage.actions(*KILLS) == []


def test_that_clients_are_not_named_is_said() -> None:
    stage = Stage(PATIENT, named=False).up()
    assert stage.core is not None
    conditions = Conditions()
    note_conditions(conditions, stage.core, stage.now)
    assert conditions.all() == ()
    stage.client(ALICE)
    stage.run(1)
    note_conditions(conditions, stage.core, stage.now)
    (found,) = conditions.all()
    assert (found.bad, "server.log does not name its clients" in found.what) == ("not sure", True)
