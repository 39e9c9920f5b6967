"""`turn extend`: the present turn of one user lasts longer, and the policy stays as it is."""

from __future__ import annotations

import pytest

from mpsagent.agent import saved
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from tests.core.harness import ALICE, BOB, POLICY, Stage


def test_an_extended_turn_is_announced_again_and_ends_with_its_time() -> None:
    """Also where its end had been announced: the grace begins again before the new end."""
    stage = Stage().up()
    alice = stage.client(ALICE)
    stage.run(3)
    stage.client(BOB)
    stage.run(12)
    assert len(stage.reports("turn.warning")) == 1
    until = stage.now + 3600
    stage.feed(inp.TurnExtended(stage.now, ALICE, until))
    stage.run(3590)
    assert stage.working(alice)
    assert stage.core is not None
    assert stage.core.view().turn is not None
    assert stage.core.view().turn.ends == until  # type: ignore[union-attr]
    stage.run(12)
    first, last = stage.times(act.Report)[0], stage.times(act.TerminateClient)[0]
    assert last == pytest.approx(until, abs=0.1)
    assert first < last - 3590
    assert len(stage.reports("turn.warning")) == 2


def test_the_time_is_for_the_user_who_was_given_it() -> None:
    stage = Stage().up()
    alice = stage.client(ALICE)
    stage.run(3)
    stage.client(BOB)
    stage.run(1)
    stage.feed(inp.TurnExtended(stage.now, BOB, stage.now + 3600))
    stage.run(16)
    assert not stage.working(alice)


def test_a_turn_that_ends_in_a_pause_is_extended_too() -> None:
    pause = POLICY.replace("[turn]", '[turn]\non_expiry = "pause"\npause_slice = "2s"')
    stage = Stage(f'{pause}[instance.gpu]\nsharing = "turns"\nserver_scope = "all"\n', pausing=True).up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    until = stage.now + 60
    stage.feed(inp.TurnExtended(stage.now, ALICE, until))
    stage.run(59)
    assert stage.happened(tr.UserPaused) == []
    stage.run(10)
    assert next(one.at for one in stage.happened(tr.UserPaused)) == pytest.approx(until, abs=0.5)


def test_the_next_agent_knows_it() -> None:
    stage = Stage().up()
    stage.feed(inp.TurnExtended(stage.now, ALICE, stage.now + 60))
    assert stage.core is not None
    kept = {saved.EXTENDED: saved.by_user(stage.core.state.extended)}
    assert saved.extended(kept, stage.now + 59) == [inp.TurnExtended(stage.now + 59, ALICE, stage.now + 60)]
    assert saved.extended(kept, stage.now + 61) == []
    assert saved.extended({saved.EXTENDED: [["x"]]}, stage.now) == []
