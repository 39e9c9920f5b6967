"""Turns: who has the GPU, for how long, and who is next. Each in both forms of server."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core import turns
from mpsagent.mps import events as ev
from tests.core import toy
from tests.core.harness import ALICE, BOB, CAROL, DAVE, PATIENT, POLICY, USERS, Stage, all_of
from tests.core.toy import Proc

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


# --- who is let in, with what -----------------------------------------------------------------------------------------


@both
def test_the_first_client_gets_exactly_its_limits(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    pid = stage.client(ALICE)
    stage.run(1)
    assert stage.given(pid) == [stage.limits(ALICE)] * 2  # its channel and its context
    assert stage.working(pid)


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


@both
def test_the_next_user_is_let_in_when_the_last_process_has_ended(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    first, second = stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.ends(first)
    stage.run(5)
    assert not stage.working(bob)
    stage.ends(second)
    left = stage.now
    stage.run(1)
    assert stage.working(bob)
    # shared: nothing but the links' delay; own: the old server's exit and the new one's start
    assert stage.served[bob.pid] - left < (0.02 if shared else 0.3)


def test_a_turn_is_not_over_before_its_server_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on two H200 where servers took 9 s: with turns of 5 s no one was served any more, each in turn."""
    monkeypatch.setattr(toy, "START", 20.0)
    stage = Stage(POLICY).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(20)
    assert stage.working(alice)
    stage.run(13)  # switch.after and grace are 10 and 5 s
    assert stage.working(alice)
    stage.run(30)
    assert not stage.working(alice)
    assert stage.working(bob)


