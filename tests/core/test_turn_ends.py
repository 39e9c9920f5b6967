"""How a turn ends: its time, the warning, the grace, what is done then. Each in both forms of server."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.waiting import waiting
from tests.core.harness import ALICE, BOB, CAROL, DAVE, PATIENT, POLICY, Stage

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


@both
def test_warning_and_end_come_at_their_edges(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE)
    stage.run(3)
    bob = stage.client(BOB)
    came = stage.now
    stage.run(9.9)
    assert stage.reports("turn.warning") == []
    stage.run(0.2)
    assert len(stage.reports("turn.warning")) == 1
    stage.run(4.8)
    assert stage.actions(act.TerminateClient) == []
    stage.run(1)
    (asked,) = stage.times(act.TerminateClient)
    assert asked - came == pytest.approx(15, abs=0.1)
    assert stage.working(bob)
    assert stage.mps.hurt == set()


@both
def test_the_warning_reaches_the_programs_once(shared: bool) -> None:
    """It stood in events alone, where no program sees it."""
    signals = 'warning_signal = "SIGUSR1"\n'
    stage = Stage(POLICY + signals, shared=shared).up()
    first, second = stage.client(ALICE), stage.client(ALICE)
    stage.run(3)
    stage.client(BOB)
    stage.run(9.9)
    assert stage.actions(act.WarnClient) == []
    stage.run(4)
    told = stage.actions(act.WarnClient)
    assert [(one.pid, one.signal, one.rule) for one in told] == [
        (pid, signal.SIGUSR1, "turn.warning_signal") for pid in (first.pid, second.pid)
    ]
    assert "its turn ends in 5" in told[0].reason
    assert f"while user {BOB} waits" in told[0].reason
    assert stage.actions(act.TerminateClient) == []


@both
def test_a_process_that_comes_after_the_warning_waits_for_the_next_turn(shared: bool) -> None:
    """It was admitted in the last second of its user's turn, and ended 0.3 s later without a context or a message."""
    stage = Stage(shared=shared).up()
    first = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(11)
    late = stage.client(ALICE)
    stage.run(2)
    assert late.pid not in stage.served
    assert stage.core is not None
    (why,) = [one.why for one in waiting(stage.core.view(), stage.now) if one.uid == ALICE]
    assert "next one" in why.text
    stage.run(4)
    assert stage.working(bob)
    assert [one.pid for one in stage.actions(act.TerminateClient)] == [first.pid]
    stage.ends(bob)
    stage.run(2)
    assert stage.working(late)


@both
def test_after_the_warning_a_user_whose_processes_have_ended_makes_way_at_once(shared: bool) -> None:
    """What the user has waiting is not admitted any more, so there is nothing to wait for."""
    stage = Stage(shared=shared).up()
    first = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(11)
    late = stage.client(ALICE)
    stage.run(0.5)
    stage.ends(first)
    stage.run(1.5)
    assert stage.working(bob)
    stage.ends(bob)
    stage.run(2)
    assert stage.working(late)


@both
def test_a_process_that_came_after_the_warning_is_admitted_when_no_other_user_waits_any_more(shared: bool) -> None:
    """And all of them are warned anew when another turn's end comes."""
    signals = 'warning_signal = "SIGUSR1"\n'
    stage = Stage(POLICY + signals, shared=shared).up()
    first = stage.client(ALICE, stubborn=True)
    stage.run(3)
    bob = stage.client(BOB)
    stage.run(11)
    late = stage.client(ALICE, stubborn=True)
    stage.run(2)
    assert [one.pid for one in stage.actions(act.WarnClient)] == [first.pid]
    stage.ends(bob)
    stage.run(1)
    assert stage.working(late)
    stage.client(BOB)
    stage.run(11)
    told = stage.actions(act.WarnClient)
    assert [one.pid for one in told[1:]] == [first.pid, late.pid]


