"""What a new agent asks the control daemon: it may block that for as long as a server takes to exit."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core import hangs
from mpsagent.core.ladder import LadderMemory
from mpsagent.core.model import Client, Control, Server, State, Status, Waiting
from mpsagent.core.world import Process, World
from mpsagent.policy.policy import Policy

SERVER = Server(pid=8, uid=1000, status=Status.ACTIVE, started=950.0, ready=950.0)
CLIENT = Client(9, 1000, 8, 960.0)
WAITING = (Waiting(10, 1001, 990.0),)


def examined(state: State) -> list[tuple[int, ...]]:
    memory = hangs.HangsMemory(up_since=900.0)
    _, todo, _ = hangs.decide(World(state, Policy(), processes={7: Process(0)}), memory, LadderMemory(), 1000.0)
    return [action.servers for action in todo if isinstance(action, act.Reconcile)]


def test_a_server_that_is_about_to_exit_is_not_asked_about() -> None:
    """Nobody could be armed for until it has gone: a user got another's threads that way, killing agents under load."""
    control = Control(7, 900.0, "/p/control")
    assert examined(State(control=control, servers={8: SERVER}, waiting=WAITING)) == [()]
    assert examined(State(control=control, servers={8: SERVER}, clients={9: CLIENT}, waiting=WAITING)) == [(8,)]
    assert examined(State(control=control, servers={8: SERVER})) == [(8,)]
