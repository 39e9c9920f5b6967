"""The control daemon of a user apart ends when the user has had no client for ``apart_idle_timeout``.

It is asked to quit only when the gate has said that a table without the user is in force, and the user is let in again
when it has gone and another one runs: a client that comes meanwhile is held, and loses a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core.rule import Decision
from mpsagent.core.view import View
from mpsagent.mps.units import duration_text

RULE = "apart_idle_timeout"
QUIT_TIMEOUT = 2
"""Seconds that MPS is given to quit; no client is left."""
AGAIN = 20.0
"""Seconds until a ``quit`` that was not heard of again is taken for lost: more than any deadline of the front-end."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``idle``: since when the user has had no client; ``quit``: when the control daemon was asked to quit."""

    idle: float | None = None
    quit: float | None = None


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    state, policy = view.state, view.policy
    if policy.user is None or not view.control_alive or not view.synced or state.drain is not None:
        return Decision(Memory() if memory != Memory() else memory)
    if memory.quit is not None:
        over = memory.quit + AGAIN
        if now < over or (state.control is not None and state.control.quitting is not None):
            return Decision(memory, wake=over if now < over else None)
        return Decision(Memory())
    if state.clients or state.held or view.passed_untouched:
        return Decision(Memory() if memory != Memory() else memory)
    if memory.idle is None:
        memory = Memory(idle=now)
    assert memory.idle is not None
    due = memory.idle + policy.apart_idle_timeout
    if now < due:
        return Decision(memory, wake=due)
    if not view.shut_out(policy.user):
        return Decision(memory)
    reason = f"user {policy.user} has had no client for {duration_text(now - memory.idle)}"
    quit_it = act.QuitControl(timeout=QUIT_TIMEOUT, reason=reason, rule=view.instance_rule(RULE))
    return Decision(replace(memory, quit=now), (quit_it,))


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not get through is asked again after another time of idleness."""
    action = done.action
    if isinstance(action, act.QuitControl) and action.rule.endswith(f".{RULE}") and not done.ok:
        return Memory()
    return memory
