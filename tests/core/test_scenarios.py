"""What the decisions do, each promise and each failure once, on a toy MPS in virtual time."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import pairwise

import pytest

from mpsagent.core import actions as act
from mpsagent.core import hangs
from mpsagent.core.decide import decide, end_client, start_again
from mpsagent.core.model import Status
from mpsagent.core.world import Drain, World
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from tests.core.harness import ALICE, BOB, CAROL, DAVE, NOBODY, POLICY, Toy, policy

CHANGES = (
    act.SetDefaults,
    act.SetServerLimits,
    act.StartServer,
    act.ShutdownServer,
    act.TerminateClient,
    act.SignalClient,
    act.KillServer,
    act.KillControl,
    act.Resume,
    act.QuitControl,
    act.RunHook,
)


def given(toy: Toy, pid: int) -> Limits:
    (found,) = [limits for p, _, limits in toy.given if p == pid]
    return found


# --- limits -----------------------------------------------------------------------------------------------------------


def test_the_door_opens_last() -> None:
    """Floor set and confirmed, then the door, then the parked server (which comes in through it): no moment in which a
    client gets more than the strictest limits."""
    toy = Toy().up()
    kinds = [type(a) for a in toy.actions(act.StartControl, act.SetDefaults, act.StartServer, act.OpenDoor)]
    assert kinds == [act.StartControl, act.SetDefaults, act.OpenDoor, act.StartServer]
    assert toy.defaults == toy.limits(BOB)  # the strictest of the policy


def test_the_first_client_of_a_user_gets_exactly_his_limits_and_then_the_floor_is_back() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE)
    toy.run(1)
    assert given(toy, pid) == toy.limits(ALICE)
    assert toy.defaults == toy.limits(BOB)
    assert [r.uid for r in toy.reports("limits.verified")] == [ALICE]


def test_several_waiting_users_are_armed_for_one_after_the_other() -> None:
    toy = Toy().up()
    holder = toy.client(DAVE)
    toy.run(1)
    pids = [toy.client(uid) for uid in (ALICE, BOB, ALICE, CAROL, BOB)]
    toy.run(0.5)
    assert toy.defaults == toy.limits(ALICE)  # while the holder works on: a default does not reach a running server
    toy.leave(holder)
    toy.run(1.0)
    assert toy.defaults == toy.limits(BOB)
    for pid in pids:
        toy.leave(pid)
        toy.run(1.0)
    for pid, uid, limits in toy.given:
        assert limits == toy.limits(uid), (pid, uid)


def test_a_user_whose_name_is_not_known_yet_gets_the_floor_and_later_his_own() -> None:
    """A slow LDAP: less, never more; corrected for later clients and on record."""
    toy = Toy().up()
    alice = toy.identities.pop(ALICE)
    pid = toy.client(ALICE)
    toy.run(1)
    assert given(toy, pid) == toy.limits(BOB)
    assert toy.actions(act.SetServerLimits) == []
    toy.identities[ALICE] = alice
    toy._wake()
    toy.run(1)
    assert [r.uid for r in toy.reports("limits.mismatch")] == [ALICE]
    assert "less" in toy.reports("limits.mismatch")[0].reason
    assert toy.server is not None
    assert toy.server.limits == toy.limits(ALICE)


def test_a_name_that_becomes_known_while_its_user_waits_is_armed_for() -> None:
    toy = Toy().up()
    holder = toy.client(CAROL)
    toy.run(1)
    alice = toy.identities.pop(ALICE)
    pid = toy.client(ALICE)
    toy.run(1)
    toy.identities[ALICE] = alice
    toy._wake()
    toy.run(1)
    toy.leave(holder)
    toy.run(1)
    assert given(toy, pid) == toy.limits(ALICE)


def test_refused_defaults_are_tried_again_with_growing_pauses() -> None:
    """A front-end that refuses in a millisecond must not be asked a thousand times a second."""
    toy = Toy().up()
    toy.front_end_fails = True
    toy.client(ALICE)
    before = len(toy.actions(act.SetDefaults))
    toy.run(120)
    assert 3 <= len(toy.actions(act.SetDefaults)) - before <= 12
    toy.front_end_fails = False
    toy.run(31)
    assert toy.defaults == toy.limits(BOB)


def test_another_users_wish_does_not_wait_for_a_refused_one() -> None:
    toy = Toy().up()
    toy.client(CAROL)
    toy.run(0.1)
    toy.front_end_fails = True  # for the way back to the floor
    toy.run(1)
    toy.front_end_fails = False
    toy.client(ALICE)
    toy.run(0.02)
    assert toy.defaults == toy.limits(ALICE)


def test_a_server_that_started_with_more_is_reported_and_corrected_until_it_takes() -> None:
    """The agent was away: the daemon's own default was 100 %."""
    toy = Toy().up()
    toy.agent = False
    toy.defaults = Limits()
    toy.client(ALICE)
    toy.run(1)
    toy.agent = True
    toy.front_end_fails = True
    toy._wake()
    toy.run(12)
    assert "MORE" in toy.reports("limits.mismatch")[0].reason
    assert len(toy.reports("limits.mismatch")) == 1
    assert 2 <= len(toy.actions(act.SetServerLimits)) <= 4
    toy.front_end_fails = False
    toy.run(6)
    assert toy.server is not None
    assert toy.server.limits == toy.limits(ALICE)


