"""Nothing hangs for ever: stopped and silent daemons and servers, quits, crash loops, servers that do not start."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mpsagent.core import actions as act
from mpsagent.core import hangs
from mpsagent.core import inputs as inp
from mpsagent.mps import events as ev
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, POLICY, Stage
from tests.core.toy import Proc, Server

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
KILLS = (act.KillServer, act.KillControl)


def server_of(stage: Stage) -> int:
    return next(iter(stage.mps.servers))


# --- stopped ----------------------------------------------------------------------------------------------------------


@both
def test_a_stopped_server_is_resumed_after_its_deadline(shared: bool) -> None:
    """Nobody asks it anything: it is seen all the same, and nobody loses work by SIGCONT."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.mps.servers[server_of(stage)].stopped = True
    began = stage.now
    stage.run(stage.policy.hang_control + 2)
    (resumed,) = stage.times(act.Resume)
    assert began + stage.policy.hang_control <= resumed <= began + stage.policy.hang_control + 1.1
    assert stage.actions(*KILLS) == []
    assert stage.working(alice)


def test_a_server_that_stays_stopped_is_killed_and_the_next_user_served() -> None:
    stage = Stage(PATIENT).up()
    stage.mps.never_resumes = True
    alice = stage.client(ALICE)
    stage.run(1)
    stage.mps.servers[server_of(stage)].stopped = True
    bob = stage.client(BOB)
    stage.run(20)
    stage.ends(alice)
    stage.run(5)
    assert stage.working(bob)
    assert len(stage.actions(act.KillServer)) == 1
    assert stage.actions(act.KillControl) == []


