"""Who is let in at the gate, with which limits: the table that the gate is told.

Held, not refused: while a server is in FAULT, the control daemon is away, a server is full or a drain is on, everybody
waits. Refused are only users whom the policy denies, and everybody while the instance has failed: these get their CUDA
error at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.model import CLIENTS_PER_SERVER, Status
from mpsagent.core.rule import Decision
from mpsagent.core.view import View
from mpsagent.mps.limits import Limits

RULE = "admission"
RELEASE_AFTER = 0.5
"""Seconds after a client left its server, its process living on, until its next connection is a new admission. A
program that makes one context after the other must not lose its turn in between."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``sent``: what this gate (by its pid and the time of its link) was told last, and the number of that."""

    number: int = 0
    sent: act.Admissions | None = None
    gate: tuple[int, float] | None = None
    refused: frozenset[int] = frozenset()
    """Connections that the gate was asked to turn away."""
    released: frozenset[tuple[int, int]] = frozenset()
    """Processes (pid, start) that the gate was asked to forget."""


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    gate = view.state.gate
    if gate is None or not gate.synced:
        return Decision(Memory(number=memory.number))
    todo: list[act.Action] = []
    link = (gate.pid, gate.since)
    if memory.gate != link:
        memory = Memory(number=memory.number, gate=link)
    wanted, number = admissions(view, now), memory.number
    if wanted != memory.sent:
        number += 1
        names = ", ".join(str(one.uid) for one in wanted.users) or "none"
        reason = f"admitted users: {names}" if wanted.open else "everybody is held"
        todo.append(act.SetAdmissions(number=number, admissions=wanted, reason=reason, rule=RULE))
    refused, turned_away = _refusals(view, memory.refused)
    released, leaving, wake = _releases(view, memory.released, now)
    fresh = Memory(number, wanted, link, refused, released)
    wakes = [at for at in (wake, view.pause_until) if at is not None and at > now]
    return Decision(
        fresh if fresh != memory else memory, (*todo, *turned_away, *leaving), wake=min(wakes, default=None)
    )


def admissions(view: View, now: float) -> act.Admissions:
    """The table that follows from the state."""
    state = view.state
    fail_safe = view.fail_safe()
    devices = tuple(device.ordinal for device in state.devices)
    faulted = any(server.status is Status.FAULT for server in state.servers.values())
    control = state.control
    able = view.control_alive and control is not None and control.quitting is None
    paused = view.pause_until is not None and now < view.pause_until
    is_open = able and not faulted and not paused and view.given_up is None
    users: tuple[act.Admission, ...] = ()
    turn = view.turn
    if turn is not None and not view.closing and turn.ending is None:
        rules = view.rules(turn.uid)
        users = (
            act.Admission(
                uid=turn.uid,
                limits=_at_most(view.limits(turn.uid)),
                known_only=state.drain is not None,
                max_clients=rules.max_clients if rules.enforce_limits else None,
            ),
        )
    return act.Admissions(is_open, users if is_open else (), _room(view), fail_safe, devices, view.limits_enforced)


def _at_most(limits: Limits) -> Limits:
    """0.1 is the smallest percentage that MPS takes (recording 01, S2)."""
    return Limits(min(100.0, max(0.1, limits.threads)), limits.memory)


def _room(view: View) -> int:
    """Processes that fit: a server takes 48 contexts, and a process may have several."""
    servers = view.state.servers.values()
    most = min((server.max_clients for server in servers), default=CLIENTS_PER_SERVER)
    more = sum(max(0, len(one.contexts - {0}) - 1) for server in servers for one in server.attached.values())
    return max(1, most - more)


def _refusals(view: View, before: frozenset[int]) -> tuple[frozenset[int], list[act.Action]]:
    todo: list[act.Action] = []
    refused = set(before & view.state.held.keys())
    for number, held in view.state.held.items():
        if number in refused or held.handing is not None:
            continue
        if view.denied(held.uid):
            reason, rule = f"the policy denies user {held.uid} MPS", view.rules(held.uid).origin("access").key
        elif view.given_up is not None:
            reason, rule = view.given_up, RULE
        else:
            continue
        refused.add(number)
        peer = held.peer
        todo.append(act.RefuseConnection(connection=number, pid=peer.pid, uid=peer.uid, reason=reason, rule=rule))
    return frozenset(refused), todo


def _releases(
    view: View, before: frozenset[tuple[int, int]], now: float
) -> tuple[frozenset[tuple[int, int]], list[act.Action], float | None]:
    todo: list[act.Action] = []
    asked: set[tuple[int, int]] = set()
    wake: float | None = None
    for client in view.state.clients.values():
        key = (client.pid, client.peer.start)
        if client.detached is None or client.pid in view.ending:
            continue
        if key in before:
            asked.add(key)
            continue
        due = client.detached + RELEASE_AFTER
        if now < due:
            wake = due if wake is None else min(wake, due)
            continue
        asked.add(key)
        reason = f"client {client.pid} of user {client.uid} has left its server; its process lives on"
        todo.append(
            act.ReleaseClient(pid=client.pid, start=client.peer.start, uid=client.uid, reason=reason, rule=RULE)
        )
    return frozenset(asked), todo, wake


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not reach the gate is told again: the link was lost, and a new one begins with everything."""
    if isinstance(done.action, act.SetAdmissions) and not done.ok:
        return Memory(number=memory.number)
    return memory