def test_a_changed_policy_reaches_the_running_server_and_the_next_one() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    toy.policy = policy(POLICY.replace("threads = 60", "threads = 30"))
    toy._wake()
    toy.run(1)
    assert toy.server is not None
    assert toy.server.limits == toy.limits(ALICE) == Limits(30.0, {0: 20 << 30})
    assert len(toy.actions(act.SetServerLimits)) == 1


def test_a_new_daemon_has_forgotten_the_defaults_and_is_told_again() -> None:
    toy = Toy().up()
    toy.crash_control()
    toy.run(5)
    assert toy.control
    assert toy.door
    assert toy.defaults == toy.limits(BOB)
    assert toy.server is not None
    assert toy.server.uid == NOBODY


def test_a_parked_server_that_has_gone_is_parked_again() -> None:
    toy = Toy().up()
    assert toy.server is not None
    toy._exited(toy.server)
    toy.run(6)
    assert toy.server is not None
    assert toy.server.uid == NOBODY


# --- turns ------------------------------------------------------------------------------------------------------------


def test_the_nudge_is_sent_once_when_the_last_client_has_gone() -> None:
    toy = Toy().up()
    first, second = toy.client(ALICE), toy.client(ALICE)
    toy.run(4)
    toy.client(BOB)
    toy.run(5)
    toy.leave(first)
    toy.run(1)
    assert toy.actions(act.ShutdownServer) == []
    toy.leave(second)
    left = toy.now
    toy.run(1)
    (nudge,) = toy.actions(act.ShutdownServer)
    assert not nudge.force  # type: ignore[attr-defined]
    assert toy.served[max(toy.served)] - left < 0.3


def test_a_nudge_that_is_refused_is_sent_again_once_a_second() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE)
    toy.run(3)
    toy.client(BOB)
    toy.run(7)  # the back-off is at 6.4 s by now
    toy.front_end_fails = True
    toy.leave(pid)
    toy.run(2.5)
    assert 2 <= len(toy.actions(act.ShutdownServer)) <= 4


def test_an_idle_server_is_left_to_mps_when_somebody_comes() -> None:
    toy = Toy().up()
    toy.leave(toy.client(ALICE))
    toy.run(1)
    pid = toy.client(ALICE)
    toy.run(1)
    toy.leave(pid)
    toy.run(5)
    toy.client(BOB)
    toy.run(1)
    assert toy.actions(act.ShutdownServer) == []


def starve(toy: Toy, seconds: int, every: float = 1.0) -> None:
    """A starts a client every second for ever."""
    for i in range(int(seconds / every)):
        toy.at(i * every, lambda: toy.client(ALICE))


def test_new_clients_of_the_holder_do_not_reset_the_clock() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    starve(toy, 40)
    bob = toy.client(BOB)
    toy.run(40)
    assert bob in toy.served
    assert toy.served[bob] - toy.arrived[bob] < 15 + 1
    warnings = [(at, a) for at, a in toy.done if isinstance(a, act.Report) and a.kind == "turn.warning"]
    (warned,) = [at for at, a in warnings if a.uid == ALICE]
    assert warned - toy.arrived[bob] == pytest.approx(10, abs=0.1)
    assert toy.hurt == set()
    assert given(toy, bob) == toy.limits(BOB)


