"""FAULT ends by itself, nobody is refused meanwhile, and who is not part of it is left alone."""

from __future__ import annotations

import pytest

from mpsagent.agent.conditions import Conditions, note_conditions, note_daemon
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.model import Status
from mpsagent.mps import events as ev
from mpsagent.policy.identity import Identity
from mpsagent.snapshot.condition import problems
from tests.core.harness import ALICE, BOB, PATIENT, Stage

TRIAL = '[limits]\nactive_threads = "30%"\nmemory_limit = "10G"\n[turn]\ntime_limit = "1h"\n'
both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


def fault(stage: Stage) -> None:
    daemon = next(one for one in stage.daemons.values() if one.servers)
    daemon.fault(next(iter(daemon.servers.values())))


@both
def test_who_comes_is_held_and_served_when_it_is_over(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    fault(stage)
    stage.run(0.1)
    more = [stage.client(ALICE) for _ in range(3)]
    stage.run(5)
    assert not any(stage.working(one) for one in more)
    assert stage.mps.refused == []
    assert stage.gate.turned_away == []
    stage.ends(alice)
    stage.run(1)
    assert all(stage.working(one) for one in more)
    assert stage.actions(act.SignalClient, act.ShutdownServer) == []


@both
def test_a_leftover_that_ignores_its_error_ends_after_its_time(shared: bool) -> None:
    """fault_recovery (15 s), SIGTERM, sigkill_delay (5 s), SIGKILL; no terminate_client, it would block the daemon."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE, stubborn=True)
    stage.run(1)
    fault(stage)
    stage.run(14.9)
    assert stage.actions(act.SignalClient) == []
    stage.run(5.3)
    assert alice.pid not in stage.procs
    assert stage.actions(act.TerminateClient) == []
    assert stage.core is not None
    assert next(iter(stage.core.state.servers.values())).status is Status.ACTIVE
    again = stage.client(ALICE)
    stage.run(0.2)
    assert stage.working(again)


@both
def test_a_fault_at_the_very_change_of_user(shared: bool) -> None:
    """It never recovers, though its clients have gone: it is asked, then ended by force; the next user is served."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    fault(stage)
    server = next(iter(stage.mps.servers.values()))
    server.sticky.add(0)  # it does not recover
    stage.ends(alice)
    stage.run(12)
    assert stage.working(bob)
    forced = [a for a in stage.actions(act.ShutdownServer) if a.force]  # type: ignore[attr-defined]
    assert len(forced) == (1 if shared else 0)  # one of its own is asked to make way anyhow
    assert stage.mps.refused == []


def test_a_server_that_stays_in_fault_is_forced_at_a_bounded_rate() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    fault(stage)
    stage.run(1)
    next(iter(stage.mps.servers.values())).sticky.add(0)
    shutdown = stage.mps.shutdown
    stage.mps.shutdown = lambda server, force=False: None  # type: ignore[method-assign]
    stage.ends(alice)
    stage.run(100)
    assert 3 <= len(stage.actions(act.ShutdownServer)) <= 5
    stage.mps.shutdown = shutdown  # type: ignore[method-assign]
    stage.run(31)
    again = stage.client(ALICE)
    stage.run(1)
    assert stage.working(again)


@both
def test_a_fault_that_only_a_line_tells_of_ends_nobody(shared: bool) -> None:
    """It holds the gate for a moment, until MPS has been asked."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    server = next(iter(stage.mps.servers))
    stage.forge(
        ev.FaultStarted(stage.now, server), ev.FaultDevice(stage.now, server, 0),
        ev.FaultClient(stage.now, server, alice.pid),
    )  # fmt: skip
    second = stage.client(ALICE)
    stage.run(1)
    assert stage.working(second)
    stage.run(60)
    assert stage.working(alice)
    assert stage.actions(act.SignalClient, act.TerminateClient) == []


def test_a_line_that_names_a_neighbour_does_not_get_him_signalled_first() -> None:
    """Without a fault "sticky" means nothing: who is to be ended is asked like any other client."""
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    victim = stage.client(ALICE)
    stage.run(1)
    server = next(iter(stage.mps.servers))
    stage.forge(ev.FaultClient(stage.now, server, victim.pid))
    stage.feed(inp.EndOrdered(stage.now, victim.pid, 0, True))
    stage.run(2)
    assert stage.mps.hurt == set()
    assert victim.pid not in stage.procs


@both
def test_a_fault_while_a_turn_is_ending(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    stage.client(ALICE, stubborn=True)
    stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(15.001)
    fault(stage)
    stage.run(25)
    assert stage.working(bob)


@pytest.mark.parametrize("together", [False, True], ids=["turns", "together"])
@pytest.mark.parametrize("where", ["[user.alice]\nmode = 'report'\n", "[group.trial]\nmode = 'report'\n"])
def test_a_user_on_trial_does_not_hold_up_all_others_with_a_fault(where: str, together: bool) -> None:
    """One user's `mode = 'report'` is about that user's limits and turns. A server in FAULT serves nobody."""
    stage = Stage(TRIAL + where, together=together)
    stage.identities[ALICE] = Identity(ALICE, "alice", ("trial",))
    stage.up()
    alice = stage.client(ALICE, stubborn=True)
    stage.run(1)
    fault(stage)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(15 + 5 + 5)
    assert alice.pid not in stage.procs
    assert stage.working(bob)


@pytest.mark.parametrize("where", ["mode = 'report'\n"])
def test_a_fault_that_nothing_ends_is_reported_once_and_is_a_problem(where: str) -> None:
    """It was silent: `status` said that the policy is not enforced, and `queue` named the fault for an hour."""
    stage = Stage(f"{where}{TRIAL}", together=True).up()
    alice = stage.client(ALICE, stubborn=True)
    stage.run(1)
    fault(stage)
    stage.run(1)
    stage.client(BOB)
    stage.run(600)
    assert alice.pid in stage.procs
    (report,) = stage.reports("client.over")
    assert (report.pid, report.rule) == (alice.pid, "timeouts.fault_recovery")
    assert "does not enforce this" in report.reason
    assert stage.core is not None
    told = []
    for lane in stage.core.engines:
        conditions = Conditions()
        note_daemon(conditions, stage.core, lane, stage.now)
        told += problems(conditions.all())
    (found,) = [one for one in told if "FAULT" in one.what]
    assert f"client {alice.pid} of uid {ALICE}" in found.what


def test_a_fault_is_no_problem_while_it_is_being_ended() -> None:
    stage = Stage(TRIAL, together=True).up()
    stage.client(ALICE, stubborn=True)
    stage.run(1)
    fault(stage)
    assert stage.core is not None
    conditions = Conditions()
    for _ in range(25):
        stage.run(1)
        note_conditions(conditions, stage.core, stage.now)
        assert problems(conditions.all()) == []


def test_the_forced_end_of_a_server_is_reported_once_where_hangs_are_only_reported() -> None:
    stage = Stage(f"mode = 'report'\n{TRIAL}").up()
    alice = stage.client(ALICE)
    stage.run(1)
    fault(stage)
    stage.run(1)
    next(iter(stage.daemons[ALICE].servers.values())).sticky.add(0)
    stage.ends(alice)
    stage.run(600)
    assert len([one for _, one in stage.done if isinstance(one, act.ShutdownServer) and one.force]) == 1
