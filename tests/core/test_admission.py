"""Who is let in: held, not refused; refused by the policy; bounds; drains; a gate that does not read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import limits
from mpsagent.core.model import Drain
from mpsagent.core.view import View
from mpsagent.core.waiting import waiting
from mpsagent.mps import events as ev
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, PATIENT, Stage
from tests.core.toy import Proc, Server

both = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
DENY = PATIENT + '[user.carol]\naccess = "deny"\n'


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_no_user_takes_all_places_of_a_server_for_all() -> None:
    """One process made 48 contexts, and everybody else was refused (recording 12, H4). Now it waits beyond a bound,
    others work beside it, and who finds the server full is held."""
    stage = Stage(PATIENT, together=True).up()
    stage.client(ALICE, contexts=60)
    stage.run(3)
    crowd = [stage.client(BOB) for _ in range(14)]
    stage.run(1)
    assert sum(stage.working(p) for p in crowd) == 12
    assert stage.core is not None
    view = stage.core.view()
    told = {one.uid: one.why for one in waiting(view, stage.now)}
    assert told[ALICE].text.startswith(
        "this user may have 36 contexts on a server at a time (limits.max_contexts, built-in default); "
        "only this user's own process"
    )
    assert told[BOB].text == f"the server is full: 36 contexts of user {ALICE}, 12 contexts of user {BOB}"
    assert stage.mps.refused == []
    assert stage.gate.turned_away == []


@pytest.mark.parametrize(("most", "said"), [(1, "1 context"), (5, "5 contexts")])
def test_the_bound_of_a_users_contexts_is_the_policys(most: int, said: str) -> None:
    stage = Stage(PATIENT.replace("[user.alice]", f"[user.alice]\nmax_contexts = {most}")).up()
    alice = stage.client(ALICE, contexts=9)
    stage.run(1)
    assert alice.made == most
    stage.client(ALICE)
    stage.run(1)
    assert len(stage.gate.known) == 1
    assert stage.core is not None
    (told,) = waiting(stage.core.view(), stage.now)
    assert told.why.text.startswith(
        f"this user may have {said} on a server at a time (user.alice.max_contexts, policy.toml:6); only this user's"
    )


def test_lines_about_contexts_that_never_passed_the_gate_take_no_room() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    server = next(iter(stage.mps.servers))
    for context in range(2, 60):
        stage.forge(ev.ContextConnected(stage.now, server, alice.pid, context))
    stage.forge(*(ev.ContextConnected(stage.now, server, 9000 + n, 1) for n in range(100)))
    for _ in range(47):
        stage.client(ALICE)
    stage.run(3)
    assert len(stage.gate.known) == 48


@both
def test_the_most_clients_of_a_user_are_kept_by_the_gate(shared: bool) -> None:
    stage = Stage(PATIENT + "[user.carol]\nmax_clients = 2\n", shared=shared).up()
    crowd = [stage.client(CAROL) for _ in range(5)]
    stage.run(1)
    assert [stage.working(p) for p in crowd] == [True, True, False, False, False]
    stage.ends(crowd[0])
    stage.run(1)
    assert stage.working(crowd[2])
    assert stage.gate.turned_away == []


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_refusal_that_meets_a_hand_over_is_repeated() -> None:
    """The gate does not break off what it has begun; when that fails, the connection is held again, then refused."""
    stage = Stage(PATIENT, lag=0.05).up()
    stage.mps.stopped = True
    carol = stage.client(CAROL)
    stage.run(0.06)
    stage.mps.stopped = False
    stage.mps.serve = lambda proc, done, until: stage.after(0.5, lambda: done(False))  # type: ignore[method-assign]
    stage.run(0.2)
    stage.reload(DENY)
    stage.run(5)
    assert stage.gate.turned_away == [carol.pid]
    assert stage.core is not None
    assert len(stage.core.state.held) == 0


# --- a gate that does not read ----------------------------------------------------------------------------------------


def test_what_the_gate_does_not_read_is_told_again_and_not_a_thousand_times() -> None:
    stage = Stage(DENY).up()
    stage.gate_deaf = True
    before = len(stage.done)
    alice, carol = stage.client(ALICE), stage.client(CAROL)
    stage.run(10)
    assert 10 <= len(stage.done) - before <= 200
    stage.gate_deaf = False
    stage.run(1)
    assert stage.working(alice)
    assert stage.gate.turned_away == [carol.pid]


def test_a_release_that_was_lost_is_told_again() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.detaches(alice)
    stage.run(0.4)
    stage.gate_deaf = True
    stage.run(2)
    assert not stage.working(bob)
    stage.gate_deaf = False
    stage.run(1)
    assert stage.working(bob)


# --- drain ------------------------------------------------------------------------------------------------------------


@both
def test_a_drain_lets_work_end_holds_who_comes_and_resume_serves_them_at_once(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    waiting = stage.client(BOB)
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(0.1)
    more = stage.client(ALICE)
    stage.run(100)
    assert stage.working(alice)
    assert not stage.working(more)
    stage.feed(inp.DrainResumed(stage.now))  # before its work has ended
    stage.run(1)
    assert stage.working(more)
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.ends(alice)
    stage.ends(more)
    stage.run(20)
    assert not stage.mps.control
    assert [len(stage.reports(f"drain.{kind}")) for kind in ("begun", "done", "ended")] == [2, 1, 1]
    stage.feed(inp.DrainResumed(stage.now))
    stage.run(1)
    assert stage.working(waiting)
    assert stage.gate.turned_away == []


@both
def test_a_client_at_work_gets_its_further_contexts_in_a_drain(shared: bool) -> None:
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(1)
    alice.contexts = 2
    stage.gate.knock(alice)
    stage.run(1)
    assert alice.made == 2


def test_a_drain_with_a_time_ends_what_is_left_then() -> None:
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE, stubborn=True)
    stage.run(1)
    stage.feed(inp.DrainOrdered(stage.now, stage.now, stage.now + 60))
    stage.run(59)
    assert stage.working(alice)
    stage.run(12)
    assert alice.pid not in stage.procs
    assert not stage.mps.control
    assert stage.mps.hurt == set()


def test_a_drain_that_is_given_another_time_is_the_same_drain() -> None:
    """It was on record as over, "users are served again", and begun anew."""
    stage = Stage(PATIENT).up()
    alice = stage.client(ALICE)
    stage.run(1)
    since = stage.now
    stage.feed(inp.DrainOrdered(since, since, None))
    stage.run(10)
    stage.feed(inp.DrainOrdered(stage.now, stage.now, stage.now + 60))
    stage.run(30)
    assert [len(stage.reports(f"drain.{kind}")) for kind in ("begun", "ended")] == [1, 0]
    assert stage.core is not None
    assert stage.core.state.drain == Drain(since, since + 70)
    stage.run(60)
    assert alice.pid not in stage.procs


def test_a_drain_whose_quit_does_not_get_through_asks_again_every_few_seconds() -> None:
    stage = Stage(PATIENT).up()
    stage.front_end_fails = True
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(30)
    assert 4 <= len(stage.actions(act.QuitControl)) <= 8
    stage.front_end_fails = False
    stage.run(10)
    assert not stage.mps.control


@both
def test_an_agent_that_starts_in_a_drain_ends_no_work(shared: bool) -> None:
    """Until the gate has said who is there, nobody is known to be at work."""
    stage = Stage(PATIENT, shared=shared).up()
    alice = stage.client(ALICE)
    stage.run(1)
    stage.kill_agent()
    stage.start_agent()
    stage.feed(inp.DrainOrdered(stage.now, stage.now - 10, None))
    stage.run(60)
    assert stage.working(alice)
    assert stage.actions(act.QuitControl) == []


def test_a_drain_waits_for_those_whom_the_gate_passed_untouched() -> None:
    """With a handshake that is not known the gate knows no clients; then the logs are all there is."""
    stage = Stage(PATIENT).up()
    stage.feed(inp.GateSaid(stage.now, link.HandshakeSeen(False, "00")))
    server = stage.mps.servers[4000] = Server(4000, ALICE, ready=True)
    server.clients[4001] = proc = Proc(4001, ALICE, 1, server=server, made=1)
    stage._log(ev.ServerStarting(stage.now, 4000, ALICE))
    stage._log(ev.ServerReady(stage.now, 4000))
    stage._log(ev.ContextConnected(stage.now, 4000, 4001, 1))
    stage.run(0.1)
    stage.feed(inp.DrainOrdered(stage.now, stage.now, None))
    stage.run(5)
    assert stage.actions(act.QuitControl) == []
    stage.mps.leave(proc)
    stage.run(5)
    assert stage.actions(act.QuitControl)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_server_that_started_with_something_else_is_reported_and_left_alone() -> None:
    stage = Stage(PATIENT).up()
    stage.client(ALICE)
    stage.run(0.1)
    server = stage.mps.servers[next(iter(stage.mps.servers))] if stage.mps.servers else None
    assert server is not None
    stage.forge(ev.ThreadsSet(stage.now, server.pid, 100.0), ev.ServerStarted(stage.now, server.pid))
    stage.run(5)
    assert [r.uid for r in stage.reports("limits.mismatch")] == [ALICE]
    assert stage.actions(act.KillServer) == []


def test_of_two_that_came_at_once_the_second_may_stand_in_the_log_first() -> None:
    """World, hour, seed 479974238: the second one was taken for the first, and status said a mismatch."""
    stage = Stage(PATIENT, together=True).up()
    first, second = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    assert stage.core is not None
    (server,) = stage.core.state.servers.values()
    log = {second.pid: server.attached[second.pid]}
    early = replace(server, limits=stage.limits(ALICE), reported=True, attached=log)
    state = replace(stage.core.state, servers={server.pid: early})
    said = [
        one
        for one in limits.decide(View(state), limits.Memory(begun=0.0), stage.now).actions
        if isinstance(one, act.Report)
    ]
    assert [one.kind for one in said] == ["limits.verified"]
    assert stage.working(first)


def test_the_first_client_that_a_later_agent_knows_is_not_taken_for_the_servers_first() -> None:
    """The server's first client had ended, another user's worked: the node was unhealthy for as long as the server."""
    stage = Stage(PATIENT, together=True).up()
    first, second = stage.client(ALICE), stage.client(BOB)
    stage.run(1)
    stage.ends(first)
    stage.run(1)
    stage.kill_agent()
    stage.start_agent()
    stage.run(10)
    assert stage.working(second)
    assert stage.reports("limits.mismatch") == []
