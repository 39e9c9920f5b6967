"""Processes that MPS has and the gate has not seen: they came through another one (recording 12, H1)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from mpsagent.core import actions as act
from mpsagent.core import confirmation, relayed
from mpsagent.core import inputs as inp
from mpsagent.core.model import NAMED_FOR, Client, Gate, State
from mpsagent.core.reduce import reduce
from mpsagent.core.view import View
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from mpsagent.policy.shares import Lease, Share
from mpsagent.policy.values import Percent
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, TOGETHER, Stage
from tests.core.toy import Proc


def client(stage: Stage, proc: Proc) -> Client | None:
    assert stage.core is not None
    return stage.core.state.clients.get(proc.pid)


def at_work(stage: Stage, uid: int = ALICE, **how: bool) -> Proc:
    proc = stage.client(uid)
    stage.run(3)
    assert stage.working(proc)
    return proc


def test_mps_itself_makes_it_a_client_and_not_a_line() -> None:
    """Nobody is one by a line, however often it comes: not a process that is not there, nor one that MPS does not
    list."""
    stage = Stage(PATIENT, shared=True).up()
    first = at_work(stage)
    assert first.server is not None
    innocent = Proc(77, BOB, 3)
    stage.procs[77] = innocent
    for _ in range(20):
        lines = [ev.ContextConnected(stage.now, first.server.pid, pid, n) for pid in (77, 78) for n in (0, 1)]
        stage.forge(*lines)
        stage.run(1)
    assert client(stage, innocent) is None
    assert stage.actions(act.TerminateClient, act.SignalClient) == []
    real = stage.relayed(ALICE, first)
    stage.run(1)
    found = client(stage, real)
    assert found is not None
    assert found.unseen
    assert found.server == first.server.pid


SEEN = inp.Seen(1000.4, BOB, 3, 999.0)


def found(*answers: tuple[float, inp.Seen | None]) -> list[act.Action]:
    """Whom the gate is told of when MPS lists process 77 in each of these answers, by when they were asked."""
    stage = Stage(PATIENT, shared=True).up()
    server = at_work(stage).server
    assert server is not None
    assert stage.core is not None
    start, state, memory = stage.now - 1000, stage.core.state, relayed.Memory()
    state, _ = reduce(state, ev.ContextConnected(start + 1000, server.pid, 77, 1))
    actions: list[act.Action] = []
    for asked, seen in answers:
        seen = seen and seen._replace(at=start + seen.at, born=start + seen.born)
        listed = inp.ClientsListed(start + asked, server.pid, frozenset({77}), {} if seen is None else {77: seen})
        state, _ = reduce(state, listed)
        decision = relayed.decide(View(state), memory, stage.now)
        memory = decision.memory
        actions += decision.actions
    return actions


def test_who_is_listed_before_and_after_the_kernel_showed_it_is_told_to_the_gate() -> None:
    (one,) = found((1000.3, SEEN), (1000.5, SEEN._replace(at=1000.6)))
    assert isinstance(one, act.TellGate)
    assert isinstance(one.message, link.Found)
    assert (one.message.pid, one.message.uid, one.message.start) == (77, BOB, 3)
    again = found((1000.3, SEEN), (1000.5, SEEN._replace(at=1000.6)), (1000.9, SEEN._replace(at=1001)))
    assert len(again) == 2, "the gate may have been another one"


@pytest.mark.parametrize(
    "second",
    [
        (1000.3, SEEN),
        (1000.4, SEEN._replace(at=1000.6)),
        (1000.5, None),
        (1000.5, SEEN._replace(at=1000.6, start=4)),
        (1000.5, SEEN._replace(at=1000.6, uid=ALICE)),
        (1000.5, SEEN._replace(at=1000.6, born=1000.1)),
    ],
    ids=["once", "asked before it was seen", "gone", "another process", "another user", "younger than its line"],
)
def test_who_is_not_surely_the_one_that_mps_means_is_not(second: tuple[float, inp.Seen | None]) -> None:
    first = (1000.3, SEEN)
    assert found(*dict.fromkeys([first, second])) == []


def test_who_the_gate_has_not_told_of_yet_is_not_asked_about() -> None:
    """A daemon that was just adopted has clients whom the gate still has to name."""
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    stage.run(1)
    assert stage.core is not None
    state = stage.core.state
    assert state.gate is not None
    state, _ = reduce(state, ev.ContextConnected(stage.now, next(iter(state.servers)), 77, 1))
    met = replace(state, gate=replace(state.gate, synced=False))

    def asked(state: State) -> bool:
        made = confirmation.decide(View(state), confirmation.Memory(), stage.now + 10).actions
        return any("process 77" in one.reason for one in made)

    assert asked(state)
    assert not asked(met)


def test_the_next_user_of_the_number_is_not_taken_for_the_one_that_was_seen() -> None:
    assert found((1000.3, SEEN._replace(born=1000.1)), (1000.5, SEEN._replace(at=1000.6, born=1000.1))) == []


def test_it_has_the_limits_of_the_process_that_it_came_through() -> None:
    """MPS has set those, also where the policy has changed since; where it is not known who that was, its user's."""
    stage = Stage(PATIENT, shared=True).up()
    first, before = at_work(stage), stage.limits(ALICE)
    assert first.server is not None
    stage.log_lag = lambda: None
    carrier = stage.client(ALICE)
    stage.run(0.5)
    stage.mps.leave(carrier)  # it never had anything, and no line names it
    stage.log_lag = lambda: 0.002
    stage.reload(stage.text.replace("active_threads = '60%'", "active_threads = '10%'"))
    assert stage.limits(ALICE) != before
    through = stage.relayed(ALICE, first)
    stage.run(NAMED_FOR + 3)
    later = stage.relayed(ALICE, first)
    stage.run(1)
    told = {one.pid: one.limits for one in stage.actions(link.Found)}
    assert told == {through.pid: before, later.pid: None}, "limits that are not known are not guessed"