@pytest.mark.parametrize("how", ["command fails", "refuses", "no answer"])
def test_a_server_that_never_makes_way_is_killed_after_its_deadline_and_the_next_user_served(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its turn is over and no client is at work there; `shutdown_server` comes to nothing all the same."""
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    server = server_of(stage)

    def shutdown(_server: object, *, force: bool = False) -> None:
        stage.forge(ev.ShutdownTried(stage.now, server))
        if how == "refuses":
            stage.forge(ev.ShutdownRefused(stage.now, server))

    monkeypatch.setattr(stage.mps, "shutdown", shutdown)
    stage.front_end_fails = how == "command fails"
    stage.ends(alice)
    ended = stage.now
    stage.run(hangs.EXIT + 3 * hangs.NEXT_STEP)
    assert stage.working(bob)
    (killed,) = stage.times(act.KillServer)
    assert killed >= ended + (hangs.IDLE_EXIT if how == "no answer" else hangs.EXIT)
    assert stage.actions(act.KillControl) == []


def test_who_works_on_a_server_without_having_passed_the_gate_has_as_long_as_a_turn() -> None:
    """A gate and its keeper were killed with all they knew."""
    stage = Stage(POLICY).up()
    alice = stage.client(ALICE)
    stage.run(1)
    server = server_of(stage)
    stage.forge(ev.ContextConnected(stage.now, server, 7777, 1))
    stage.mps.servers[server].clients[7777] = Proc(7777, ALICE, 1)
    stage.ends(alice)
    stage.run(1)
    bob, came = stage.client(BOB), stage.now
    stage.run(20)
    assert stage.working(bob)
    (killed,) = stage.times(act.KillServer)
    assert killed >= came + 15, "its `after` and `grace`, as the policy says"


@pytest.mark.parametrize(("shared", "whose"), [(False, ""), (True, " of all users")], ids=["own", "shared"])
def test_a_reason_names_no_user_where_none_is_known(shared: bool, whose: str) -> None:
    """The server's own log was read first, and the front-end does not answer."""
    stage = Stage(PATIENT, shared=shared).up()
    stage.front_end_fails = True
    stage.forge(ev.ServerStopping(stage.now, 5555))
    stage.run(60)
    reasons = [one.reason for one in stage.actions(act.KillServer)]
    assert reasons[0] == f"server 5555{whose} does not exit: SIGKILL to server 5555"


def test_a_hand_over_that_stands_still_is_the_gates_to_end_before_a_server_is_killed() -> None:
    """MPS answers nobody until that client has met its server, and the policy has little patience."""
    stage = Stage(PATIENT + '[timeouts]\ncontrol_daemon = "0.5s"\n').up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    stage.run(0.1)
    assert stage.core is not None
    (held,) = stage.core.state.held.line(BOB)
    stage.feed(
        inp.GateSaid(stage.now, link.Handing(held.connection, 0, 0, stage.now)), inp.DaemonSilent(stage.now, True)
    )
    stage.run(7.2)
    assert stage.actions(*KILLS) == []
    assert stage.working(alice)
    stage.run(20)
    assert stage.actions(*KILLS) != [], "not for ever"


def test_a_stopped_daemon_that_nobody_asks_is_resumed_after_its_deadline() -> None:
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    stage.run(1)
    stage.mps.stopped = True
    began = stage.now
    stage.run(stage.policy.hang_control + 2)
    (resumed,) = stage.times(act.Resume)
    assert resumed >= began + stage.policy.hang_control
    assert stage.actions(*KILLS) == []


@both
def test_no_server_is_killed_while_the_gate_is_stopped_in_a_hand_over(shared: bool) -> None:
    """MPS waits for the gate then, which systemd ends within 12 s; the next one goes on (tests.world, hour 3000623)."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.client(ALICE, hollow=13.0)
    stage.run(0.1)
    stage.gate.stopped = True
    stage.feed(inp.DaemonSilent(stage.now, True))
    stage.run(13)
    assert stage.actions(*KILLS) == []
    assert stage.working(alice)


def rebuilding(stage: Stage) -> tuple[Server, Proc]:
    """A server after a fault, whose last client has gone and which answers nothing; and who waits for it."""
    alice = stage.client(ALICE)
    stage.run(1)
    server = stage.mps.servers[server_of(stage)]
    stage.mps.fault(server)
    stage.run(0.1)
    more = stage.client(ALICE)
    stage.ends(alice)
    server.ready = False
    return server, more


@both
def test_a_server_that_rebuilds_its_context_after_a_fault_has_the_time_of_one_that_starts(shared: bool) -> None:
    """On an H200 with six faulting servers the driver made no context for 14 s after a fault, and the control daemon
    answered nothing; both were killed as hung, and the new server took 13 s more (disorder-apart-434.txt)."""
    stage = Stage(PATIENT, shared=shared).up()
    server, more = rebuilding(stage)
    stage.run(stage.policy.hang_control + 8)
    assert stage.actions(act.Resume, *KILLS) == []
    server.ready = True
    stage.run(15)
    assert stage.working(more)
    assert stage.actions(act.Resume, *KILLS) == []


@both
def test_one_that_is_never_done_with_it_is_killed(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    _, more = rebuilding(stage)
    stage.run(stage.policy.hang_server + 15)
    assert len(stage.actions(act.KillServer)) == 1
    assert stage.working(more)


def test_a_daemon_that_goes_on_by_itself_is_left_alone() -> None:
    """A debugger, say: the clock of the hang starts anew with each stop."""
    stage = Stage(PATIENT).up()
    for _ in range(5):
        stage.mps.stopped = True
        stage.run(stage.policy.hang_control - 3)
        stage.mps.stopped = False
        stage.run(3)
    assert stage.actions(act.Resume, act.KillControl) == []


@both
def test_a_stopped_daemon_is_killed_if_need_be_and_who_waits_is_served_by_the_next(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    stage.mps.never_resumes = True
    stage.mps.stopped = True
    bob = stage.client(BOB)
    stage.run(45)
    kinds = [type(a) for a in stage.actions(act.Resume, *KILLS)]
    assert kinds[0] is act.Resume
    assert kinds.count(act.KillControl) == 1
    assert stage.working(bob)
    assert stage.gate.turned_away == []


@both
def test_an_agent_that_has_just_started_kills_nothing_as_idle(shared: bool) -> None:
    """Before the gate has said who is there, nobody is known to be at work."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    server = server_of(stage)
    stage.forge(ev.ShutdownTried(stage.now, server), ev.ServerStuck(stage.now, server))
    stage.kill_agent()
    stage.run(30)
    stage.start_agent()
    stage.run(60)
    assert stage.working(alice)
    assert stage.actions(*KILLS) == []


# --- quit -------------------------------------------------------------------------------------------------------------


def test_a_quit_that_does_not_end_is_ended() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.mps.quit = lambda timeout: setattr(stage.mps, "quitting", True)  # type: ignore[method-assign]
    stage.mps.quit(5)
    stage._log(ev.QuitIssued(stage.now, 5))
    stage.run(5 + 10 - 0.5)
    assert stage.actions(act.KillControl) == []
    stage.run(6)
    assert len(stage.actions(act.KillControl)) == 1
    assert stage.mps.control
    assert alice


def test_a_quit_that_only_a_line_tells_of_ends_nothing() -> None:
    """Whoever answers does not quit. Meanwhile everybody is held, for a second."""
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.forge(ev.QuitIssued(stage.now, 1))
    second = stage.client(ALICE)
    stage.run(2)
    assert stage.working(second)
    stage.run(60)
    assert stage.working(alice)
    assert stage.actions(*KILLS) == []


@pytest.mark.parametrize("named", [True, False])
def test_a_plain_quit_may_wait_for_its_clients_as_long_as_they_work(named: bool) -> None:
    """Also where no line of the logs names them, so that the server looks idle: it used to be killed."""
    stage = Stage(PATIENT, named=named).up()
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


# --- crash loops ------------------------------------------------------------------------------------------------------


def test_a_crash_loop_backs_off_and_ends_in_a_clear_failure() -> None:
    stage = Stage(PATIENT)
    stage.start_fails = True
    stage.start_agent()
    held = stage.client(ALICE)
    stage.run(100)
    assert stage.gate.turned_away == []  # held, while it is tried
    stage.run(500)
    pauses = [b - a for a, b in pairwise(stage.times(act.StartControl))]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32] + [60] * (len(pauses) - 6), abs=0.1)
    assert len(pauses) > hangs.GIVE_UP_AFTER
    (failed,) = stage.reports("control.failed")
    assert "once a minute" in failed.reason
    assert stage.gate.turned_away == [held.pid]
    late = stage.client(BOB)
    stage.run(1)
    assert stage.gate.turned_away == [held.pid, late.pid]  # with its CUDA error, at once
    stage.start_fails = False
    stage.feed(inp.RestartOrdered(stage.now, 0))
    third = stage.client(BOB)
    stage.run(2)
    assert stage.working(third)


