"""A server that a person wants ended: its clients get a time, then the ladder ends them, then it is told to shut down.

Told while a client works, MPS refuses, and then tries again by itself for as long as the server lives (recording 01,
S6): so it is told when none does. By force it ends in 20 ms whoever works; the processes of its clients live on, with
an error at each call. One that has been stopped answers nothing, and the control daemon with it (recording 03, Q10):
the rule ``hangs`` resumes it, then kills it. One that is still there after ``hang.exit`` is told by force, and killed
after as long again.

Who comes meanwhile is held at the gate, and goes to the next server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mpsagent.core import actions as act
from mpsagent.core.model import Server, Shutdown, Status
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View

RULE = "order"
SETTLE = 0.3
"""Seconds after the last client's end in which its server notices that (15 to 30 ms, measured)."""
HANDOVER = 8.0
"""Seconds for which a hand-over may put off an end by force: a hung server holds it up without end."""
AGAIN = 2.0
"""Seconds until a server that is still there is told again."""


class Told(NamedTuple):
    """A server that was told to shut down: when first, when last."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Memory:
    """By server: since when no client has worked there, or none is waited for; when it was told."""

    free: Mapping[int, float] = field(default_factory=dict)
    told: Mapping[int, Told] = field(default_factory=dict)


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    wakes: list[float] = []
    free: dict[int, float] = {}
    told: dict[int, Told] = {}
    for server in view.state.to_end():
        order = server.shutdown
        assert order is not None
        pid, exits = server.pid, server.stopping_since is not None
        before = memory.told.get(pid)
        if before is None and not exits and (not _held(view) or server.status is Status.INITIALIZING):
            continue
        if order.force and before is None and view.state.held.handing and now < order.since + HANDOVER:
            wakes.append(order.since + HANDOVER)
            continue
        if not order.force and not exits and _busy(view, server):
            if now < order.until:
                wakes.append(order.until)
            else:
                requests += _ends(view, server)
            continue
        free[pid] = memory.free.get(pid, now)
        due = free[pid] + (0.0 if order.force or server.idle_since is not None else SETTLE)
        if before is not None:
            told[pid] = before
            due = before.last + AGAIN
        if now < due:
            wakes.append(due)
            continue
        first = now if before is None else before.first
        todo.append(_action(view, server, order, now - first))
        told[pid] = Told(first, now)
        wakes.append(now + AGAIN)
    fresh = Memory(free, told)
    return Decision(fresh if fresh != memory else memory, tuple(todo), tuple(requests), wake=min(wakes, default=None))


def _held(view: View) -> bool:
    """The gate lets no new client in, and has said so."""
    if not view.synced or not view.settled or view.sent is None:
        return False
    table = view.sent[1]
    return not table.open or all(one.admit == "known" for one in table.users.values())


def _busy(view: View, server: Server) -> bool:
    """A client works there, or may in a moment."""
    return bool(view.state.working_on(server) or view.state.held.handing) or view.passed_untouched


def _ends(view: View, server: Server) -> list[EndClient]:
    """Its clients, whom the ladder ends one by one."""
    reason = f"the time before the shutdown of server {server.pid} is over"
    return [EndClient.of(c, reason, RULE, "order") for c in view.state.working_on(server)]


def _action(view: View, server: Server, order: Shutdown, since: float) -> act.Action:
    """What is done about a server that was told ``since`` seconds ago for the first time."""
    patience = view.policy.hang_exit
    reason = f"{view.server_text(server)} is to end, as user {order.by} ordered"
    if since >= 2 * patience:
        return act.KillServer(server=server.pid, reason=f"{reason}; it does not exit", rule=RULE)
    force = order.force or since >= patience
    return act.ShutdownServer(server=server.pid, force=force, reason=reason, rule=RULE)


def note(memory: Memory, done: act.Done) -> Memory:
    """What MPS refused, or did not hear, is said again after ``AGAIN``; what it is then depends on the time alone."""
    return memory
