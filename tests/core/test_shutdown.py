"""A server that a person wants ended: who is waited for, who is held, and that it ends whatever it does."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from tests.core.harness import ALICE, BOB, Stage


def order(stage: Stage, server: int, grace: float = 60.0, *, force: bool = False) -> None:
    stage.feed(inp.ShutdownOrdered(stage.now, server, stage.now, stage.now + grace, 0, force))


def only_server(stage: Stage) -> int:
    assert stage.core is not None
    (pid,) = stage.core.state.servers
    return pid


def ended(stage: Stage) -> list[int]:
    return [one.pid for one in stage.happened(tr.ServerEnded) if isinstance(one, tr.ServerEnded)]


def told(stage: Stage) -> list[bool]:
    return [one.force for one in stage.actions(act.ShutdownServer) if isinstance(one, act.ShutdownServer)]


@pytest.mark.parametrize("shared", [False, True])
def test_work_ends_by_itself_who_comes_is_held_and_gets_the_next_server(shared: bool) -> None:
    """Told while a client works, MPS would try again and again for as long as that server lives."""
    stage = Stage(shared=shared).up()
    works = stage.client(ALICE)
    stage.run(2)
    server = only_server(stage)
    order(stage, server)
    stage.run(0.1)
    comes = stage.client(ALICE)
    stage.run(20)
    assert (stage.working(works), stage.working(comes), told(stage)) == (True, False, [])
    stage.ends(works)
    stage.run(5)
    assert (ended(stage), told(stage)) == ([server], [False])
    assert stage.working(comes)
    assert only_server(stage) != server
    assert not stage.happened(tr.ClientRefused)
    assert not stage.actions(act.SignalClient, act.TerminateClient)


@pytest.mark.parametrize("shared", [False, True])
def test_who_still_works_when_the_time_is_over_is_ended_by_the_ladder(shared: bool) -> None:
    stage = Stage(shared=shared).up()
    works = [stage.client(ALICE), stage.client(ALICE)]
    stage.run(2)
    server, since = only_server(stage), stage.now
    order(stage, server, 10)
    stage.run(30)
    asked = stage.times(act.TerminateClient)
    assert len(asked) == 2
    assert since + 10 <= asked[0] < since + 11
    assert not any(stage.working(one) for one in works)
    assert (ended(stage), told(stage)) == ([server], [False])


def test_by_force_it_ends_at_once_whoever_works() -> None:
    stage = Stage().up()
    works = stage.client(ALICE, stays=True)
    stage.run(2)
    server, since = only_server(stage), stage.now
    order(stage, server, 0, force=True)
    stage.run(0.01)
    comes = stage.client(ALICE)
    stage.run(10)
    assert (ended(stage), told(stage)) == ([server], [True])
    assert stage.times(act.ShutdownServer)[0] < since + 1
    assert not stage.actions(act.SignalClient, act.TerminateClient)
    assert not stage.working(works)
    assert works.pid in stage.procs, "its process lives on"
    assert stage.working(comes)


def test_ordered_by_force_after_all_it_waits_no_longer() -> None:
    stage = Stage().up()
    stage.client(ALICE)
    stage.run(2)
    server = only_server(stage)
    order(stage, server, 3600)
    stage.run(5)
    assert told(stage) == []
    order(stage, server, 0, force=True)
    stage.run(5)
    assert (ended(stage), told(stage)) == ([server], [True])


def test_an_idle_server_ends_at_once_and_the_next_user_is_served() -> None:
    stage = Stage().up()
    first = stage.client(ALICE)
    stage.run(2)
    stage.ends(first)
    stage.run(5)
    server = only_server(stage)
    order(stage, server)
    stage.run(3)
    assert (ended(stage), told(stage)) == ([server], [False])
    other = stage.client(BOB)
    stage.run(3)
    assert stage.working(other)


def test_one_that_never_exits_is_told_by_force_and_then_killed() -> None:
    """Also where hangs are only reported."""
    stage = Stage("[hang]\nenforce = false\n").up()
    first = stage.client(ALICE)
    stage.run(2)
    stage.ends(first)
    stage.run(5)
    server = only_server(stage)
    stage.mps.never_resumes = True
    stage.mps.servers[server].stopped = True
    order(stage, server)
    stage.run(120)
    assert told(stage)[0] is False
    assert told(stage)[-1] is True
    assert [one.enforce for one in stage.actions(act.KillServer)][-1] is True
    assert ended(stage) == [server]
    comes = stage.client(BOB)
    stage.run(5)
    assert stage.working(comes)


def test_a_server_that_is_not_there_holds_nobody() -> None:
    stage = Stage().up()
    order(stage, 4711)
    comes = stage.client(ALICE)
    stage.run(3)
    assert stage.working(comes)
