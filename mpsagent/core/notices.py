"""A word on the terminal of a process that waits for long, and when it is served, where the policy allows it
(``limits.notify_terminal``). The warning before a turn's end is of :mod:`mpsagent.core.turns`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from mpsagent.core import actions as act
from mpsagent.core.rule import Decision
from mpsagent.core.view import View
from mpsagent.core.waiting import waiting
from mpsagent.mps.units import duration_text

AFTER = 10.0
"""Seconds that a process waits until it is told why."""
FIRST = 4
"""Of one user: they mostly have one terminal, and another one is told when it is among the first."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``told``: processes (pid, start) that know that they wait, with their users and since when they do."""

    told: tuple[tuple[tuple[int, int], int, float], ...] = ()


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    state, told = view.state, {process: (uid, since) for process, uid, since in memory.told}
    due, wakes = list[tuple[tuple[int, int], int, float]](), list[float]()
    for uid in state.held.users() if view.policy.terminal else ():
        for process, since in _first(view, uid):
            if process not in told and now >= since + AFTER:
                due.append((process, uid, since))
            elif process not in told:
                wakes.append(since + AFTER)
    todo = list[act.Action]()
    why = {one.uid: one.why.text for one in waiting(view, now)} if due else {}
    for process, uid, since in due:
        todo.append(tell(view, process, uid, f"waits for the GPU: {why.get(uid, 'it is not known why')}"))
        told[process] = uid, since
    for process, (uid, since) in tuple(told.items()):
        if state.held.has(process):
            continue
        del told[process]
        client = state.clients.get(process[0])
        if client is not None and client.peer.start == process[1]:
            todo.append(tell(view, process, uid, f"has the GPU now, after {duration_text(now - since)}"))
    fresh = Memory(tuple((process, *of) for process, of in told.items()))
    return Decision(fresh, tuple(todo), wake=min(wakes, default=None))


def _first(view: View, uid: int) -> Iterator[tuple[tuple[int, int], float]]:
    if uid and view.identified(uid) and view.rules(uid).terminal:
        for held in islice(view.state.held.line(uid), FIRST):
            if not held.of_client:
                yield held.process, held.since


def tell(view: View, process: tuple[int, int], uid: int, text: str) -> act.Tell:
    words = f"process {process[0]} {text}"
    rule = view.rules(uid).origin("notify_terminal").key
    return act.Tell(pid=process[0], start=process[1], uid=uid, reason=words, rule=rule)