def test_a_turn_ends_by_the_ladder_and_takes_its_leftovers_with_it() -> None:
    toy = Toy().up()
    pids = [toy.client(ALICE) for _ in range(3)]
    toy.run(1)
    stubborn = toy.client(ALICE, stubborn=True)
    stopped = toy.client(ALICE, stopped=True)
    toy.client(BOB)
    toy.run(14.9)
    assert set(pids) <= toy.procs.keys()
    toy.run(25)
    assert not {*pids, stubborn, stopped} & toy.procs.keys()
    signals = [a for a in toy.actions(act.SignalClient) if isinstance(a, act.SignalClient)]
    assert {a.pid for a in signals if a.signal == signal.SIGKILL} == {stubborn, stopped}
    assert (
        toy.served[max(toy.served)] - toy.arrived[max(toy.served)] < 15 + 5 + 1
    )  # + hang.terminate, for the stopped one


def test_who_waits_longest_is_served_first_and_his_clients_count_once() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    bobs = [toy.client(BOB) for _ in range(3)]
    carol = toy.client(CAROL)
    toy.run(17)
    assert all(pid in toy.served for pid in bobs)
    assert carol not in toy.served
    toy.run(16)
    assert toy.served[carol] - toy.served[bobs[0]] == pytest.approx(15, abs=1)


def test_the_clock_stops_when_nobody_waits_any_more() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    bob = toy.client(BOB)
    toy.run(9)
    toy.leave(bob)
    toy.run(3)
    second = toy.client(BOB)
    toy.run(13)
    assert second not in toy.served
    assert toy.reports("turn.ended") == []
    toy.run(3)
    assert second in toy.served


def test_nobodys_turn_ends_for_a_dead_process() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    toy.leave(toy.client(BOB))
    toy.run(60)
    assert toy.reports("turn.warning") == []
    assert toy.actions(act.ShutdownServer, act.TerminateClient, act.SignalClient) == []


def test_a_server_for_a_dead_client_does_not_hold_up_who_waits_behind() -> None:
    """MPS starts it all the same, and hangs when it has to make way (conformance scenario X1)."""
    toy = Toy().up()
    alice = toy.client(ALICE)
    toy.run(1)
    toy.leave(toy.client(BOB))
    carol = toy.client(CAROL)
    toy.run(1)
    toy.leave(alice)
    toy.run(5)
    assert toy.served[carol] - toy.arrived[carol] < 6
    assert toy.actions(act.KillControl) == []


def test_a_client_that_comes_while_its_users_server_exits_does_not_start_a_new_turn() -> None:
    """MPS serves the leaving server's own user first: by a client every few milliseconds B would starve."""
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    bob = toy.client(BOB)
    for i in range(400):
        toy.at(14.9 + i * 0.005, lambda: toy.client(ALICE) if bob not in toy.served else None)
    toy.run(40)
    assert bob in toy.served
    assert toy.served[bob] - toy.arrived[bob] < 15 + 20 + 5
    for pid, uid, limits in toy.given:
        assert limits.threads <= toy.limits(uid).threads, pid


def test_an_exempt_user_keeps_the_gpu() -> None:
    toy = Toy(POLICY + "[user.carol]\nswitch.exempt = true\n").up()
    toy.client(CAROL)
    toy.run(1)
    bob = toy.client(BOB)
    toy.run(600)
    assert bob not in toy.served
    assert toy.actions(act.ShutdownServer, act.TerminateClient, act.SignalClient) == []


def test_action_none_reports_once() -> None:
    toy = Toy(POLICY + 'action = "none"\n').up()
    toy.client(ALICE)
    toy.run(1)
    toy.client(BOB)
    toy.run(600)
    assert len(toy.reports("turn.over")) == 1
    assert toy.actions(act.ShutdownServer, act.TerminateClient, act.SignalClient) == []


