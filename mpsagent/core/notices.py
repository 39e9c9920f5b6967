"""A line for a process that waits for long, when it is served, and when the gate or a server has refused it, if the
policy allows it (``limits.notify_terminal``). The warning before the end of a turn is in :mod:`mpsagent.core.turns`,
the refusal by the policy in :mod:`mpsagent.core.admission`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from mpsagent.core import actions as act
from mpsagent.core.admission import TOLD_EVERY
from mpsagent.core.lines import line
from mpsagent.core.model import Held
from mpsagent.core.rule import Decision
from mpsagent.core.view import View
from mpsagent.core.waiting import waiting
from mpsagent.mps.units import duration_text

AFTER = 10.0
"""Seconds that a process waits until it is told why."""
BOUND = "max_contexts"
"""The key of the policy that the gate names where it refuses a context. The gate does not know its file and line."""
FIRST = 4
"""Of one user: they mostly have one terminal, and another one is told when it is among the first."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``told``: processes (pid, start) that know that they wait, with their users and since when they do. ``refusal``:
    the number of the last refusal that was looked at. ``refused``: by uid, when a process of this user was last told of
    one."""

    told: tuple[tuple[tuple[int, int], int, float], ...] = ()
    refusal: int = 0
    refused: Mapping[int, float] = field(default_factory=dict)


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    state, told = view.state, {process: (uid, since) for process, uid, since in memory.told}
    due, wakes = list[Held](), list[float]()
    for uid in state.held.users() if view.policy.terminal else ():
        for held in _first(view, uid):
            if held.process not in told and now >= held.since + AFTER:
                due.append(held)
            elif held.process not in told:
                wakes.append(held.since + AFTER)
    todo = list[act.Action]()
    why = {one.uid: one.why.text for one in waiting(view, now)} if due else {}
    for held in due:
        text = f"waits for the GPU: {why.get(held.uid, 'it is not known why')} (mpsagent-cli queue shows your place)"
        todo.append(_line(view, held.process, held.uid, held.peer.cgroup, text))
        told[held.process] = held.uid, held.since
    for process, (uid, since) in tuple(told.items()):
        if state.held.has(process):
            continue
        del told[process]
        client = state.clients.get(process[0])
        if client is not None and client.peer.start == process[1]:
            text = f"has the GPU now, after {duration_text(now - since)}"
            todo.append(_line(view, process, uid, client.peer.cgroup, text))
    refusal, refused, lines = _refusals(view, memory, now)
    fresh = Memory(tuple((process, *of) for process, of in told.items()), refusal, refused)
    return Decision(fresh, (*todo, *lines), wake=min(wakes, default=None))


def _refusals(view: View, memory: Memory, now: float) -> tuple[int, Mapping[int, float], list[act.Action]]:
    """Return the lines for processes that were refused and not by the policy, one for each user in ``TOLD_EVERY``
    seconds. Only the engine of all users sends them: a refused process has no daemon."""
    refusals = [one for one in view.state.refusals if one.number > memory.refusal] if view.user is None else []
    if not refusals:
        return memory.refusal, memory.refused, []
    refused = {uid: at for uid, at in memory.refused.items() if now < at + TOLD_EVERY}
    lines = list[act.Action]()
    for one in refusals:
        if one.uid and one.uid not in refused and view.rules(one.uid).terminal:
            refused[one.uid] = now
            place = f" ({view.rules(one.uid).place(BOUND)})" if BOUND in one.why else ""
            lines.append(_line(view, (one.pid, one.start), one.uid, one.cgroup, f"was refused: {one.why}{place}"))
    return refusals[-1].number, refused, lines


def _first(view: View, uid: int) -> Iterator[Held]:
    if uid and view.identified(uid) and view.rules(uid).terminal:
        for held in islice(view.state.held.line(uid), FIRST):
            if not held.of_client:
                yield held


def _line(view: View, process: tuple[int, int], uid: int, cgroup: str | None, text: str) -> act.Tell:
    return line(view, process, uid, cgroup, f"process {process[0]} {text}")
