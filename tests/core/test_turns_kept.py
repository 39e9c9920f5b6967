"""Turns when something goes wrong: hand-overs, servers, the daemon, the link to the gate, the agent itself."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core import turns
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, POLICY, Stage
from tests.core.said import known
from tests.core.toy import Proc

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


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
def test_one_hand_over_in_vain_after_the_other_does_not_hold_up_the_next_user_for_ever(shared: bool) -> None:
    """20 processes that take their descriptor and say nothing, each for 5 s: at no moment none is being handed over."""
    stage = Stage(POLICY, shared=shared).up()
    for _ in range(20):
        stage.client(ALICE, hollow=5.0)
    stage.run(0.5)
    bob = stage.client(BOB)
    stage.run(turns.TAKE_UP - 1)
    assert not stage.working(bob)
    stage.run(1 + 5 + 1)
    assert stage.working(bob)


@both
def test_a_first_hand_over_that_takes_long_is_waited_for(shared: bool) -> None:
    """Its user is shut out meanwhile, and has its turn when it works."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.mps.stopped = True
    stage.run(0.5)
    bob = stage.client(BOB)
    stage.run(turns.TAKE_UP + 1)
    stage.mps.stopped = False
    stage.run(1)
    assert stage.working(alice)
    assert not stage.working(bob)


@both
def test_who_is_first_while_the_control_daemon_is_stopped_stays_first(shared: bool) -> None:
    """No user stops it: 10 s in vain are not its user's (tests.world, hour 3000105)."""
    stage = Stage(PATIENT, shared=shared).up()
    stage.mps.never_resumes = True
    stage.mps.stopped = True
    alice = stage.client(ALICE)
    stage.run(0.5)
    bob = stage.client(BOB)
    stage.run(20)
    assert stage.working(alice)
    assert not stage.working(bob)


@both
def test_a_hand_over_that_the_gate_gave_up_without_a_word_holds_up_no_turn(shared: bool) -> None:
    """A table in force says that no hand-over is under way that it does not allow."""
    stage = Stage(
        POLICY.replace("active_threads = '60%'", "active_threads = '60%'\nmax_clients = 1"), shared=shared
    ).up()
    stage.client(ALICE)
    stage.run(1)
    stage.client(ALICE)
    bob = stage.client(BOB)
    stage.run(0.1)
    second = next(number for number, proc in stage.gate.held.items() if proc.uid == ALICE)
    stage.feed(inp.GateSaid(stage.now, link.Handing(second, 0, 0, stage.now)))
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
    (released,) = stage.actions(link.Release)
    assert released.pid == alice.pid


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
        peer = inp.Peer(proc.pid, uid, 100, proc.start)
        stage.feed(known(stage.now, peer, stage.now + number, stage.limits(uid)))
    carol = stage.client(CAROL)
    stage.run(60)
    assert stage.turns() == [BOB, CAROL]  # ALICE had hers already
    assert stage.working(carol)


@both
@pytest.mark.parametrize("lag", [0.001, 0.2], ids=["daemon later", "daemon first"])
def test_clients_of_a_daemon_that_died_with_the_agent_do_not_hold_the_gpu(shared: bool, lag: float) -> None:
    """Nobody has told the new agent of that daemon's end. Its clients live on without a server, and the gate knows them
    (recording 12, H5)."""
    stage = Stage(PATIENT, shared=shared, lag=lag).up()
    alice = stage.client(ALICE, stays=True)
    stage.run(2)
    bob = stage.client(BOB)
    stage.run(1)
    stage.kill_agent()
    stage.mps.end()
    stage.run(2)
    stage.start_agent()
    stage.run(5)
    assert stage.working(bob)
    assert stage.procs.get(alice.pid) is alice