def test_action_quit_starts_the_daemon_again_without_counting_it_as_a_crash() -> None:
    toy = Toy(POLICY + 'action = "quit"\n').up()
    for _ in range(12):
        alice = toy.client(ALICE)
        toy.run(1)
        bob = toy.client(BOB)
        toy.run(21)
        assert bob in toy.refused
        assert alice not in toy.procs  # a leftover with MPS_RPC_FAILURE
        assert toy.control
        assert toy.defaults == toy.limits(BOB)
        toy.leave(bob)
    assert not toy.memory.hangs.failed
    assert toy.hurt == set()


def test_a_quit_that_is_refused_is_sent_again() -> None:
    toy = Toy(POLICY + 'action = "quit"\n').up()
    toy.client(ALICE)
    toy.run(1)
    toy.client(BOB)
    toy.run(14)
    toy.front_end_fails = True
    toy.run(5)
    assert 3 <= len(toy.actions(act.QuitControl)) <= 6
    toy.front_end_fails = False
    toy.run(20)
    assert toy.control
    assert toy.memory.turns.turn is None


def test_a_forced_shutdown_that_is_refused_is_sent_again() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    bob = toy.client(BOB)
    toy.run(14)
    toy.front_end_fails = True
    toy.run(10)
    assert 1 <= len(toy.actions(act.ShutdownServer)) <= 8
    toy.front_end_fails = False
    toy.run(3)
    assert bob in toy.served


def test_a_server_that_dies_in_mid_turn_ends_the_turn() -> None:
    toy = Toy().up()
    alice = toy.client(ALICE)
    toy.run(1)
    bob = toy.client(BOB)
    toy.run(12)
    assert toy.server is not None
    toy._exited(toy.server)
    toy.run(30)
    assert bob in toy.served
    assert alice in toy.procs
    assert toy.actions(act.SignalClient) == []
    assert toy.reports("turn.ended") == []


def test_a_fault_while_a_turn_is_ending() -> None:
    toy = Toy().up()
    toy.client(ALICE, stubborn=True)
    toy.client(ALICE, stopped=True)
    toy.run(1)
    bob = toy.client(BOB)
    toy.run(15.1)
    toy.fault()
    toy.run(10)
    assert bob in toy.served


def test_a_policy_with_a_shorter_turn_gives_the_grace_all_the_same() -> None:
    toy = Toy(POLICY.replace('"10s"', '"1h"')).up()
    toy.client(ALICE)
    toy.run(1)
    bob = toy.client(BOB)
    toy.run(100)
    toy.policy = policy()
    toy._wake()
    changed = toy.now
    toy.run(4.8)
    assert bob not in toy.served
    toy.run(2)
    assert toy.served[bob] - changed > 5


# --- ladder -----------------------------------------------------------------------------------------------------------


def order(toy: Toy, pid: int) -> None:
    toy.memory = end_client(toy.world(), toy.memory, pid, toy.now, reason="asked", rule="by root", at_once=True)
    toy._wake()


@pytest.mark.parametrize("how", [{}, {"works": False}, {"stubborn": True}, {"stopped": True}])
def test_ending_one_client_hurts_no_neighbour(how: dict[str, bool]) -> None:
    toy = Toy().up()
    neighbour = toy.client(ALICE)
    toy.run(1)
    victim = toy.client(ALICE, **how)
    toy.run(1)
    order(toy, victim)
    toy.run(20)
    assert victim not in toy.procs
    assert neighbour in toy.procs
    assert toy.hurt == set()
    assert toy.memory.ladder.climbs == {}


def test_a_plain_signal_would_have_hurt_the_neighbour() -> None:
    """The control for the test above: the toy does show the damage."""
    toy = Toy().up()
    toy.client(ALICE)
    victim = toy.client(ALICE)
    toy.run(1)
    proc = toy.procs[victim]
    toy._signal(act.SignalClient(pid=victim, start=proc.start, uid=ALICE, signal=9, reason="", rule="test"))
    assert toy.hurt


def test_a_second_client_is_asked_only_when_the_daemon_hears_again() -> None:
    """The first one is stopped and blocks the daemon until its SIGKILL: a signal to the second would come first."""
    toy = Toy().up()
    neighbour = toy.client(ALICE)
    toy.run(1)
    stopped, second = toy.client(ALICE, stopped=True), toy.client(ALICE)
    toy.run(1)
    order(toy, stopped)
    order(toy, second)
    toy.run(30)
    assert not {stopped, second} & toy.procs.keys()
    assert neighbour in toy.procs
    assert toy.hurt == set()
    assert toy.actions(act.KillServer, act.KillControl) == []


