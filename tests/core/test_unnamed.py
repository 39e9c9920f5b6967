"""Drivers before 580, whose server.log does not say which client a line is about: no decision rests on what it leaves
out. test_properties.py plays its programs with such logs, too."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.interfaces.guarantees import not_guaranteed
from mpsagent.mps import events as ev
from tests.core.harness import ALICE, BOB, PATIENT, POLICY, Stage

KILLS = (act.KillServer, act.KillControl)


def test_a_plain_quit_waits_for_clients_that_no_line_names() -> None:
    """Root's `quit` waits for the clients. No line tells of them, so the server looks idle: it used to be killed."""
    stage = Stage(PATIENT, named=False).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.mps.quitting = True
    stage._log(ev.CommandRead(stage.now, "quit"))
    waiting = stage.client(BOB)
    stage.run(600)
    assert stage.actions(act.Resume, *KILLS) == []
    assert stage.working(alice)
    stage.ends(alice)
    stage.run(20)
    assert len(stage.actions(act.KillControl)) == 1
    assert stage.working(waiting)


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
    assert not_guaranteed(stage.core.view()) == []
    stage.client(ALICE)
    stage.run(1)
    (text,) = not_guaranteed(stage.core.view())
    assert "server.log does not name its clients" in text