def test_what_has_mended_by_itself_needs_no_person() -> None:
    """A full disk that was emptied after some minutes: users were refused until somebody ordered a restart."""
    stage = Stage(PATIENT)
    stage.start_fails = True
    stage.start_agent()
    refused = stage.client(ALICE)
    stage.run(300)
    assert stage.gate.turned_away == [refused.pid]
    stage.start_fails = False
    stage.run(hangs.BACKOFF_MOST + 1)
    client = stage.client(BOB)
    stage.run(2)
    assert stage.working(client)
    assert stage.core is not None
    assert not stage.core.engines[None].memories.hangs.failed


def test_a_restart_that_is_ordered_while_a_daemon_starts_starts_no_second_one() -> None:
    """Found by the world (orders 740001155): without systemd two ran at once, and the first was never seen again."""
    stage = Stage(PATIENT)
    stage.start_agent()
    stage.run(0.02)
    assert stage.times(act.StartControl)
    assert not stage.mps.control
    stage.feed(inp.RestartOrdered(stage.now, 0))
    stage.run(5)
    assert len(stage.times(act.StartControl)) == 1
    assert stage.mps.control


# --- servers that do not start ----------------------------------------------------------------------------------------


def start_fails(stage: Stage) -> None:
    """MPS tries six times for a waiting client, then closes on it (recording 09)."""
    mps = stage.mps
    mps.can_start = False

    def serve(proc: object, done: object, until: float) -> None:
        for _ in range(6):
            pid = next(mps.pids)
            mps.log(ev.ServerStarting(stage.now, pid, ALICE))
            mps.log(ev.ServerFailed(stage.now, pid, "Driver initialization failed with: 999"))
            mps.log(ev.ServerExited(stage.now, pid, 1))
        stage.after(1.0, lambda: done(False))  # type: ignore[operator]

    mps.serve = serve  # type: ignore[method-assign, assignment]


