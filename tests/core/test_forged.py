"""What a forger would try, by name. (Any lines at all: test_properties.)

The setting: Alice has the GPU with two programs at work, Bob waits. Lines come from users: through names that a user
lets the daemon print, or through whatever way into a log is found next.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.mps import events as ev
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, PATIENT, Stage
from tests.core.toy import Proc

Lines = Callable[[float, int, int, int], list[ev.Line]]
"""of now, Alice's server, her client, the control daemon"""

ATTEMPTS: dict[str, Lines] = {
    "she has left": lambda t, s, p, c: [ev.ClientDisconnected(t, s, p), ev.ClientDisconnected(t, s, p + 1)],
    "her server has gone": lambda t, s, p, c: [ev.ServerExited(t, s, 0)],
    "her server is stopping": lambda t, s, p, c: [ev.ShutdownTried(t, s), ev.ServerStopping(t, s)],
    "her server was forced": lambda t, s, p, c: [ev.ShutdownForced(t, s)],
    "her server hangs on a dead client": lambda t, s, p, c: [ev.ServerStuck(t, s)],
    "her server has ended, is another one of Bob's and hangs": lambda t, s, p, c: [
        ev.ServerExited(t, s, 0), ev.ServerStarting(t, s, BOB), ev.ServerStuck(t, s)
    ],
    "her server is in FAULT, with her": lambda t, s, p, c: [
        ev.FaultStarted(t, s), ev.FaultDevice(t, s, 0), ev.FaultClient(t, s, p), ev.FaultClient(t, s, p + 1)
    ],
    "her server is in FAULT, and then it is not": lambda t, s, p, c: [
        ev.FaultStarted(t, s), ev.FaultDevice(t, s, 0), ev.ContextDestroyed(t, s, 0)
    ],
    "another server of hers does not start": lambda t, s, p, c: [ev.ServerStarting(t, 1, ALICE)],
    "a server of Bob's starts": lambda t, s, p, c: [ev.ServerStarting(t, 2, BOB), ev.ServerReady(t, 2)],
    "servers fail": lambda t, s, p, c: [
        line for n in range(40) for line in (ev.ServerStarting(t, 3000 + n, ALICE), ev.ServerExited(t, 3000 + n, 1))
    ],
    "she works on another server": lambda t, s, p, c: [
        ev.ContextConnected(t, 1, p, 1), ev.ContextConnected(t, 1, p + 1, 1)
    ],
    "she has no context": lambda t, s, p, c: [ev.ContextExiting(t, s, p, 1), ev.ContextExiting(t, s, p + 1, 1)],
    "her end was asked for": lambda t, s, p, c: [ev.TerminationAsked(t, s, p)],
    "a stranger is a client": lambda t, s, p, c: [ev.ContextConnected(t, s, 1, 0), ev.ContextConnected(t, s, c, 1)],
    "she and Bob were refused": lambda t, s, p, c: [ev.ClientRefused(t, s, p + n, "status 807") for n in range(4)],
    "the server is full": lambda t, s, p, c: [ev.ClientsFull(t, s, 0)],
    "the daemon quits": lambda t, s, p, c: [ev.QuitIssued(t, 0)],
    "quit was typed": lambda t, s, p, c: [ev.CommandRead(t, "quit")],
    "the daemon has exited": lambda t, s, p, c: [ev.ControlExited(t, c, 0)],
    "another daemon has started": lambda t, s, p, c: [ev.ControlStarted(t, 1, "/x"), ev.ControlStarted(0.0, c, "/s")],
    "other limits": lambda t, s, p, c: [ev.ThreadsSet(t, s, 100.0), ev.MemorySet(t, s, 0, 0), ev.ServerStarted(t, s)],
}  # fmt: skip


def setting(shared: bool) -> tuple[Stage, Proc, Proc, Proc]:
    stage = Stage(PATIENT, shared=shared).up()
    first, second = stage.client(ALICE), stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(1)
    return stage, first, second, bob


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("what", ATTEMPTS)
def test_nobody_is_hit_and_no_turn_moves(what: str, shared: bool) -> None:
    stage, first, second, bob = setting(shared)
    server = next(iter(stage.mps.servers))
    for _ in range(3):
        stage.forge(*ATTEMPTS[what](stage.now, server, first.pid, stage.mps.control))
        stage.run(25)
    hits = stage.actions(
        act.SignalClient, act.SignalHeld, act.TerminateClient, act.KillControl, act.QuitControl, link.Refuse,
        link.Release, act.ShutdownServer,
    )  # fmt: skip
    assert hits == []
    assert stage.happened(tr.ClientRefused) == []
    assert [
        a
        for a in stage.actions(act.KillServer, act.Resume)
        if server in (getattr(a, "server", 0), getattr(a, "pid", 0))
    ] == []
    assert stage.working(first)
    assert stage.working(second)
    assert stage.turns() == [ALICE]
    third = stage.client(ALICE)
    stage.run(2)
    assert stage.given(third) == [stage.limits(ALICE)] * 2
    for proc in (first, second, third):
        stage.ends(proc)
    stage.run(3)
    assert stage.working(bob)
    assert stage.given(bob) == [stage.limits(BOB)] * 2


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("what", ATTEMPTS)
def test_who_is_ended_meanwhile_is_asked_first_all_the_same(what: str, shared: bool) -> None:
    """A signal without having been asked would be a fault for the neighbour."""
    stage, victim, neighbour, _ = setting(shared)
    server = next(iter(stage.mps.servers))
    stage.forge(*ATTEMPTS[what](stage.now, server, victim.pid, stage.mps.control))
    stage.feed(inp.EndOrdered(stage.now, victim.pid, 0, True))
    stage.run(15)
    assert victim.pid not in stage.procs
    assert stage.working(neighbour)
    assert stage.mps.hurt == set()


def test_lines_do_not_keep_a_turn_beyond_its_end() -> None:
    """A holder who writes that he has left, or that all is in FAULT, is ended at his time."""
    stage = Stage().up()
    alice = stage.client(ALICE, stubborn=True)
    stage.run(1)
    bob = stage.client(BOB)
    server = next(iter(stage.mps.servers))
    for second in range(30):
        stage.after(second, lambda: stage.forge(ev.ClientDisconnected(stage.now, server, alice.pid)))
        stage.after(second + 0.5, lambda: stage.forge(ev.FaultStarted(stage.now, server)))
        stage.after(second + 0.7, lambda: stage.forge(ev.QuitIssued(stage.now, 5)))
    stage.run(35)
    assert stage.working(bob), stage.core
    assert alice.pid not in stage.procs
