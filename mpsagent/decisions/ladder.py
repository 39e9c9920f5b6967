"""The ladder: how one client is ended without hurting another.

``terminate_client`` first; a signal to a client with a kernel in flight is a fault for all its neighbours, and after
``terminate_client`` it is not (recording 03, Q5). Then SIGTERM, ``kill_grace``, SIGKILL. In FAULT and after a forced
shutdown there is nothing left to protect and ``terminate_client`` would block the daemon (recording 03, Q4): the ladder
starts at SIGTERM.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from mpsagent.decisions import actions as act
from mpsagent.decisions.world import World

GIVE_UP = 30.0
"""Seconds after SIGKILL until a process that still exists is reported as unkillable (stuck in the driver)."""


class Rung(IntEnum):
    HOOK = 0
    TERMINATE = 1
    SIGTERM = 2
    SIGKILL = 3
    UNKILLABLE = 4


@dataclass(frozen=True, slots=True)
class Climb:
    """One client on its way out. ``at``: when the present rung was reached; ``asked``: its action has been sent."""

    pid: int
    start: int
    uid: int
    server: int
    reason: str
    rule: str
    rung: Rung
    at: float
    kill_grace: float
    deadline: float
    hook: str | None = None
    hook_deadline: float = 0.0
    asked: bool = False
    terminated: bool = False


@dataclass(frozen=True, slots=True)
class LadderMemory:
    climbs: Mapping[int, Climb] = field(default_factory=dict)


def begin(
    world: World,
    memory: LadderMemory,
    pid: int,
    uid: int,
    server: int,
    now: float,
    *,
    reason: str,
    rule: str,
    signals_only: bool = False,
    hook: bool = False,
) -> LadderMemory:
    """Put a client on the ladder; one that is on it already stays where it is, unless it now may be signalled. A process
    that has ended, or that is not the user's that MPS named, is not put on it."""
    known, process = memory.climbs.get(pid), world.processes.get(pid)
    if process is None or process.uid != uid:
        return memory
    if known is not None:
        if signals_only and known.rung < Rung.SIGTERM:
            moved = replace(known, rung=Rung.SIGTERM, at=now, asked=False)
            return replace(memory, climbs={**memory.climbs, pid: moved})
        return memory
    rules, policy = world.rules(uid), world.policy
    program = rules.before_end_hook if hook else None
    rung = Rung.SIGTERM if signals_only else Rung.TERMINATE
    climb = Climb(
        pid=pid,
        start=process.start,
        uid=uid,
        server=server,
        reason=reason,
        rule=rule,
        rung=Rung.HOOK if program else rung,
        at=now,
        kill_grace=rules.kill_grace,
        deadline=policy.hang_terminate,
        hook=program,
        hook_deadline=policy.hook_deadline,
    )
    return replace(memory, climbs={**memory.climbs, pid: climb})


def decide(world: World, memory: LadderMemory, now: float) -> tuple[LadderMemory, list[act.Action], float | None]:
    todo: list[act.Action] = []
    climbs: dict[int, Climb] = {}
    wake: float | None = None
    for pid, climb in memory.climbs.items():
        process = world.processes.get(pid)
        if process is None or (process.uid, process.start) != (climb.uid, climb.start):  # gone; the pid may be reused
            continue
        climb, made, at = _step(world, climb, now)
        todo += made
        climbs[pid] = climb
        if at is not None and (wake is None or at < wake):
            wake = at
    if climbs == memory.climbs:
        return memory, todo, wake
    return replace(memory, climbs=climbs), todo, wake