def test_servers_that_do_not_start_are_not_tried_without_end_and_the_reason_is_said() -> None:
    stage = Stage(PATIENT).up()
    serve = stage.mps.serve
    start_fails(stage)
    first = stage.client(ALICE)
    stage.run(60)
    (given_up,) = stage.reports("server.given_up")
    assert "Driver initialization failed with: 999" in given_up.reason
    assert stage.gate.turned_away == [first.pid]
    starts = [line.at for line in stage.lines[None] if line.what is ev.ServerStarting]
    assert len(starts) == 18
    assert starts[12] - starts[11] >= 2, "the second pause is of 2 s; a round takes one"
    stage.mps.serve = serve  # type: ignore[method-assign]
    stage.mps.can_start = True
    stage.run(60)  # tried again from time to time
    second = stage.client(ALICE)
    stage.run(3)
    assert stage.working(second)


def test_starts_that_only_lines_tell_of_turn_nobody_away() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    for pid in range(7000, 7100):
        stage.forge(ev.ServerStarting(stage.now, pid, ALICE), ev.ServerExited(stage.now, pid, 1))
    second = stage.client(ALICE)
    stage.run(5)
    assert stage.gate.turned_away == []
    assert stage.working(alice)
    assert stage.working(second)


# --- asking -----------------------------------------------------------------------------------------------------------


@both
def test_the_daemon_is_asked_rarely_while_nothing_happens(shared: bool) -> None:
    """Each question writes five lines into the log that is read."""
    stage = Stage(PATIENT, shared=shared).up()
    stage.client(ALICE)
    stage.run(1)
    before, ticks = len(stage.done), stage.ticks
    stage.run(3600)
    asked = [a for _, a in stage.done[before:]]
    assert all(isinstance(a, act.Reconcile) for a in asked)
    assert 10 <= len(asked) <= 60
    assert stage.ticks - ticks <= 60


# --- enforcement ------------------------------------------------------------------------------------------------------

CHANGES = (
    act.ShutdownServer, act.TerminateClient, act.SignalClient, act.SignalHeld, act.KillServer, act.KillControl,
    act.Resume, act.QuitControl, act.RunHook,
)  # fmt: skip


def test_hangs_may_be_reported_only() -> None:
    stage = Stage("mode = 'report'\n" + PATIENT).up()
    stage.client(ALICE)
    stage.run(1)
    next(iter(stage.daemons[ALICE].servers.values())).stopped = True
    stage.run(300)
    assert stage.actions(*CHANGES) == []
    assert [a for _, a in stage.done if isinstance(a, act.KillServer)]


def test_without_enforcement_nothing_is_changed() -> None:
    """All users work at once, whatever the policy says. A fault and a limit of time are only reported."""
    text = "mode = 'report'\n" + POLICY + '[user.carol]\nmax_runtime = "1s"\n[instance.gpu]\nsharing = "turns"\n'
    stage = Stage(text, together=True).up()
    carol = stage.client(CAROL)
    stage.run(3)
    alice = stage.client(ALICE, stubborn=True)
    stage.run(60)
    assert stage.working(carol)
    assert stage.working(alice)
    daemon = stage.daemons[ALICE]
    daemon.fault(next(iter(daemon.servers.values())))
    stage.run(60)
    assert [a for a in stage.actions(*CHANGES) if not (isinstance(a, act.ShutdownServer) and not a.force)] == []
    assert stage.reports("client.over")
    assert stage.gate.turned_away == []