def test_the_next_gate_gets_no_limits_of_a_client_whose_limits_are_not_known() -> None:
    stage = Stage(PATIENT, shared=True).up()
    first = at_work(stage)
    stage.kill_agent()
    for again in range(2):
        stage.gate.restarts(forgets=True)
        if again:
            stage.cut_link()
            stage.connect()
        else:
            stage.start_agent()
        stage.run(5)
    assert len(stage.actions(link.Found)) == 2
    found, named = stage.actions(link.Found)
    assert found.pid == named.pid == first.pid
    assert (named.limits, named.most) == (None, None)


def carrier(stage: Stage, uid: int) -> Proc:
    """A process that passed the gate and has no context: others came through it."""
    stage.log_lag = lambda: None
    one = stage.client(uid)
    stage.run(0.5)
    stage.mps.leave(one)
    stage.log_lag = lambda: 0.002
    return one


@pytest.mark.parametrize(
    ("second", "since", "given"),
    [(10.0, 9.0, Limits(10.0)), (20.0, 9.0, None), (10.0, 0.0, None)],
    ids=["alike", "different", "they came later"],
)
def test_of_several_that_it_may_have_come_through_those_of_its_user_count(
    second: float, since: float, given: Limits | None
) -> None:
    """With different limits it is not known which of them it has, nor if they came later than it: gate and agent were
    installed again, and a client of before had the limits of the newcomer beside it."""
    clients = {pid: Client(inp.Peer(pid, uid, uid, 1), float(pid), limits=Limits(threads))
               for pid, uid, threads in ((1, ALICE, 10.0), (2, ALICE, second), (3, BOB, 50.0))}  # fmt: skip
    state = SimpleNamespace(clients=clients, server_of=lambda pid: None)
    view = cast("View", SimpleNamespace(shares=False, state=state, name="gpu"))
    assert relayed._found(view, 77, SEEN._replace(uid=ALICE), since).limits == given


