"""A server of all users that is full: no two users keep the others out indefinitely."""

from __future__ import annotations

from mpsagent.agent.conditions import Conditions, note_conditions
from mpsagent.core import actions as act
from mpsagent.core.waiting import waiting
from tests.core.harness import ALICE, BOB, CAROL, POLICY, Stage

UNBOUNDED = POLICY.replace('time_limit = "10s"\n', "")


def full(text: str) -> Stage:
    """36 places of one user, 12 of another."""
    stage = Stage(text, together=True).up()
    for _ in range(3):
        stage.client(ALICE, contexts=12)
    stage.run(1)
    for _ in range(12):
        stage.client(BOB)
    stage.run(1)
    return stage


def problems(stage: Stage) -> list[str]:
    conditions = Conditions()
    assert stage.core is not None
    note_conditions(conditions, stage.core, stage.now)
    return [one.what for one in conditions.all() if "without a bound" in one.what]


def test_two_users_with_all_places_keep_others_out_for_a_turn_at_most() -> None:
    """Two uids of one person locked everybody else out, and `status` said healthy."""
    stage = full(POLICY)
    began, carol = stage.now, stage.client(CAROL)
    stage.run(5)
    assert not stage.working(carol)
    assert stage.core is not None
    (row,) = [one for one in waiting(stage.core.view(), stage.now) if one.uid == CAROL]
    assert row.turn is not None
    assert began + 10 <= row.turn
    stage.run(20)
    assert stage.working(carol)
    ends = stage.actions(act.TerminateClient)
    assert {one.uid for one in ends} == {ALICE}, "the user with most places"
    assert len({one.pid for one in ends}) == 1, "one client makes room"
    assert ends[0].rule == "turn.time_limit"
    assert problems(stage) == []
    assert sum(proc.uid == BOB for proc in stage.procs.values()) == 12


def test_without_a_time_limit_a_user_who_waits_without_a_bound_is_reported() -> None:
    stage = full(UNBOUNDED)
    stage.client(CAROL)
    stage.run(4)
    assert problems(stage) == []
    stage.run(3600)
    assert stage.actions(act.TerminateClient) == []
    assert problems(stage) == [f"user {CAROL} waits without a bound: other users have all places of the server"]
    assert stage.core is not None
    (row,) = [one for one in waiting(stage.core.view(), stage.now) if one.uid == CAROL]
    assert row.turn is None
    assert row.why.text.endswith("no time limit bounds this wait (turn.time_limit)")


def test_users_who_have_places_and_want_more_end_no_client() -> None:
    """Both wait for a further process, and nobody is kept out."""
    stage = full(POLICY)
    stage.client(ALICE)
    stage.client(BOB)
    stage.run(3600)
    assert stage.actions(act.TerminateClient) == []
    assert problems(stage) == []