def test_the_steps_of_the_ladder_and_their_times() -> None:
    """terminate_client with hang.terminate, SIGTERM, kill_grace, SIGKILL, and a report when even that does not help."""
    toy = Toy().up()
    pid = toy.client(ALICE, stopped=True)
    toy.run(1)
    toy._dies = lambda pid: None  # type: ignore[method-assign]  # stuck in the driver
    order(toy, pid)
    began = toy.now
    toy.run(60)
    steps = [(round(at - began, 1), type(a)) for at, a in toy.done if at >= began and not isinstance(a, act.Resume)]
    steps = [s for s in steps if s[1] in (act.TerminateClient, act.SignalClient)]
    assert steps == [(0.0, act.TerminateClient), (5.0, act.SignalClient), (5.0, act.SignalClient)]
    assert len(toy.reports("client.unkillable")) == 1


def test_a_client_that_leaves_by_itself_before_it_is_asked_is_left_in_peace() -> None:
    toy = Toy(POLICY + '[hooks]\nbefore_end = "/usr/bin/true"\n').up()
    pid = toy.client(ALICE)
    toy.run(1)
    toy.memory = end_client(toy.world(), toy.memory, pid, toy.now, reason="asked", rule="by root", at_once=False)
    toy.decide()
    assert toy.server is not None
    toy.server.clients.discard(pid)
    toy._tell(ev.ClientDisconnected(toy.now, toy.server.pid, pid))
    toy.run(10)
    assert len(toy.actions(act.RunHook)) == 1
    assert toy.actions(act.TerminateClient, act.SignalClient) == []
    assert pid in toy.procs


def test_a_reused_pid_is_never_signalled() -> None:
    """The client dies while it climbs, and its number goes to another process of the same user."""
    toy = Toy().up()
    pid = toy.client(ALICE, stubborn=True)
    toy.client(ALICE)
    toy.run(1)
    order(toy, pid)
    toy.run(3)
    assert list(toy.actions(act.SignalClient))
    before = len(toy.actions(act.SignalClient))
    toy._dies(pid)
    toy.client(ALICE, pid=pid)
    toy.run(20)
    assert len(toy.actions(act.SignalClient)) == before
    assert pid in toy.procs


def test_a_process_of_another_user_is_never_put_on_the_ladder() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE)
    toy.run(1)
    toy.procs[pid].uid = 0  # what MPS said and what the kernel says differ
    order(toy, pid)
    toy.run(20)
    assert toy.actions(act.TerminateClient, act.SignalClient) == []


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_leftover_that_ignores_its_error_ends_after_its_time() -> None:
    """hang.fault (15 s), SIGTERM, kill_grace (5 s), SIGKILL: ACTIVE again, a new client served, and no
    terminate_client, which would block the daemon."""
    toy = Toy().up()
    pid = toy.client(ALICE, stubborn=True)
    toy.run(1)
    toy.fault()
    began = toy.now
    toy.run(14.9)
    assert toy.actions(act.SignalClient) == []
    toy.run(5.3)
    assert pid not in toy.procs
    assert toy.now - began < 15 + 5 + 1
    assert next(iter(toy.state.servers.values())).status is Status.ACTIVE
    assert toy.actions(act.TerminateClient) == []
    assert len(toy.reports("fault")) == len(toy.reports("fault.over")) == 1
    new = toy.client(ALICE)
    toy.run(0.1)
    assert new in toy.served


def test_who_leaves_in_time_is_not_signalled() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE)
    toy.run(1)
    toy.fault()
    toy.at(14, lambda: toy.leave(pid))
    toy.run(30)
    assert toy.actions(act.SignalClient, act.ShutdownServer) == []


def test_a_server_that_stays_in_fault_with_nobody_left_is_asked_and_then_forced_at_a_bounded_rate() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE)
    toy.run(1)
    toy.fault()
    assert toy.server is not None
    toy.server.sticky.add(0)  # it never recovers
    toy.leave(pid)
    toy.state = replace(
        toy.state,
        servers={p: replace(s, status=Status.FAULT, fault_since=toy.now) for p, s in toy.state.servers.items()},
    )
    toy.front_end_fails = True
    toy._wake()
    toy.run(20)
    forced = list(toy.actions(act.ShutdownServer))
    assert 3 <= len(forced) <= 12
    toy.front_end_fails = False
    toy.run(5)
    assert toy.server is None or toy.server.uid == NOBODY


