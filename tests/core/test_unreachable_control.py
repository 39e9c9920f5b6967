"""A control daemon whose socket has been removed: replaced once nobody works with it, never under somebody's work."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core import hangs
from mpsagent.core.ladder import LadderMemory
from mpsagent.core.model import Client, Control, Server, State, Status, Waiting
from mpsagent.core.world import Process, World
from mpsagent.policy.policy import Policy

SINCE = 1000.0
CONTROL = Control(7, 900.0, "/p/control")
MEMORY = hangs.HangsMemory(up_since=900.0, queried_at=SINCE)


def decide(state: State, now: float) -> list[act.Action]:
    world = World(state, Policy(), processes={7: Process(0)}, unreachable_since=SINCE)
    memory, todo, _ = hangs.decide(world, MEMORY, LadderMemory(), now)
    _, more, _ = hangs.decide(world, memory, LadderMemory(), now + 5)
    return [*todo, *more]


def test_idle_it_is_ended_after_the_deadline() -> None:
    """Then a new one is started, with a directory."""
    deadline = SINCE + Policy().hang_control
    assert not any(isinstance(a, act.KillControl) for a in decide(State(control=CONTROL), deadline - 5.1))
    assert any(isinstance(a, act.KillControl) for a in decide(State(control=CONTROL), deadline))


def test_nobodys_work_is_ended_for_it() -> None:
    """Who is connected goes on working (conformance scenario X10); who waits is still served."""
    server = Server(pid=8, uid=1000, status=Status.ACTIVE, started=950.0, ready=950.0)
    working = State(control=CONTROL, servers={8: server}, clients={9: Client(9, 1000, 8, 960.0)})
    waiting = State(control=CONTROL, servers={8: server}, waiting=(Waiting(10, 1001, 990.0),))
    for state in (working, waiting):
        assert not any(isinstance(a, act.KillControl | act.KillServer) for a in decide(state, SINCE + 3600))
