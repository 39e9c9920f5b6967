"""Ending one client hurts no other: the steps of the ladder, their times, and what each rests on."""

from __future__ import annotations

import signal

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.waiting import waiting
from mpsagent.mps import events as ev
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, PATIENT, POLICY, Stage
from tests.core.toy import Proc

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
HOOK = PATIENT + '[hooks]\npre_terminate = "/usr/bin/true"\n'


def order(stage: Stage, proc: Proc, *, at_once: bool = True) -> None:
    stage.feed(inp.EndOrdered(stage.now, proc.pid, 0, at_once))


def steps(stage: Stage, since: float) -> list[tuple[float, str]]:
    found = []
    for at, one in stage.done:
        if at >= since and isinstance(one, act.TerminateClient):
            found.append((round(at - since, 1), "terminate"))
        if at >= since and isinstance(one, act.SignalClient):
            found.append((round(at - since, 1), signal.Signals(one.signal).name))
    return found


@both
@pytest.mark.parametrize("how", [{}, {"works": False}, {"stubborn": True}, {"contexts": 3}])
def test_ending_one_client_hurts_no_neighbour(how: dict[str, bool], shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    neighbour = stage.client(ALICE)
    stage.run(1)
    victim = stage.client(ALICE, **how)
    stage.run(1)
    order(stage, victim)
    stage.run(20)
    assert victim.pid not in stage.procs
    assert stage.working(neighbour)
    assert stage.mps.hurt == set()
    assert stage.core is not None
    assert stage.core.engines[None].memories.ladder.climbs == {}
    (ended,) = stage.happened(tr.ClientEnded)
    assert isinstance(ended, tr.ClientEnded)
    assert (ended.pid, ended.outcome) == (victim.pid, "ended")


def test_a_plain_signal_would_have_hurt_the_neighbour() -> None:
    """The control for the test above: the toy does show the damage."""
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    victim = stage.client(ALICE)
    stage.run(1)
    stage._signal(act.SignalClient(pid=victim.pid, start=victim.start, uid=ALICE, signal=9, reason="x", rule="test"))
    assert stage.mps.hurt


@both
def test_the_steps_and_their_times(shared: bool) -> None:
    """terminate_client, SIGTERM when it is answered, kill_grace, SIGKILL, and a report when even that does not help."""
    stage = Stage(PATIENT, shared=shared).up()
    victim = stage.client(ALICE, stubborn=True)
    stage.run(1)
    stage.unkillable = True
    began = stage.now
    order(stage, victim)
    stage.run(60)
    assert steps(stage, began) == [(0.0, "terminate"), (0.0, "SIGTERM"), (5.0, "SIGKILL")]
    assert len(stage.reports("client.unkillable")) == 1


@pytest.mark.parametrize("holds", [True, False])
def test_a_signal_waits_where_the_work_is_still_on_the_gpu(holds: bool) -> None:
    """MPS has answered, and the process's exit would end its neighbour: its files of the GPU are held, or SIGTERM comes
    later."""
    stage = Stage(PATIENT, together=True).up()
    stage.holds = holds
    victim, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    began = stage.now
    order(stage, victim)
    stage.run(30)
    assert steps(stage, began) == [(0.0, "terminate"), (0.0 if holds else 10.0, "SIGTERM")]
    assert stage.mps.hurt == set()
    assert stage.working(bob)


def test_nothing_is_held_where_all_clients_of_the_server_are_being_ended() -> None:
    """Their memory is free at once for the next user."""
    stage = Stage(POLICY).up()
    for _ in range(3):
        stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(17)
    assert [one.protect for one in stage.actions(act.TerminateClient)] == [False] * 3
    assert stage.working(bob)


def test_no_signal_before_the_request_is_answered_or_over_its_deadline() -> None:
    """The server logs the request before the client has let go: the line is not the answer."""
    stage = Stage(PATIENT).up()
    neighbour, victim = stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    stage.front_end_fails = False
    stage._terminate = lambda core, mps, action, limit: stage._log(  # type: ignore[method-assign]
        ev.TerminationAsked(stage.now, action.server, action.pid)
    )
    began = stage.now
    order(stage, victim)
    stage.run(14.9)
    assert steps(stage, began) == [
        (0.0, "terminate")
    ]  # 5 s for terminate_client and timeouts.control_daemon: an executor that says nothing
    stage.run(1)
    assert steps(stage, began)[1] == (15.0, "SIGTERM")
    assert stage.working(neighbour)


def test_a_client_whose_end_is_heard_of_before_the_answer_of_mps_was_ended() -> None:
    """MPS ends it, and its answer comes to a busy agent later than the word of the kernel."""
    stage = Stage(PATIENT).up()
    victim = stage.client(ALICE)
    stage.run(1)
    stage._terminate = lambda core, mps, action, limit: stage.ends(victim)  # type: ignore[method-assign]
    order(stage, victim)
    stage.run(20)
    (ended,) = stage.happened(tr.ClientEnded)
    assert isinstance(ended, tr.ClientEnded)
    assert ended.outcome == "ended"


def test_a_request_that_does_not_get_through_is_repeated_until_its_deadline() -> None:
    stage = Stage(PATIENT).up()
    victim = stage.client(ALICE)
    stage.run(1)
    stage.front_end_fails = True
    began = stage.now
    order(stage, victim)
    stage.run(10)
    found = steps(stage, began)
    assert [name for _, name in found] == ["terminate"] * 5 + ["SIGTERM"]
    assert found[-1][0] == pytest.approx(5.0, abs=0.3)


def test_a_second_client_is_asked_only_when_the_daemon_hears_again() -> None:
    """The first one blocks the daemon until its SIGKILL: a signal to the second would come first."""
    stage = Stage(PATIENT).up()
    neighbour = stage.client(ALICE)
    stage.run(1)
    blocking, second = stage.client(ALICE, stubborn=True, terminated=True), stage.client(ALICE)
    stage.run(1)
    order(stage, blocking)
    order(stage, second)
    stage.run(30)
    assert not {blocking.pid, second.pid} & stage.procs.keys()
    assert stage.working(neighbour)
    assert stage.mps.hurt <= {blocking.pid, second.pid}
    assert stage.actions(act.KillServer, act.KillControl) == []


def test_a_client_that_was_terminated_before_is_not_asked_again() -> None:
    """Asked a second time, the daemon would answer nothing until that process exits (conformance scenario X8): by this
    agent, by the one before, by an administrator."""
    stage = Stage(PATIENT).up()
    first, second, third = stage.client(ALICE), stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    server = next(iter(stage.mps.servers))
    stage.feed(inp.GateSaid(stage.now, link.FrontEnd(1, 0, f"terminate_client {server} {first.pid}", stage.now)))
    stage.feed(inp.GateSaid(stage.now, link.FrontEnd(1, ALICE, f"terminate_client {server} {second.pid}", stage.now)))
    stage.feed(
        inp.GateSaid(stage.now, link.FrontEnd(1, 0, f"terminate_client {server} {third.pid}", stage.now, refused=True))
    )
    for proc in (first, second, third):
        order(stage, proc)
    stage.run(2)
    asked = [a.pid for a in stage.actions(act.TerminateClient)]  # type: ignore[attr-defined]
    assert sorted(asked) == sorted([second.pid, third.pid])
    assert first.pid not in stage.procs


def test_a_restart_during_a_hook_sends_no_signal_to_a_working_client() -> None:
    """The flag of the hook that ran was kept as "MPS was asked": SIGTERM in the middle of a kernel hurt every neighbour
    on the server. The hook gets the rest of its deadline."""
    stage = Stage(HOOK + 'timeout = "30s"\n', together=True).up()
    stage.hook_takes = 20.0
    victim, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    began = stage.now
    order(stage, victim, at_once=False)
    stage.run(5)
    stage.kill_agent()
    stage.run(1)
    stage.start_agent()
    stage.run(40)
    hooks = stage.actions(act.RunHook)
    assert [one.deadline for one in hooks] == [30.0, pytest.approx(24.0, abs=0.1)]
    assert [name for _, name in steps(stage, began)][:2] == ["terminate", "SIGTERM"]
    assert steps(stage, began)[0][0] > 20.0, "the hook was cut short"
    assert victim.pid not in stage.procs
    assert stage.mps.hurt == set()
    assert stage.working(bob)


def test_a_restart_after_a_request_that_was_not_delivered_asks_mps() -> None:
    """It was kept as asked, and SIGTERM came first."""
    stage = Stage(PATIENT, together=True).up()
    victim, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    stage.front_end_fails = True
    began = stage.now
    order(stage, victim)
    stage.run(0.5)
    stage.kill_agent()
    stage.front_end_fails = False
    stage.start_agent()
    stage.run(5)
    assert [name for _, name in steps(stage, began)] == ["terminate", "terminate", "SIGTERM"]
    assert stage.mps.hurt == set()
    assert stage.working(bob)


def test_a_restart_after_the_answer_leaves_the_client_its_time() -> None:
    """Its work is still on the GPU, and no agent knows when MPS answered."""
    stage = Stage(PATIENT, together=True).up()
    stage.holds = False
    victim, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    began = stage.now
    order(stage, victim)
    stage.run(1)
    assert [name for _, name in steps(stage, began)] == ["terminate"]
    stage.kill_agent()
    stage.start_agent()
    stage.run(15)
    assert [name for _, name in steps(stage, began)] == ["terminate", "SIGTERM"]
    assert stage.mps.hurt == set()
    assert stage.working(bob)


def test_an_order_to_end_a_client_now_does_not_wait_for_its_hook() -> None:
    """It did nothing while the hook hung."""
    stage = Stage(HOOK + 'timeout = "60s"\n').up()
    stage.hook_takes = 60.0
    victim = stage.client(ALICE)
    stage.run(1)
    order(stage, victim, at_once=False)
    stage.run(2)
    began = stage.now
    order(stage, victim)
    stage.run(2)
    assert steps(stage, began)[0] == (0.0, "terminate")
    assert victim.pid not in stage.procs


def test_the_hook_comes_first_and_has_a_deadline() -> None:
    stage = Stage(HOOK).up()
    victim = stage.client(ALICE)
    stage.run(1)
    began = stage.now
    order(stage, victim, at_once=False)
    (hook,) = stage.actions(act.RunHook)
    assert isinstance(hook, act.RunHook)
    assert hook.subject["pid"] == victim.pid
    assert steps(stage, began) == []
    stage.run(1)
    assert victim.pid not in stage.procs


def test_a_client_that_leaves_by_itself_before_it_is_asked_is_left_in_peace() -> None:
    stage = Stage(HOOK).up()
    victim = stage.client(ALICE)
    stage.run(1)
    stage._do = lambda action: None  # type: ignore[method-assign]  # the hook takes its time
    order(stage, victim, at_once=False)
    del stage._do  # type: ignore[method-assign]
    stage.detaches(victim)
    stage.run(10)
    assert stage.actions(act.TerminateClient, act.SignalClient) == []
    assert victim.pid in stage.procs


def test_a_reused_pid_is_never_signalled() -> None:
    """The client dies while it climbs, and its number goes to another process of the same user."""
    stage = Stage(PATIENT).up()
    victim = stage.client(ALICE, stubborn=True)
    stage.client(ALICE)
    stage.run(1)
    order(stage, victim)
    stage.run(3)
    assert stage.actions(act.SignalClient)
    before = len(stage.actions(act.SignalClient))
    stage.ends(victim)
    again = stage.client(ALICE, pid=victim.pid)
    stage.run(20)
    assert len(stage.actions(act.SignalClient)) == before
    assert stage.working(again)


def test_a_late_word_of_an_end_is_not_taken_for_the_next_process_with_that_pid() -> None:
    stage = Stage(PATIENT).up()
    first = stage.client(ALICE)
    stage.run(1)
    stage.ends(first)
    again = stage.client(ALICE, pid=first.pid)
    stage.run(1)
    stage.feed(inp.ProcessEnded(stage.now, first.pid, first.start))
    assert stage.core is not None
    assert stage.core.state.clients[again.pid].peer.start == again.start


def test_who_never_passed_the_gate_cannot_be_ended() -> None:
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    stage.run(1)
    server = next(iter(stage.mps.servers))
    stage.forge(ev.ContextConnected(stage.now, server, 4242, 1))
    stage.feed(inp.EndOrdered(stage.now, 4242, 0, True))
    stage.run(10)
    assert stage.actions(act.TerminateClient, act.SignalClient) == []


@both
def test_where_the_logs_are_silent_mps_is_asked_first(shared: bool) -> None:
    """No line says where the client works: it is not taken for one that works nowhere."""
    stage = Stage(PATIENT, shared=shared, log_lag=lambda: None).up()
    neighbour, victim = stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    order(stage, victim)
    stage.run(3)
    assert victim.pid not in stage.procs
    assert stage.working(neighbour)
    assert stage.mps.hurt == set()
    assert stage.actions(act.TerminateClient)


@both
def test_a_client_without_a_context_needs_no_request(shared: bool) -> None:
    """MPS knows no such client (X8), and nothing of it is in flight: its own list says so, not only the log."""
    stage = Stage(PATIENT, shared=shared).up()
    idle = stage.client(ALICE, contexts=0)
    stage.run(1)
    began = stage.now
    order(stage, idle)
    stage.run(1)
    assert steps(stage, began) == [(0.0, "SIGTERM")]
    assert [a.servers for a in stage.actions(act.Reconcile) if "confirm" in a.reason] != []  # type: ignore[attr-defined]


def test_a_climb_stops_when_its_rule_is_enforced_no_longer() -> None:
    stage = Stage(POLICY).up()
    alice = stage.client(ALICE, stubborn=True)
    stage.run(1)
    stage.client(1002)
    stage.run(15.05)
    stage.reload("mode = 'report'\n" + POLICY)
    before = len(stage.actions(act.SignalClient))
    stage.run(60)
    assert len(stage.actions(act.SignalClient)) == before
    assert alice.pid in stage.procs


def test_new_clients_wait_until_it_is_known_whether_a_death_was_a_fault() -> None:
    """Programs that started within 0.2 s of the death of a client in a kernel were admitted, and lost by its fault."""
    stage = Stage(PATIENT, together=True).up()
    victim, bob = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    stage.ends(victim, killed=True)
    stage.run(0.05)
    late = stage.client(ALICE)
    stage.run(0.5)
    assert late.pid not in stage.served
    assert stage.core is not None
    (why,) = [one.why for one in waiting(stage.core.view(), stage.now)]
    assert why.word == "doubt"
    stage.run(0.5)
    assert stage.working(late)
    assert stage.working(bob)
    assert stage.served[late.pid] - stage.came[late.pid] < 0.8


def test_who_leaves_in_the_proper_way_holds_no_other_client_up() -> None:
    stage = Stage(PATIENT, together=True).up()
    first = stage.client(ALICE)
    stage.run(1)
    stage.ends(first)
    stage.run(0.05)
    second = stage.client(ALICE)
    stage.run(0.1)
    assert stage.working(second)


def test_the_user_of_a_client_that_dies_at_work_pays_for_the_wait_if_there_are_others() -> None:
    """One process that died again and again took 47 % of another user's, and 20 took 67 %."""
    stage = Stage(PATIENT, together=True).up()
    first, *crowd = [stage.client(ALICE) for _ in range(4)]
    stage.run(1)
    stage.ends(first, killed=True)
    stage.run(2)
    assert stage.actions(link.HeldUp) == []
    stage.client(BOB)
    stage.run(1)
    stage.gate_deaf = True
    stage.ends(crowd[0], killed=True)
    stage.run(0.2)
    stage.gate_deaf = False
    stage.ends(crowd[1], killed=True)
    stage.run(2)
    stage.ends(crowd[2])
    stage.run(2)
    told = stage.actions(link.HeldUp)
    assert {one.uid for one in told} == {ALICE}
    assert told[-1].seconds == pytest.approx(0.9, abs=0.02)


def test_a_client_that_does_not_answer_its_end_costs_its_user_the_time() -> None:
    """Two loops of one user held another user's programs up for 5 to 10 s each: start a client that does not answer
    terminate_client, order its end, again."""
    stage = Stage(PATIENT, together=True).up()
    alice = stage.client(ALICE, mute=True, stubborn=True)
    stage.client(BOB)
    stage.run(1)
    began = stage.now
    order(stage, alice)
    stage.run(60)
    assert alice.pid not in stage.procs
    paid = sum(one.seconds for one in stage.actions(link.HeldUp) if one.uid == ALICE)
    killed = next(at for at, one in stage.done if isinstance(one, act.SignalClient) and one.signal == signal.SIGKILL)
    assert paid >= killed - began > 5


def test_clients_that_die_one_after_the_other_hold_new_ones_up_for_a_bounded_time() -> None:
    stage = Stage(PATIENT, together=True).up()
    crowd = [stage.client(ALICE) for _ in range(20)]
    stage.run(1)
    for number, one in enumerate(crowd):
        stage.after(0.2 * number, lambda one=one: stage.ends(one, killed=True))  # type: ignore[misc]
    stage.run(0.1)
    bob = stage.client(BOB)
    stage.run(3.5)
    assert stage.working(bob)


def test_a_client_that_dies_a_while_after_another_one_holds_new_ones_up_as_well() -> None:
    """A world of habits (arrivals, seed 27): 3.6 s behind the first death new ones were not held, and one was lost."""
    stage = Stage(PATIENT, together=True).up()
    first, second = stage.client(ALICE), stage.client(ALICE)
    stage.client(BOB)
    stage.run(1)
    stage.ends(first, killed=True)
    stage.run(3.6)
    stage.ends(second, killed=True)
    stage.run(0.05)
    late = stage.client(ALICE)
    stage.run(0.5)
    assert late.pid not in stage.served
    stage.run(0.5)
    assert stage.working(late)
