"""Maintenance: nothing new is admitted, and running work ends by itself or at a time.

A drain is a closed gate: who comes is held, and ``resume`` lets them in at once. When nothing works any more
the control daemon is told to quit, so that driver and GPU are free; it is started again when the drain ends. A restart
that waits for the clients is a drain that ends with the control daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View
from mpsagent.mps.units import duration_text

RULE = "drain"
AGAIN = 5.0
"""Seconds until a ``quit`` that did not get through is sent again."""
QUIT_TIMEOUT = 2
"""Seconds that MPS is given; no client is left."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``since``: the drain that has been reported; ``asked``: its ``quit`` is on its way."""

    since: float | None = None
    asked: bool = False
    again_at: float = float("-inf")
    done: bool = False


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    drain, control = view.state.drain, view.state.control
    if memory.since is not None and (drain is None or drain.since != memory.since):
        todo.append(act.Report(kind="drain.ended", reason="new work is admitted again", rule=RULE))
        memory = Memory()
    if drain is None:
        return Decision(memory, tuple(todo))
    if memory.since is None:
        memory = Memory(since=drain.since)
        until = "as long as it takes" if drain.until is None else f"for {duration_text(max(0.0, drain.until - now))}"
        until += ", then the control daemon is started again" if drain.restart else ""
        todo.append(act.Report(kind="drain.begun", reason=f"no new work is admitted; work goes on {until}", rule=RULE))
    if not view.control_alive:
        if not memory.done:
            reason = "nothing runs any more; the control daemon stays down until the drain ends"
            todo.append(act.Report(kind="drain.done", reason=reason, rule=RULE))
        return Decision(replace(memory, done=True, asked=False), tuple(todo))
    memory = replace(memory, done=False)
    if view.state.clients or view.state.held.handing or view.passed_untouched:
        if drain.until is None or now < drain.until:
            return Decision(memory, tuple(todo), wake=drain.until)
        clients = (c for c in view.state.clients.values() if c.detached is None)
        ends = (EndClient.of(c, "the time of the drain is over", RULE, "order") for c in clients)
        return Decision(memory, tuple(todo), tuple(ends))
    if not view.synced:  # the gate has not said yet who is at work
        return Decision(memory, tuple(todo))
    if control is None or control.quitting is not None or memory.asked:
        return Decision(memory, tuple(todo))
    if now < memory.again_at:
        return Decision(memory, tuple(todo), wake=memory.again_at)
    quit_it = act.QuitControl(timeout=QUIT_TIMEOUT, reason="drain: nothing works any more", rule=RULE)
    return Decision(replace(memory, asked=True), (*todo, quit_it))


def note(memory: Memory, done: act.Done) -> Memory:
    action = done.action
    if not isinstance(action, act.QuitControl) or action.rule != RULE:
        return memory
    return replace(memory, asked=False, again_at=done.at + AGAIN)