def test_it_is_asked_about_rarely() -> None:
    """A line that names whom MPS does not list: each question writes into the log that is read."""
    stage = Stage(PATIENT, shared=True).up()
    first = at_work(stage)
    assert first.server is not None
    before = len(stage.actions(act.Reconcile))
    for _ in range(100):
        stage.forge(ev.ContextConnected(stage.now, first.server.pid, 77, 1))
        stage.run(0.1)
    assert 1 <= len(stage.actions(act.Reconcile)) - before <= 40


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_its_turn_is_its_users_turn(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    hers = stage.relayed(ALICE, at_work(stage))
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(18)  # after, grace and a little
    assert stage.working(bob)
    assert hers.pid not in stage.procs
    assert [one.pid for one in stage.actions(act.TerminateClient) if one.pid == hers.pid]
    assert stage.mps.hurt == set()


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_who_comes_in_another_users_turn_is_ended(shared: bool) -> None:
    """With a descriptor that was got in a turn of hers and kept for later, or on his own server, through his relay."""
    stage = Stage(PATIENT, shared=shared).up()
    bob = at_work(stage, BOB)
    hers = stage.relayed(ALICE, bob)
    stage.run(3)
    assert hers.pid not in stage.procs
    assert stage.working(bob)
    (asked,) = [one for one in stage.actions(act.TerminateClient) if one.pid == hers.pid]
    assert f"it is the turn of user {BOB}" in asked.reason
    assert stage.mps.hurt == set()


APART, DENY = '[instance.gpu]\nsharing = "per-user"\n', f'{TOGETHER}[user.carol]\naccess = "deny"\n'


@pytest.mark.parametrize(
    ("more", "why", "enforce"),
    [(DENY, "in the policy for user", True), (DENY, "in the policy for user", False), (APART, "own", True)],
    ids=["denied", "only told", "apart"],
)
def test_who_the_policy_denies_or_whose_daemon_it_is_not_is_ended(more: str, why: str, enforce: bool) -> None:
    """Through another user's process; where nothing is enforced it is only told."""
    stage = Stage(f"mode = '{'enforce' if enforce else 'report'}'\n{PATIENT}{more}", together=True)
    stage.start_agent()
    stage.run(1)
    bob = at_work(stage, BOB)
    hers = stage.relayed(CAROL, bob)
    stage.run(5)
    told = stage.actions(act.TerminateClient) if enforce else stage.reports("client.over")
    assert [(one.pid, why in one.reason) for one in told] == [(hers.pid, True)]
    assert (hers.pid in stage.procs) is not enforce
    assert stage.working(bob)


def test_who_was_at_work_before_the_gate_was_is_taken_over() -> None:
    """mpsagent was taken away and comes again, and the gate knows nobody: a wrong end is worse than a late one."""
    stage = Stage(PATIENT, shared=True).up()
    first, other = at_work(stage), stage.client(ALICE)
    stage.run(1)
    stage.kill_agent()
    stage.gate.restarts(forgets=True)
    stage.overlaps = True
    stage.start_agent()
    stage.run(5)
    for one in (first, other):
        found = client(stage, one)
        assert found is not None, one
        assert found.unseen
    bob = stage.client(BOB)
    stage.run(30)
    assert stage.actions(act.TerminateClient, act.SignalClient) == []
    assert not stage.working(bob)


@pytest.mark.parametrize("log_is_there", [True, False], ids=["by its log", "its log has gone"])
def test_nobody_is_let_in_beside_whom_mps_still_has_from_before_the_gate(log_is_there: bool) -> None:
    """World, day machine, seed 14: bob was let in up to 2 s before MPS was asked who works there."""
    stage = Stage(PATIENT, shared=True).up()
    alice = at_work(stage)
    stage.kill_agent()
    stage.gate.restarts(forgets=True)
    if not log_is_there:
        stage.lines.clear()
    bob = stage.client(BOB)
    stage.start_agent()
    stage.run(5)
    assert not stage.given(bob)
    assert client(stage, alice) is not None
    stage.ends(alice)
    stage.run(2)
    assert stage.working(bob)


def test_who_was_at_work_before_is_not_ended_though_another_came_first() -> None:
    """bob passes because MPS does not say in time who is there: alice is no latecomer."""
    stage = Stage(PATIENT, shared=True).up()
    first = at_work(stage)
    stage.kill_agent()
    stage.gate.restarts(forgets=True)
    stage.overlaps = True
    bob = stage.client(BOB)
    stage.front_end_fails = True
    stage.start_agent()
    stage.run(stage.policy.hang_control + 1)
    stage.front_end_fails = False
    stage.run(10)
    assert stage.working(bob)
    assert client(stage, first) is not None
    assert stage.actions(act.TerminateClient, act.SignalClient) == []


def test_the_process_that_they_came_through_is_released_once_mps_says_that_it_has_no_context() -> None:
    stage = Stage(PATIENT, shared=True).up()
    first = at_work(stage)
    assert first.server is not None
    stage.log_lag = lambda: None
    carrier = stage.client(ALICE)
    stage.run(0.5)
    stage.mps.leave(carrier)  # it never had anything, and no line names it
    stage.log_lag = lambda: 0.002
    assert stage.core is not None
    stage.relayed(ALICE, first)
    assert client(stage, carrier) is not None
    stage.run(NAMED_FOR + 3)
    assert client(stage, carrier) is None
    assert stage.working(first)
    assert [one.pid for one in stage.actions(link.Release)] == [carrier.pid]


@pytest.mark.parametrize("job", [False, True], ids=["user", "job"])
def test_the_youngest_beyond_a_total_is_ended_and_nobody_who_passed_the_gate(job: bool) -> None:
    own = "" if job else "total_active_threads = '80%'\n"
    stage = Stage(PATIENT + f"[user.carol]\nactive_threads = '40%'\n{own}", together=True).up()
    if job:
        share = Share("lease 1", total_threads=Percent(80.0), job="slurm-17")
        stage.feed(inp.LeaseOrdered(stage.now, Lease(1, share, stage.now, stage.now + 99, 0, 1003, name="slurm-17")))
    first = at_work(stage, 1003)
    carrier(stage, 1003)
    older, younger = stage.relayed(1003, first), stage.relayed(1003, first)
    stage.run(3)
    assert stage.working(first)
    (asked,) = stage.actions(act.TerminateClient)
    assert (asked.pid, asked.rule) == (
        younger.pid,
        "lease 1.total_active_threads" if job else "user.carol.total_active_threads",
    )
    assert older.pid in stage.procs


def test_a_place_that_was_given_on_a_moment_before_the_end_is_heard_of_is_nobodys_fault() -> None:
    """The gate let the next one in as soon as the process before had ended; an innocent one was ended for that."""
    stage = Stage(PATIENT + "[user.carol]\nmax_clients = 2\n", together=True).up()
    first = at_work(stage, 1003)
    for _ in range(2):
        stage.relayed(1003, first)
    while len(stage.core.state.clients) < 3:
        stage.run(0.1)
    state, now, memory = stage.core.state, stage.now, relayed.Memory()
    decision = relayed.decide(View(state), memory, now)
    assert (decision.requests, decision.wake) == ((), now + relayed.BEYOND_FOR)
    late = relayed.decide(View(state), decision.memory, now + relayed.BEYOND_FOR)
    assert len(late.requests) == 1
    assert first.server is not None
    state, _ = reduce(state, inp.ProcessEnded(now, first.pid, first.start))
    heard = relayed.decide(View(state), decision.memory, now + relayed.BEYOND_FOR)
    assert (heard.requests, heard.memory.beyond) == ((), {})


@pytest.mark.parametrize("uid", [ALICE, BOB])
def test_a_client_that_was_released_as_another_users_is_no_client_of_that_user(uid: int) -> None:
    """World, trouble, seeds 668259986, 668263064 and 668275520. It got no signal in its first user's name and was
    released. MPS still listed it, so it was terminated as a client of the user whose process it is by now."""
    stage = Stage(PATIENT, shared=True).up()
    first = at_work(stage)
    assert first.server is not None
    assert stage.core is not None
    state, now, pid = stage.core.state, stage.now, first.server.pid
    state, _ = reduce(state, inp.ProcessEnded(now, first.pid, first.start))
    told: list[act.Action] = []
    for later in (1.0, 2.0):
        seen = inp.Seen(now + later + 0.1, uid, first.start, 0.0)
        state, _ = reduce(state, inp.ClientsListed(now + later, pid, frozenset({first.pid}), {first.pid: seen}))
        told += relayed.decide(View(state), relayed.Memory(), now + later + 0.2).actions
    assert [one.message.uid for one in told if isinstance(one, act.TellGate)] == ([ALICE] if uid == ALICE else [])


def test_without_a_gate_no_client_came_late() -> None:
    """The gate may be away when the rule is asked about a client that it has not seen."""
    client = Client(inp.Peer(7, 1001, 1001, 70), since=5.0)
    assert not relayed._came_late(View(State()), client)
    assert relayed._came_late(View(State(gate=Gate(60, 4.0))), client)
    assert not relayed._came_late(View(State(gate=Gate(60, 5.0))), client)