# --- hangs ------------------------------------------------------------------------------------------------------------


def test_a_stopped_server_is_resumed_first() -> None:
    """Nobody loses work by SIGCONT."""
    toy = Toy().up()
    alice = toy.client(ALICE)
    toy.run(1)
    assert toy.server is not None
    toy.server.stopped = True
    toy.client(BOB)
    toy.run(60)
    assert len(toy.actions(act.Resume)) >= 1
    assert toy.actions(act.KillServer, act.KillControl) == []
    assert alice in toy.procs or toy.reports("turn.ended")


def test_a_server_that_stays_stopped_is_killed_and_the_next_user_served() -> None:
    toy = Toy().up()
    toy.never_resumes = True
    toy.client(ALICE)
    toy.run(1)
    assert toy.server is not None
    toy.server.stopped = True
    bob = toy.client(BOB)
    toy.run(15 + 5)  # hang.exit: MPS has asked it to make way
    assert bob in toy.served
    assert len(toy.actions(act.KillServer)) == 1
    assert toy.actions(act.KillControl) == []


def test_a_stopped_daemon_is_resumed_then_killed_and_started_again() -> None:
    toy = Toy().up()
    toy.never_resumes = True
    toy.client(ALICE)
    toy.run(1)
    toy.control_stopped = True
    toy._wake()  # the agent looks at the processes once a second
    toy.client(BOB)
    toy.run(45)
    kinds = [type(a) for a in toy.actions(act.Resume, act.KillControl, act.KillServer)]
    assert kinds[0] is act.Resume
    assert act.KillControl in kinds
    assert toy.control
    assert not toy.control_stopped
    assert toy.defaults == toy.limits(BOB)


def test_a_daemon_that_waits_for_a_client_on_the_ladder_is_not_a_hang() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE, stopped=True)
    toy.run(1)
    order(toy, pid)
    toy.at(0.5, lambda: toy.client(BOB))
    toy.run(14)
    assert toy.actions(act.Resume, act.KillServer, act.KillControl) == []


def test_a_quit_that_does_not_end_is_ended() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    toy._tell(ev.QuitIssued(toy.now, 5))  # and then nothing
    toy.quitting = True
    toy.run(5 + 10 - 0.5)
    assert toy.actions(act.KillControl) == []
    toy.run(5)
    assert len(toy.actions(act.KillControl)) == 1
    assert toy.control


def test_a_plain_quit_may_wait_for_its_clients_as_long_as_they_work() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE)
    toy.run(1)
    toy._tell(ev.CommandRead(toy.now, "quit"))
    toy.silent_since = toy.now
    toy.run(600)
    assert toy.actions(act.KillControl, act.KillServer, act.Resume) == []
    toy.leave(pid)
    toy.run(15)
    assert len(toy.actions(act.KillControl)) == 1


def starts(toy: Toy) -> list[float]:
    return [at for at, a in toy.done if isinstance(a, act.StartControl)]


def test_a_crash_loop_backs_off_and_ends_in_a_clear_failure() -> None:
    toy = Toy()
    toy.start_fails = True
    toy._wake()
    toy.run(600)
    times = starts(toy)
    pauses = [b - a for a, b in pairwise(times)]
    assert len(times) == hangs.GIVE_UP_AFTER
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60], abs=0.1)
    assert toy.memory.hangs.failed
    (failed,) = toy.reports("control.failed")
    assert "mpsagent-cli restart" in failed.reason
    toy.start_fails = False
    toy.memory = start_again(toy.memory)
    toy._wake()
    toy.run(2)
    assert toy.control


def test_a_daemon_that_dies_at_once_after_each_start_counts_as_well() -> None:
    toy = Toy()
    toy._wake()
    for _ in range(1200):
        toy.run(0.5)
        toy.crash_control()
    assert len(starts(toy)) == hangs.GIVE_UP_AFTER
    assert toy.memory.hangs.failed