@pytest.mark.parametrize("how", ['on_expiry = "none"\n'])
def test_who_keeps_the_gpu_is_sent_no_signal(how: str) -> None:
    stage = Stage(POLICY + how + 'warning_signal = "SIGUSR1"\n').up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(60)
    assert len(stage.reports("turn.warning")) == 1
    assert stage.actions(act.WarnClient) == []


@both
def test_new_clients_of_the_holder_do_not_reset_the_clock(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    for i in range(200):
        stage.after(i * 0.2, lambda: stage.client(ALICE))
    bob = stage.client(BOB)
    stage.run(40)
    assert stage.served[bob.pid] - stage.came[bob.pid] < 17
    (warning,) = [one for one in stage.reports("turn.warning") if one.uid == ALICE]
    assert "10.0s" in warning.reason


@both
def test_the_clock_stops_when_nobody_waits_any_more(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(9)
    stage.ends(bob)
    stage.run(3)
    second = stage.client(BOB)
    stage.run(13)
    assert not stage.working(second)
    assert stage.happened(tr.TurnEnded) == []
    stage.run(3)
    assert stage.working(second)


@both
@pytest.mark.parametrize("how", ['on_expiry = "none"\n'])
def test_a_turn_that_does_not_end_is_reported_once_and_no_end_is_announced(shared: bool, how: str) -> None:
    """It was: "its turn ends in 5s", and it never did."""
    stage = Stage(POLICY + how, shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(600)
    (warning,), (over,) = stage.reports("turn.warning"), stage.reports("turn.over")
    assert "ends in" not in warning.reason
    assert "goes on" in warning.reason
    assert "goes on" in over.reason
    assert stage.actions(act.ShutdownServer, act.TerminateClient, act.SignalClient) == []


@both
def test_a_shorter_turn_by_a_new_policy_gives_the_grace_all_the_same(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(100)
    stage.reload(POLICY)
    changed = stage.now
    stage.run(4.8)
    assert not stage.working(bob)
    stage.run(2)
    assert stage.served[bob.pid] - changed > 5


@both
def test_a_stubborn_and_a_stopped_client_end_with_the_turn(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stubborn, stopped = stage.client(ALICE, stubborn=True), stage.client(ALICE)
    stage.run(1)
    stopped.stopped = True
    bob = stage.client(BOB)
    stage.run(15 + 5 + 5 + 2)
    assert stage.working(bob)
    assert not {stubborn.pid, stopped.pid} & stage.procs.keys()


# --- quit -------------------------------------------------------------------------------------------------------------


@both
def test_action_quit_restarts_the_daemon_and_who_waits_is_held(shared: bool) -> None:
    stage = Stage(POLICY + 'on_expiry = "restart-mps"\n', shared=shared).up()
    for round_ in range(1, 10):
        alice = stage.client(ALICE, stays=True)
        stage.run(1)
        bob = stage.client(BOB)
        stage.run(23)
        assert len(stage.actions(act.QuitControl)) == round_
        assert stage.working(bob)
        assert alice.pid not in stage.procs  # a leftover of the daemon that quit
        stage.ends(bob)
        stage.run(1)
    assert stage.gate.turned_away == []
    assert stage.core is not None
    assert not stage.core.engines[None].memories.hangs.failed  # it is no crash
    assert stage.mps.hurt == set()


def test_a_quit_that_does_not_get_through_is_sent_again() -> None:
    stage = Stage(POLICY + 'on_expiry = "restart-mps"\n').up()
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(14)
    stage.front_end_fails = True
    stage.run(15)
    assert 2 <= len(stage.actions(act.QuitControl)) <= 6
    stage.front_end_fails = False
    stage.run(20)
    assert stage.working(bob)


@pytest.mark.parametrize("hook", ["", '[hooks]\npre_terminate = "/usr/bin/true"\ntimeout = "20s"\n'])
def test_the_latest_time_that_the_queue_tells_holds_where_programs_do_not_leave(hook: str) -> None:
    """It counted a turn until its end, not until its processes have gone: 10 s too early for each turn in between."""
    stage = Stage(POLICY + hook).up()
    stage.client(ALICE, stubborn=True)
    stage.run(1)
    stage.client(BOB, stubborn=True)
    stage.run(0.5)
    stage.client(CAROL, stubborn=True)
    stage.run(0.5)
    dave = stage.client(DAVE)
    stage.run(1)
    assert stage.core is not None
    told = {one.uid: one.turn for one in waiting(stage.core.view(), stage.now)}
    latest = told[DAVE]
    assert latest is not None
    stage.run(latest - stage.now)
    assert stage.working(dave)


def test_a_client_that_was_only_warned_is_not_on_record_as_ended() -> None:
    """It works on for an hour and ends by itself, and the report said that mpsagent had ended it."""
    stage = Stage(WARNS).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(11)
    assert warned(stage) == [alice.pid]
    stage.ends(bob)
    stage.run(3600)
    stage.ends(alice)
    stage.run(1)
    (ended,) = stage.happened(tr.ClientEnded)
    assert isinstance(ended, tr.ClientEnded)
    assert ended.outcome == "ok"


WARNS = POLICY.replace("[turn]", '[turn]\nwarning_signal = "SIGUSR1"\n')


def warned(stage: Stage) -> list[int]:
    return [one.pid for one in stage.actions(act.WarnClient)]


def back(stage: Stage) -> None:
    stage.reload(WARNS)


@pytest.mark.parametrize(
    ("away", "again"),
    [
        (lambda stage: stage.reload(WARNS.replace('time_limit = "10s"', 'time_limit = "1h"')), lambda stage: None),
        (lambda stage: stage.reload(WARNS + "[user.alice.turn]\nnever_preempt = true\n"), back),
        (lambda stage: stage.reload(WARNS.replace("[user.alice]", "[user.alice]\nmode = 'report'")), back),
        (lambda stage: stage.reload(WARNS.replace("[turn]", '[turn]\non_expiry = "none"')), back),
        (
            lambda stage: stage.feed(inp.DrainOrdered(stage.now, stage.now, None)),
            lambda stage: stage.feed(inp.DrainResumed(stage.now)),
        ),
    ],
    ids=["later", "exempt", "not enforced", "none", "drain"],
)
def test_a_turn_that_does_not_end_as_announced_is_announced_again(
    away: Callable[[Stage], None], again: Callable[[Stage], None]
) -> None:
    """It was ended in the same second, hours after its warning: what the program had saved then was all that was
    left."""
    stage = Stage(WARNS).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(11)
    assert warned(stage) == [alice.pid]
    away(stage)
    stage.run(3588)
    assert stage.working(alice)
    again(stage)
    stage.run(4)
    assert stage.working(alice)
    stage.run(12)
    assert not stage.working(alice)
    assert warned(stage) == [alice.pid] * 2
    asked, last = stage.times(act.TerminateClient)[0], stage.times(act.WarnClient)[1]
    assert asked - last >= 5.0, "with its grace"


def test_a_user_who_stops_waiting_takes_the_warning_back() -> None:
    """With `time_limit = "0s"` the warning comes at once. The next waiting user's end came without one."""
    stage = Stage(WARNS.replace('"10s"', '"0s"')).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    assert warned(stage) == [alice.pid]
    stage.ends(bob)
    stage.run(3600)
    assert stage.working(alice)
    stage.client(BOB)
    stage.run(4)
    assert stage.working(alice)
    assert warned(stage) == [alice.pid] * 2
    assert len(stage.reports("turn.warning")) == 2
    stage.run(4)
    assert not stage.working(alice)


def test_a_warning_that_was_only_reported_is_given_before_the_end() -> None:
    """With `mode = 'report'` no program is told; the policy that ends the turn comes later."""
    stage = Stage(WARNS.replace("[user.alice]", "[user.alice]\nmode = 'report'")).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(13)
    assert warned(stage) == []
    back(stage)
    stage.run(4)
    assert stage.working(alice)
    assert warned(stage) == [alice.pid]
    stage.run(3)
    assert not stage.working(alice)
