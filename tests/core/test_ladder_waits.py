"""No signal before `terminate_client` has been answered: a kernel cut off by a signal takes its neighbours along.

The server logs the request before the client has let go (1 ms apart, found by the demo): the line is not the answer.
"""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core.decide import decide, end_client, note
from mpsagent.core.reduce import apply
from mpsagent.mps import events as ev
from tests.core.harness import ALICE, Toy


def test_the_servers_line_about_the_request_frees_no_signal() -> None:
    toy = Toy().up()
    neighbour, victim = toy.client(ALICE), toy.client(ALICE)
    toy.run(1)
    memory = end_client(toy.world(), toy.memory, victim, toy.now, reason="asked", rule="order", at_once=True)
    first = decide(toy.world(), memory, toy.now)
    (asked,) = [a for a in first.actions if isinstance(a, act.TerminateClient)]
    assert toy.server is not None
    toy.state = apply(toy.state, ev.TerminationAsked(toy.now, toy.server.pid, victim))
    second = decide(toy.world(), first.memory, toy.now + 0.001)
    assert not [a for a in second.actions if isinstance(a, act.SignalClient)]
    answered = note(second.memory, act.Outcome(toy.now + 0.008, asked, True))
    third = decide(toy.world(), answered, toy.now + 0.009)
    assert [a.pid for a in third.actions if isinstance(a, act.SignalClient)] == [victim]
    assert neighbour in toy.state.clients


def test_a_client_whose_end_was_asked_for_before_is_not_asked_again() -> None:
    """Asked a second time, the daemon would answer nothing until that process exits (conformance scenario X8)."""
    toy = Toy().up()
    victim = toy.client(ALICE)
    toy.run(1)
    assert toy.server is not None
    toy.state = apply(toy.state, ev.TerminationAsked(toy.now, toy.server.pid, victim))
    memory = end_client(toy.world(), toy.memory, victim, toy.now, reason="asked", rule="order", at_once=True)
    kinds = {type(a) for a in decide(toy.world(), memory, toy.now).actions}
    assert act.TerminateClient not in kinds
    assert act.SignalClient in kinds