def _step(world: World, climb: Climb, now: float) -> tuple[Climb, list[act.Action], float | None]:
    """One client's next step: at most one action, and when to look again."""
    server = world.state.servers.get(climb.server)
    if climb.rung is Rung.HOOK:
        if climb.asked and now < climb.at + climb.hook_deadline:
            return climb, [], climb.at + climb.hook_deadline
        if not climb.asked:
            return replace(climb, asked=True), [_hook(climb)], climb.at + climb.hook_deadline
        climb = replace(climb, rung=Rung.TERMINATE, at=now, asked=False)
    if climb.rung is Rung.TERMINATE and (server is None or server.sticky or server.forced):
        climb = replace(climb, rung=Rung.SIGTERM, at=now, asked=False)
    if climb.rung is Rung.TERMINATE:
        if climb.asked and now < climb.at + climb.deadline:
            return climb, [], climb.at + climb.deadline
        if not climb.asked:
            first = act.TerminateClient(
                server=climb.server, pid=climb.pid, deadline=climb.deadline, reason=climb.reason, rule=climb.rule
            )
            return replace(climb, asked=True, at=now), [first], now + climb.deadline
        climb = replace(climb, rung=Rung.SIGTERM, at=now, asked=False)
    if climb.rung is Rung.SIGTERM:
        if climb.asked and now < climb.at + climb.kill_grace:
            return climb, [], climb.at + climb.kill_grace
        if not climb.asked:
            return replace(climb, asked=True, at=now), [_signal(climb, signal.SIGTERM)], now + climb.kill_grace
        climb = replace(climb, rung=Rung.SIGKILL, at=now, asked=False)
    if climb.rung is Rung.SIGKILL:
        if climb.asked and now < climb.at + GIVE_UP:
            return climb, [], climb.at + GIVE_UP
        if not climb.asked:
            return replace(climb, asked=True, at=now), [_signal(climb, signal.SIGKILL)], now + GIVE_UP
        climb = replace(climb, rung=Rung.UNKILLABLE, at=now, asked=False)
    if climb.asked:
        return climb, [], None
    stuck = act.Report(
        kind="client.unkillable",
        reason=f"client {climb.pid} of user {climb.uid} is still there {GIVE_UP:.0f} s after SIGKILL: it hangs in the "
        "kernel; look at dmesg for NVRM messages",
        rule=climb.rule,
        uid=climb.uid,
        pid=climb.pid,
        server=climb.server,
    )
    return replace(climb, asked=True), [stuck], None


def _signal(climb: Climb, number: signal.Signals) -> act.SignalClient:
    why = f"{climb.reason}; {number.name} to client {climb.pid} of user {climb.uid}"
    return act.SignalClient(
        pid=climb.pid, start=climb.start, uid=climb.uid, signal=int(number), reason=why, rule=climb.rule
    )


def _hook(climb: Climb) -> act.RunHook:
    subject: dict[str, object] = {
        "pid": climb.pid,
        "uid": climb.uid,
        "server": climb.server,
        "reason": climb.reason,
        "rule": climb.rule,
    }
    return act.RunHook(
        program=climb.hook or "", subject=subject, deadline=climb.hook_deadline, reason=climb.reason, rule=climb.rule
    )


def note(memory: LadderMemory, outcome: act.Outcome) -> LadderMemory:
    """An answered ``terminate_client`` (or one over its deadline) and a finished hook free the next rung at once."""
    action = outcome.action
    if isinstance(action, act.TerminateClient):
        climb = memory.climbs.get(action.pid)
        if climb is None or climb.rung is not Rung.TERMINATE:
            return memory
        moved = replace(climb, rung=Rung.SIGTERM, at=outcome.at, asked=False, terminated=outcome.ok)
        return replace(memory, climbs={**memory.climbs, climb.pid: moved})
    if isinstance(action, act.RunHook):
        pid = action.subject.get("pid")
        climb = memory.climbs.get(pid) if isinstance(pid, int) else None
        if climb is None or climb.rung is not Rung.HOOK:
            return memory
        moved = replace(climb, rung=Rung.TERMINATE, at=outcome.at, asked=False)
        return replace(memory, climbs={**memory.climbs, climb.pid: moved})
    return memory
