"""One server has exited, the next one's start is not in the log yet: what is armed for it must stay."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core import limits
from mpsagent.core.model import Control, Server, State, Status, Waiting
from mpsagent.core.world import World
from mpsagent.mps.limits import Limits
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity

NOW = 1000.0
A, B = 1001, 1002
# B has waited longer; A was the leaving server's own user, and is served first.
WAITING = (Waiting(11, B, 990.0), Waiting(12, A, 999.0))


def world(state: State) -> World:
    policy, _ = load([("p", f"[limits]\nthreads = 10\n[user.{A}]\nthreads = 20\n[user.{B}]\nthreads = 30\n")])
    assert policy is not None
    return World(state, policy, identities={A: Identity(A), B: Identity(B)})


def asked(state: State, known: Limits | None, now: float) -> list[Limits]:
    memory = limits.LimitsMemory(daemon=7, known=known)
    _, todo, _ = limits.decide(world(state), memory, now)
    return [action.limits for action in todo if isinstance(action, act.SetDefaults)]


def test_between_two_servers_nothing_is_armed_anew() -> None:
    """Ours would be heard just before the next server starts, which is not for who has waited longest."""
    control = Control(7, 900.0, "/p/control")
    leaving = Server(pid=8, uid=A, status=Status.SHUTTING_DOWN, started=950.0, ready=950.0, stopping_since=998.0)
    assert asked(State(control=control, servers={8: leaving}, waiting=WAITING), Limits(30.0), NOW) == [Limits(20.0)]
    gap = State(control=control, waiting=WAITING, ended={8: NOW})
    assert asked(gap, Limits(20.0), NOW + 0.01) == []
    starting = Server(pid=9, uid=A, status=Status.INITIALIZING, started=NOW + 0.02)
    assert asked(State(control=control, servers={9: starting}, waiting=WAITING), Limits(20.0), NOW + 0.03) == []
    ready = Server(pid=9, uid=A, status=Status.ACTIVE, started=NOW + 0.02, ready=NOW + 0.3)
    served = State(control=control, servers={9: ready}, waiting=WAITING[:1])
    assert asked(served, Limits(20.0), NOW + 0.4) == [Limits(30.0)]


def test_a_start_that_does_not_come_is_not_waited_for_without_end() -> None:
    """And the decision is taken again by itself."""
    gap = State(control=Control(7, 900.0, "/p/control"), waiting=WAITING, ended={8: NOW})
    memory = limits.LimitsMemory(daemon=7, known=Limits(20.0))
    _, _, wake = limits.decide(world(gap), memory, NOW + 0.01)
    assert wake == NOW + limits.SLOW_START
    assert asked(gap, Limits(20.0), NOW + limits.SLOW_START) == [Limits(30.0)]


def test_a_wish_that_was_not_heard_is_sent_again_soon_and_forgotten_when_it_is_none_any_more() -> None:
    """Another front-end was connected: nothing has changed in the daemon, and what it has is known."""
    control = Control(7, 900.0, "/p/control")
    waits = State(control=control, waiting=WAITING[:1])
    wish = act.SetDefaults(limits=Limits(30.0), uid=B, reason="", rule="")
    memory = limits.LimitsMemory(daemon=7, known=Limits(10.0), asked=Limits(30.0))
    memory = limits.note(memory, act.Outcome(NOW, wish, False, heard=False))
    assert memory.known == Limits(10.0)
    assert limits.decide(world(waits), memory, NOW)[2] == NOW + limits.RETRY_UNHEARD
    _, todo, _ = limits.decide(world(waits), memory, NOW + limits.RETRY_UNHEARD)
    assert [action.limits for action in todo if isinstance(action, act.SetDefaults)] == [Limits(30.0)]
    memory, todo, _ = limits.decide(world(State(control=control)), memory, NOW)
    assert (memory.refused, memory.failures) == (None, 0)
    assert not [action for action in todo if isinstance(action, act.SetDefaults)]
