"""What a user's clients may do beside their limits: how long, and how idle while other users wait."""

from __future__ import annotations

import itertools

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.turns import TAKE_UP
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, POLICY, Stage

IDLE = PATIENT.replace("[limits]", '[limits]\nidle_timeout = "60s"')


def idle(stage: Stage, *since: float | None) -> None:
    """What the observer has seen of the CPU time of the clients, in the order of their pids."""
    stage.cpu_idle = {
        pid: at for pid, at in zip(sorted(stage.procs), since, strict=False) if at is not None
    }  # fmt: skip
    stage.run(1.1)


def test_a_client_over_its_run_time_is_ended_at_its_edge() -> None:
    stage = Stage(PATIENT + '[user.carol]\nmax_runtime = "60s"\n').up()
    carol = stage.client(1003)
    stage.run(60)
    assert stage.actions(act.TerminateClient) == []
    stage.run(1)
    assert carol.pid not in stage.procs


def test_idle_clients_of_a_holder_are_ended_when_the_time_is_over_and_the_next_is_served() -> None:
    stage = Stage(IDLE).up()
    first, second = stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(0.1)
    idle(stage, stage.now, stage.now + 10)
    began = stage.now
    stage.run(65)
    assert stage.working(first)
    stage.run(6)
    assert not {first.pid, second.pid} & stage.procs.keys()
    assert stage.working(bob)
    (one, *_) = stage.times(act.TerminateClient)
    assert one - began == pytest.approx(69.5, abs=0.7)  # at the next look


def test_who_may_have_worked_since_the_last_look_is_not_ended() -> None:
    """CPU time is read every few seconds. By the clock alone clients that worked all the time were ended where
    `idle_timeout` was no longer than that."""
    stage = Stage(IDLE).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(0.1)
    stage.feed(inp.ProcessesSeen(stage.now, frozenset(), {alice.pid: 55.0}))
    stage.run(30)
    assert stage.actions(act.TerminateClient) == []
    stage.feed(inp.ProcessesSeen(stage.now, frozenset(), {alice.pid: 60.0}))
    stage.run(1)
    assert len(stage.actions(act.TerminateClient)) == 1


@pytest.mark.parametrize(
    ("rule", "says"),
    [('access = "deny"', "in the policy for user 1003"), ("max_clients = 1", "may have 1 client at a time")],
)
def test_whom_the_gate_keeps_out_it_lets_in_where_nothing_is_enforced(rule: str, says: str) -> None:
    """`mode = 'report'` promises that nothing is enforced; what would have been is on record, once for each client."""
    stage = Stage(f"mode = 'report'\n{PATIENT}[user.carol]\n{rule}\n").up()
    crowd = [stage.client(CAROL)]
    stage.run(1)
    crowd.append(stage.client(CAROL))
    stage.run(60)
    assert [stage.working(one) for one in crowd] == [True, True]
    assert stage.gate.turned_away == []
    reports = stage.reports("client.over")
    over = crowd if "deny" in rule else crowd[1:]
    assert [one.pid for one in reports] == [one.pid for one in over]
    assert says in reports[0].reason


@pytest.mark.parametrize(("rule", "ended"), [("report", 0), ("terminate-memory", 0), ("terminate", 1)])
def test_what_becomes_of_a_client_that_passes_its_thread_limit(rule: str, ended: int) -> None:
    stage = Stage(PATIENT + f'[user.carol]\non_limit_exceeded = "{rule}"\n').up()
    carol, other = stage.client(CAROL), stage.client(CAROL)
    stage.lifts = {carol.pid: inp.Lifts(carol.start, threads=True)}
    stage.run(9)
    assert stage.working(carol)
    stage.run(21)
    reports = stage.reports("client.unlimited")
    assert [(one.pid, one.uid, one.rule) for one in reports] == [(carol.pid, CAROL, "user.carol.on_limit_exceeded")]
    asked = stage.actions(act.TerminateClient)
    assert [(one.pid, one.rule) for one in asked] == [(carol.pid, "user.carol.on_limit_exceeded")] * ended
    assert stage.working(other)
    assert stage.working(carol) == (not ended)


def test_a_client_without_a_thread_limit_passes_none() -> None:
    stage = Stage(PATIENT + '[user.carol]\nactive_threads = "100%"\non_limit_exceeded = "terminate"\n').up()
    carol = stage.client(CAROL)
    stage.lifts = {carol.pid: inp.Lifts(carol.start, threads=True)}
    stage.run(30)
    assert stage.working(carol)
    assert stage.reports("client.unlimited") == []


def test_one_that_would_be_ended_for_passing_its_limit_is_reported_where_limits_are_not_enforced() -> None:
    stage = Stage("mode = 'report'\n" + PATIENT.replace("[limits]", '[limits]\non_limit_exceeded = "terminate"')).up()
    carol = stage.client(CAROL)
    stage.lifts = {carol.pid: inp.Lifts(carol.start, threads=True)}
    stage.run(30)
    assert stage.working(carol)
    (report,) = stage.reports("client.over")
    assert (report.pid, report.rule) == (carol.pid, "limits.on_limit_exceeded")
    assert "does not enforce this" in report.reason


def test_contexts_of_one_process_fill_a_server_and_that_is_reported() -> None:
    """Recording 12, H4: one client, of 48."""
    stage = Stage(PATIENT).up()
    stage.client(ALICE, contexts=44)
    stage.run(2)
    (report,) = stage.reports("clients.nearly_full")
    assert "39 of at most 48 contexts" in report.reason


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_a_turn_goes_on_with_the_next_process_of_a_user_who_may_have_one_at_a_time(shared: bool) -> None:
    """Else such a user has one process in a turn and others as many as end in it: 0.9 s of 5 on a crowded H200."""
    stage = Stage(POLICY + "[user.carol]\nmax_clients = 1\n", shared=shared).up()
    crowd = [stage.client(CAROL) for _ in range(4)]
    stage.run(1)
    bob = stage.client(BOB)
    for one, following in itertools.pairwise(crowd):
        stage.run(2)
        assert stage.working(one)
        stage.feed(inp.ProcessEnded(stage.now, one.pid, one.start))  # the agent may hear of it before the gate
        stage.run(0.1)
        stage.ends(one)
        stage.run(0.9)
        assert stage.working(following), "it is not the turn of another user"
    assert not stage.working(bob)
    stage.run(15)  # 10 s of the turn while another user waits, and 5 s of grace are over
    assert crowd[3].pid not in stage.procs
    assert stage.working(bob)
    assert stage.turns() == [CAROL, BOB]


def test_what_cannot_be_handed_over_between_two_processes_does_not_hold_up_the_next_user_for_ever() -> None:
    stage = Stage(PATIENT + "[user.carol]\nmax_clients = 1\n").up()
    first = stage.client(CAROL)
    stage.run(1)
    stage.client(CAROL, dead=True)  # the toy's daemon closes on it
    stage.run(0.1)
    bob = stage.client(BOB)
    stage.ends(first)
    stage.run(TAKE_UP - 1)
    assert not stage.working(bob)
    stage.run(4)
    assert stage.working(bob)