def test_a_daemon_that_dies_once_a_day_is_started_at_once() -> None:
    toy = Toy().up()
    for _ in range(20):
        toy.run(61)
        toy.crash_control()
        toy.run(0.5)
        assert toy.control
    assert not toy.memory.hangs.failed


def test_the_daemon_is_asked_rarely_while_nothing_happens() -> None:
    """Each question writes five lines into the log that is read: at most one a minute while idle."""
    toy = Toy().up()
    before = len(toy.done)
    toy.run(3600)
    asked = [a for _, a in toy.done[before:]]
    assert all(isinstance(a, act.Reconcile) for a in asked)
    assert 10 <= len(asked) <= 60


# --- limits on clients ------------------------------------------------------------------------------------------------


def test_the_newest_clients_over_the_most_are_ended() -> None:
    toy = Toy(POLICY + "[user.carol]\nmax_clients = 2\n").up()
    toy.client(CAROL)
    toy.run(1)
    pids = []
    for _ in range(3):
        pids.append(toy.client(CAROL))
        toy.run(1)
    toy.run(10)
    assert pids[0] in toy.procs
    assert not set(pids[1:]) & toy.procs.keys()
    assert toy.hurt == set()


def test_a_client_over_its_run_time_is_ended_at_its_edge() -> None:
    toy = Toy(POLICY + '[user.carol]\nmax_runtime = "60s"\n').up()
    pid = toy.client(CAROL)
    toy.run(60)
    assert toy.actions(act.TerminateClient) == []
    toy.run(1)
    assert pid not in toy.procs


def test_a_nearly_full_server_is_reported_once() -> None:
    toy = Toy().up()
    for _ in range(45):
        toy.client(ALICE)
        toy.run(1)
    (report,) = toy.reports("clients.nearly_full")
    assert "39 of at most 48" in report.reason


# --- enforcement ------------------------------------------------------------------------------------------------------

UNENFORCED = "enforce = false\n" + POLICY + '[user.carol]\nmax_runtime = "1s"\n'


def test_without_enforcement_nothing_is_changed() -> None:
    """Only reports, questions, and a control daemon that runs with its door open."""
    toy = Toy(UNENFORCED).up()
    carol = toy.client(CAROL)
    toy.run(3)
    alice = toy.client(ALICE, stubborn=True)
    toy.run(60)
    toy.leave(carol)
    toy.run(10)
    toy.fault()
    toy.client(BOB)
    toy.run(60)
    toy.leave(alice)
    toy.run(10)
    assert toy.server is not None
    toy.server.stopped = True
    toy.client(ALICE)
    toy.run(120)
    assert toy.actions(*CHANGES) == []
    assert {type(a) for _, a in toy.done if a.enforce} <= {act.Report, act.Reconcile, act.StartControl, act.OpenDoor}
    assert toy.reports("client.over")
    assert toy.reports("turn.over")
    assert toy.reports("limits.not_enforced")
    would = {type(a) for _, a in toy.done if not a.enforce}
    assert act.SetDefaults in would
    assert act.ShutdownServer in would


def test_limits_that_are_enforced_no_longer_are_taken_back_once() -> None:
    """Otherwise everybody would keep the strictest limits of a policy that only reports."""
    toy = Toy().up()
    assert toy.defaults != Limits()
    toy.policy = policy("[limits]\nenforce = false\nthreads = 20\n")
    toy._wake()
    toy.run(300)
    assert toy.defaults == Limits()
    (_, last) = toy.actions(act.SetDefaults)
    assert isinstance(last, act.SetDefaults)
    assert last.limits == Limits()


def test_limits_that_are_enforced_again_are_set_before_the_next_server() -> None:
    toy = Toy("enforce = false\n" + POLICY).up()
    toy.client(CAROL)
    toy.run(1)
    toy.policy = policy()
    toy._wake()
    toy.run(1)
    assert toy.defaults == toy.limits(BOB)
    assert toy.server is not None
    assert toy.server.limits == toy.limits(CAROL)


def test_one_user_may_be_left_out_of_the_limits() -> None:
    toy = Toy(POLICY + "[user.carol]\nenforce = false\n").up()
    carol = toy.client(CAROL)
    toy.run(1)
    assert given(toy, carol) == Limits()
    assert toy.reports("limits.not_enforced")
    toy.leave(carol)
    toy.run(1)
    alice = toy.client(ALICE)
    toy.run(1)
    assert given(toy, alice) == toy.limits(ALICE)


