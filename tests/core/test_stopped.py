"""A control daemon that somebody has stopped is resumed also when nobody asks it anything: a client that arrives then
waits in the socket's backlog and is in no log (found by the demo)."""

from __future__ import annotations

from mpsagent.core import actions as act
from tests.core.harness import ALICE, Toy


def stop(toy: Toy, stopped: bool) -> None:
    """The agent looks at the processes once a second; the toy has to be told."""
    toy.control_stopped = stopped
    toy._wake()


def test_a_stopped_daemon_that_nobody_asks_is_resumed_after_its_deadline() -> None:
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    stop(toy, True)
    began = toy.now
    toy.run(toy.policy.hang_control + 2)
    (resume,) = [(at, a) for at, a in toy.done if isinstance(a, act.Resume)]
    assert resume[0] >= began + toy.policy.hang_control
    assert not toy.control_stopped
    assert toy.actions(act.KillControl, act.KillServer) == []


def test_a_daemon_that_goes_on_by_itself_is_left_alone() -> None:
    """Somebody debugs it, say: the clock of the hang starts anew with each stop."""
    toy = Toy().up()
    for _ in range(5):
        stop(toy, True)
        toy.run(toy.policy.hang_control - 2)
        stop(toy, False)
        toy.run(3)
    assert toy.actions(act.Resume, act.KillControl) == []


def test_a_stopped_server_that_nobody_asks_is_resumed_after_its_deadline() -> None:
    """A client of its own user is told `Server already exists` and hangs; no question of ours finds that out (H200,
    hang-server-stop while busy: not served for 120 s before this rule)."""
    toy = Toy().up()
    toy.client(ALICE)
    toy.run(1)
    assert toy.server is not None
    toy.server.stopped = True
    toy._wake()
    began = toy.now
    deadline = min(toy.policy.hang_server, toy.policy.hang_control)
    toy.run(deadline + 2)
    (resume,) = [(at, a) for at, a in toy.done if isinstance(a, act.Resume)]
    assert began + deadline <= resume[0] <= began + deadline + 1
    assert not toy.server.stopped
    assert toy.actions(act.KillControl, act.KillServer) == []