def test_with_own_servers_the_old_one_is_told_at_once_and_has_gone_before_anybody_is_handed_over() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    stage.ends(alice)
    stage.run(1)
    (asked,) = stage.actions(act.ShutdownServer)
    assert not asked.force  # type: ignore[attr-defined]
    assert stage.mps.overlaps == []
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
def test_the_order_of_users_is_that_of_their_first_connections(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(DAVE)
    stage.run(0.5)
    for uid in (CAROL, BOB, CAROL, ALICE, BOB):
        stage.client(uid)
        stage.run(0.01)
    stage.run(80)
    assert stage.turns() == [DAVE, CAROL, BOB, ALICE]


@both
def test_who_has_had_a_turn_goes_behind_all_who_waited_for_its_end(shared: bool) -> None:
    """With more processes than fit, a user's next ones would else be first in the queue for ever."""
    stage = Stage(shared=shared).up()
    crowd = [stage.client(ALICE, contexts=1) for _ in range(60)]
    stage.run(3)
    assert sum(stage.working(p) for p in crowd) == 48
    bob = stage.client(BOB)
    stage.run(0.1)
    carol = stage.client(CAROL)
    stage.run(22)
    assert stage.working(bob)
    assert len([p for p in crowd if p.pid in stage.procs]) == 12
    stage.run(20)
    assert stage.working(carol)
    stage.run(20)
    assert stage.turns() == [ALICE, BOB, CAROL, ALICE]


@both
def test_a_user_who_comes_back_while_it_is_his_turn_and_nobody_waits_is_let_in_at_once(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.ends(stage.client(ALICE))
    stage.run(1)
    for _ in range(5):
        one = stage.client(ALICE)
        stage.run(0.5)
        assert stage.working(one)
        stage.ends(one)
        stage.run(30)
    assert stage.turns() == [ALICE]


# --- the clock --------------------------------------------------------------------------------------------------------


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
def test_new_clients_of_the_holder_do_not_reset_the_clock(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    for i in range(200):
        stage.after(i * 0.2, lambda: stage.client(ALICE))
    bob = stage.client(BOB)
    stage.run(40)
    assert stage.served[bob.pid] - stage.came[bob.pid] < 16
    (warning,) = [one for one in stage.reports("turn.warning") if one.uid == ALICE]
    assert "10.0s" in warning.reason


@both
def test_who_comes_for_the_ending_user_is_held_and_has_his_turn_later(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    for i in range(400):
        stage.after(14.9 + i * 0.005, lambda: stage.client(ALICE) if bob.pid not in stage.served else None)
    stage.run(17)
    assert stage.working(bob)
    assert stage.at_work() == {BOB}
    assert stage.mps.refused == []


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
def test_nothing_ends_for_a_process_that_is_gone(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.ends(stage.client(BOB))
    stage.run(60)
    assert stage.reports("turn.warning") == []
    assert stage.working(alice)


@both
def test_an_exempt_user_keeps_the_gpu(shared: bool) -> None:
    stage = Stage(POLICY + "[user.carol]\nswitch.exempt = true\n", shared=shared).up()
    stage.client(CAROL)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(600)
    assert not stage.working(bob)
    assert stage.actions(act.ShutdownServer, act.TerminateClient, act.SignalClient) == []


@both
@pytest.mark.parametrize("how", ['action = "none"\n', "enforce = false\n"])
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
    stage = Stage(POLICY + 'action = "quit"\n', shared=shared).up()
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
    assert not stage.core.memories.hangs.failed  # it is no crash
    assert stage.mps.hurt == set()


def test_a_quit_that_does_not_get_through_is_sent_again() -> None:
    stage = Stage(POLICY + 'action = "quit"\n').up()
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


# --- what goes wrong --------------------------------------------------------------------------------------------------


@both
def test_a_turn_whose_only_process_ends_before_its_hand_over_passes_on(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    stage.mps.stopped = True  # so that nothing is handed over
    alice, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(0.5)
    stage.ends(alice)
    stage.mps.stopped = False
    stage.run(1)
    assert stage.working(bob)


@both
def test_a_first_client_that_cannot_be_handed_over_does_not_hold_up_the_next_user_for_ever(shared: bool) -> None:
    """Its place is kept for a while, through a restart of the daemon too, and then it is behind who waits."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE, dead=True)  # the toy's daemon closes on it
    stage.run(0.1)
    bob = stage.client(BOB)
    stage.run(turns.TAKE_UP - 1)
    assert not stage.working(bob)
    stage.run(4)
    assert stage.working(bob)
    alice.dead = False
    stage.ends(bob)
    stage.run(5)
    assert stage.working(alice)


@both
def test_a_hand_over_that_the_gate_gave_up_without_a_word_holds_up_no_turn(shared: bool) -> None:
    """A table in force says that no hand-over is under way that it does not allow."""
    stage = Stage(POLICY.replace("threads = 60", "threads = 60\nmax_clients = 1"), shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(ALICE)
    bob = stage.client(BOB)
    stage.run(0.1)
    second = next(number for number, one in stage.gate.held.items() if one.proc.uid == ALICE)
    stage.feed(inp.HandingOver(stage.now, second))
    assert stage.core is not None
    assert stage.core.state.held.handing == {second}
    stage.run(17)
    assert second not in stage.core.state.held.handing
    assert stage.working(bob)


@both
def test_a_crash_of_the_daemon_costs_nobody_his_place(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    stage.start_fails = True
    stage.crash_control()
    stage.run(0.5)
    for uid in (CAROL, ALICE, BOB):
        stage.client(uid)
        stage.run(5)
    stage.start_fails = False
    stage.run(20)
    assert stage.at_work() == {CAROL}
    assert stage.gate.turned_away == []


@both
def test_clients_whose_server_died_do_not_hold_the_gpu(shared: bool) -> None:
    """They live on with an error; their user is asked to come again, behind who waits."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE, stays=True)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    stage.mps.exited(next(iter(stage.mps.servers.values())))
    stage.run(2)
    assert stage.working(bob)
    assert alice.pid in stage.procs
    assert stage.actions(act.SignalClient) == []
    stage.comes_back(alice)
    stage.run(1)
    assert not stage.working(alice)
    stage.ends(bob)
    stage.run(1)
    assert stage.working(alice)


@both
def test_a_client_that_makes_one_context_after_the_other_keeps_its_turn(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    for _ in range(10):
        stage.run(2)
        stage.detaches(alice)
        stage.run(0.3)
        stage.comes_back(alice)
        stage.run(0.5)
        assert stage.working(alice)
    assert stage.turns() == [ALICE]


@both
def test_a_client_that_has_let_go_for_longer_gives_the_gpu_up(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    stage.detaches(alice)
    stage.run(1.5)
    assert stage.working(bob)
    assert alice.pid in stage.procs
    (released,) = stage.actions(act.ReleaseClient)
    assert isinstance(released, act.ReleaseClient)
    assert released.pid == alice.pid


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
    text = POLICY.replace("threads = 50", 'threads = 50\nmax_runtime = "10s"')
    text = text.replace("threads = 60", 'threads = 60\nmax_runtime = "1h"\nswitch.exempt = true')
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


@both
def test_an_idle_turn_of_a_user_who_is_not_known_does_not_hold_up_others(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.identities = {}
    stage.kill_agent()
    stage.start_agent()
    stage.run(1)
    stage.ends(alice)
    stage.run(1)
    stage.client(ALICE)
    stage.run(1)
    stage.know(BOB)
    bob = stage.client(BOB)
    stage.run(2)
    assert stage.working(bob)


def test_a_turn_does_not_jump_to_and_fro_while_a_name_is_slow_and_the_gate_closed() -> None:
    """Carol is next, but unknown; Alice's next client is behind her, and cannot be let in because of a fault."""
    stage = Stage(PATIENT.replace("threads = 60", "threads = 60\nmax_clients = 1")).up()
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


@both
def test_an_agent_that_finds_the_gate_at_work_waits_until_its_own_table_is_in_force(shared: bool) -> None:
    """The gate goes on with what the agent before said: a client may be on its way through it just now."""
    stage = Stage(PATIENT, shared=shared, lag=0.05).up()
    stage.ends(stage.client(ALICE))
    stage.run(1)
    stage.kill_agent()
    stage.client(BOB)
    stage.run(5)
    stage.client(ALICE)  # whose turn it still is for the gate
    stage.start_agent()
    stage.run(2)  # the harness fails when two work at once
    assert stage.at_work() == {ALICE}


@both
def test_a_lost_link_resets_no_clock_and_loses_no_place(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    bob, carol = stage.client(BOB), stage.client(CAROL)
    for _ in range(4):
        stage.run(2.5)
        stage.cut_link()
        stage.run(0.5)
        stage.connect()
    stage.run(4)
    assert stage.working(bob)
    assert stage.served[bob.pid] - stage.came[bob.pid] < 17
    assert len(stage.happened(tr.ClientWaiting)) == 3  # each told once
    assert stage.happened(tr.ClientLeft) == []
    assert not stage.working(carol)


def test_who_left_or_passed_while_the_link_was_down_is_on_record() -> None:
    stage = Stage(PATIENT).up()
    stage.ends(stage.client(ALICE))
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    stage.ends(bob)
    stage.run(1)
    left, passed = stage.client(CAROL), stage.client(BOB)
    stage.cut_link()
    stage.ends(left)
    stage.run(1)
    stage.connect()
    stage.run(0.5)
    assert stage.working(passed)
    waiting = {one.pid for one in stage.told if isinstance(one, tr.ClientWaiting)}
    ends = {one.pid for one in stage.told if isinstance(one, tr.ClientLeft | tr.ClientConnected)}
    assert waiting == ends


@both
def test_several_users_found_at_work_end_one_after_the_other(shared: bool) -> None:
    """After the gate has passed everybody on without an agent: each gets his turn's time, then the queue goes on."""
    stage = Stage(shared=shared).up()
    assert stage.core is not None
    for number, uid in enumerate((ALICE, BOB)):
        proc = stage.procs[50 + number] = Proc(50 + number, uid, 7)
        stage.gate.ever[proc.key] = uid
        stage.gate.connections[proc.key] = 1
        peer = inp.Peer(proc.pid, uid, 100, proc.start)
        stage.feed(inp.Known(stage.now, peer, stage.now + number, stage.limits(uid)))
    carol = stage.client(CAROL)
    stage.run(60)
    assert stage.turns() == [BOB, CAROL]  # ALICE had hers already
    assert stage.working(carol)


@both
def test_the_gap_is_told(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.ends(alice)
    stage.run(1)
    first, second = stage.happened(tr.TurnBegan)
    assert isinstance(first, tr.TurnBegan)
    assert isinstance(second, tr.TurnBegan)
    assert first.gap is None
    assert second.gap is not None
    assert 0 <= second.gap < 0.5


def test_turns_do_not_overlap_in_the_record() -> None:
    stage = Stage().up()
    for uid in (ALICE, BOB, CAROL, ALICE):
        stage.client(uid)
        stage.run(0.3)
    stage.run(60)
    kinds = [one for one in stage.told if isinstance(one, tr.TurnBegan | tr.TurnEnded)]
    for before, after in pairwise(kinds):
        assert type(before) is not type(after)
        assert before.at <= after.at