def test_turns_may_be_reported_only() -> None:
    toy = Toy(POLICY + "enforce = false\n").up()  # in [switch]
    alice = toy.client(ALICE)
    toy.run(1)
    toy.client(BOB)
    toy.run(60)
    assert alice in toy.procs
    assert toy.actions(act.ShutdownServer, act.TerminateClient, act.SignalClient) == []
    assert given(toy, alice) == toy.limits(ALICE)
    assert len(toy.reports("turn.over")) == 1


def test_hangs_may_be_reported_only() -> None:
    toy = Toy(POLICY + "[hang]\nenforce = false\n").up()
    toy.client(ALICE)
    toy.run(1)
    assert toy.server is not None
    toy.server.stopped = True
    toy.client(BOB)
    toy.run(300)
    assert toy.actions(act.Resume, act.KillServer, act.KillControl) == []
    assert 1 <= len([a for _, a in toy.done if isinstance(a, act.KillServer)]) <= 2


def test_a_climb_stops_when_its_rule_is_enforced_no_longer() -> None:
    toy = Toy().up()
    pid = toy.client(ALICE, stopped=True)
    toy.run(1)
    toy.client(BOB)
    toy.run(16)
    toy.policy = policy("enforce = false\n" + POLICY)
    toy._wake()
    toy.run(60)
    assert toy.actions(act.SignalClient) == []
    assert pid in toy.procs


# --- drain ------------------------------------------------------------------------------------------------------------


def test_a_drain_lets_work_end_and_serves_nobody_new() -> None:
    toy = Toy().up()
    alice = toy.client(ALICE)
    toy.run(1)
    waiting = toy.client(BOB)
    toy.run(1)
    toy.drain = Drain(toy.now, None)
    toy._wake()
    toy.run(100)
    (quit_,) = toy.actions(act.QuitControl)
    assert isinstance(quit_, act.QuitControl)
    assert quit_.timeout == 86400
    assert waiting in toy.refused
    assert alice in toy.procs
    assert toy.client(CAROL) in toy.refused
    assert toy.reports("drain.done") == []
    toy.leave(alice)
    toy.run(100)
    assert not toy.control
    assert len(toy.reports("drain.done")) == 1
    toy.drain = None
    toy._wake()
    toy.run(3)
    assert toy.control
    assert toy.door
    assert [len(toy.reports(f"drain.{kind}")) for kind in ("begun", "done", "ended")] == [1, 1, 1]


def test_a_drain_with_a_time_ends_what_is_left_then() -> None:
    toy = Toy().up()
    alice = toy.client(ALICE, stubborn=True)
    toy.run(1)
    toy.drain = Drain(toy.now, toy.now + 60)
    toy._wake()
    toy.run(59)
    assert alice in toy.procs
    toy.run(10)
    assert alice not in toy.procs
    assert not toy.control
    assert toy.hurt == set()
    assert toy.actions(act.TerminateClient) == []


def test_a_drain_whose_quit_is_refused_asks_again_every_few_seconds() -> None:
    toy = Toy().up()
    toy.front_end_fails = True
    toy.drain = Drain(toy.now, None)
    toy._wake()
    toy.run(30)
    assert 4 <= len(toy.actions(act.QuitControl)) <= 8
    toy.front_end_fails = False
    toy.run(10)
    assert not toy.control


def test_a_quit_of_a_drain_that_hangs_is_ended() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    toy._quit = lambda timeout: toy._tell(ev.QuitIssued(toy.now, timeout))  # type: ignore[method-assign]
    toy.drain = Drain(toy.now, toy.now + 20)
    toy._wake()
    toy.run(20 + 10 + 5)
    assert not toy.control
    assert len(toy.actions(act.KillControl)) == 1


# --- values -----------------------------------------------------------------------------------------------------------


def test_an_empty_world_starts_the_daemon_and_nothing_else() -> None:
    toy = Toy()
    found = decide(World(state=toy.state, policy=policy(""), control_alive=False), toy.memory, 0.0)
    assert [type(a) for a in found.actions] == [act.StartControl]
