"""The ladder: how one client is ended without hurting another.

``terminate_client`` first; a signal to a client with a kernel in flight is a fault for all its neighbours, and after
``terminate_client`` it is not (recording 03, Q5). Then SIGTERM, ``kill_grace``, SIGKILL. For a client with a sticky
error and after a forced shutdown there is nothing left to protect and ``terminate_client`` would block the daemon
(recording 03, Q4): the ladder starts at SIGTERM.

One client at a time is asked: the daemon is single-threaded and a stopped client blocks it until it dies, so a second
request would not be heard, and a signal after a request that was not heard is a signal first.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal

from mpsagent.core import actions as act
from mpsagent.core.model import Status
from mpsagent.core.world import World

GIVE_UP = 30.0
"""Seconds after SIGKILL until a process that still exists is reported as unkillable (stuck in the driver)."""
ASK_AGAIN = 1.0
"""Seconds until a ``terminate_client`` that could not be delivered is tried again."""
Section = Literal["limits", "switch", "hang", "order"]
"""Whose rule it is: with its enforcement off the climb ends. ``order``: a person asked for it."""


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
    section: Section = "order"
    asked: bool = False
    again_at: float | None = None
    """``terminate_client`` was not delivered: when to try again."""
    blocks: bool = False
    """``terminate_client`` has been sent and not been answered: the daemon waits for this client."""


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
    section: Section,
    start: int | None = None,
    signals_only: bool = False,
    hook: bool = False,
) -> LadderMemory:
    """Put a client on the ladder; one that is on it already stays where it is, unless it now may be signalled. A
    process that has ended, that is not the user's that MPS named, or that did not start at ``start`` (None: not known
    before) is not put on it."""
    known, process = memory.climbs.get(pid), world.processes.get(pid)
    if process is None or process.uid != uid or (start is not None and process.start != start):
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
        section=section,
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
    busy = any(c.blocks and c.rung < Rung.UNKILLABLE for c in memory.climbs.values() if _same(world, c))
    for pid, climb in memory.climbs.items():
        if not _same(world, climb) or not _wanted(world, climb):
            continue
        climb, made, at = _step(world, climb, now, busy)
        busy = busy or climb.blocks
        todo += made
        climbs[pid] = climb
        if at is not None and (wake is None or at < wake):
            wake = at
    if climbs == memory.climbs:
        return memory, todo, wake
    return replace(memory, climbs=climbs), todo, wake


def blocks(memory: LadderMemory) -> bool:
    """Whether the control daemon waits for a client that is being ended, which is no hang of the daemon: SIGKILL of
    that client ends it (recording 03, Q6)."""
    return any(c.blocks and c.rung < Rung.UNKILLABLE for c in memory.climbs.values())


def _same(world: World, climb: Climb) -> bool:
    process = world.processes.get(climb.pid)
    return process is not None and (process.uid, process.start) == (climb.uid, climb.start)


def _wanted(world: World, climb: Climb) -> bool:
    """False when the client has left its server by itself before it was asked, or when its rule is enforced no more."""
    if climb.section != "order" and not getattr(world.rules(climb.uid), f"enforce_{climb.section}"):
        return False
    if climb.rung > Rung.TERMINATE or climb.server not in world.state.servers:
        return True
    client = world.state.clients.get(climb.pid)
    return client is not None and client.server == climb.server


def _may_ask(world: World, climb: Climb) -> bool | None:
    """Whether ``terminate_client`` can be sent now; None when there is nothing to protect and signals come first."""
    server, control = world.state.servers.get(climb.server), world.state.control
    if server is None or server.forced or climb.pid in server.sticky:
        return None
    client = world.state.clients.get(climb.pid)
    if client is not None and client.terminated and not climb.blocks:
        return None  # asked a second time, the daemon would wait until it exits
    # While a `quit` is in progress nothing is heard; in FAULT the request blocks the daemon (recording 03, Q4).
    if server.status is not Status.FAULT and (control is None or control.quitting is None):
        return True
    alone = len(world.state.clients_of(climb.server)) <= 1
    return None if alone else False


def _step(world: World, climb: Climb, now: float, busy: bool) -> tuple[Climb, list[act.Action], float | None]:
    """One client's next step: at most one action, and when to look again."""
    if climb.rung is Rung.HOOK:
        if climb.asked and now < climb.at + climb.hook_deadline:
            return climb, [], climb.at + climb.hook_deadline
        if not climb.asked:
            return replace(climb, asked=True), [_hook(climb)], climb.at + climb.hook_deadline
        climb = replace(climb, rung=Rung.TERMINATE, at=now, asked=False)
    may_ask = _may_ask(world, climb) if climb.rung is Rung.TERMINATE else True
    if may_ask is None:
        climb = replace(climb, rung=Rung.SIGTERM, at=now, asked=False)
    if climb.rung is Rung.TERMINATE:
        # The hand reports the outcome at the deadline; hang.control on top of it is for a hand that does not.
        given_up = climb.at + climb.deadline + world.policy.hang_control
        if climb.asked and not climb.blocks and climb.again_at is not None:
            if now < climb.again_at:
                return climb, [], climb.again_at
        elif climb.asked and now < given_up:
            return climb, [], given_up
        if not climb.asked or not climb.blocks:
            if busy or not may_ask:
                return climb, [], None
            first = act.TerminateClient(
                server=climb.server,
                pid=climb.pid,
                uid=climb.uid,
                start=climb.start,
                deadline=climb.deadline,
                reason=climb.reason,
                rule=climb.rule,
            )
            at = climb.at if climb.asked else now
            climb = replace(climb, asked=True, blocks=True, at=at, again_at=None)
            return climb, [first], max(given_up, now + climb.deadline)
        climb = replace(climb, rung=Rung.SIGTERM, at=now, asked=False)
    if climb.rung is Rung.SIGTERM:
        # A stopped process cannot act on SIGTERM, and the daemon may be waiting for it.
        grace = 0.0 if world.processes[climb.pid].stopped else climb.kill_grace
        if climb.asked and now < climb.at + grace:
            return climb, [], climb.at + grace
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
        if climb is None or not climb.blocks:
            return memory
        if outcome.ok or outcome.at >= climb.at + climb.deadline:
            moved = replace(climb, blocks=not outcome.ok)
            if climb.rung is Rung.TERMINATE:
                moved = replace(moved, rung=Rung.SIGTERM, at=outcome.at, asked=False)
        else:
            moved = replace(climb, blocks=False, again_at=outcome.at + ASK_AGAIN)
        return replace(memory, climbs={**memory.climbs, climb.pid: moved})
    if isinstance(action, act.RunHook):
        pid = action.subject.get("pid")
        climb = memory.climbs.get(pid) if isinstance(pid, int) else None
        if climb is None or climb.rung is not Rung.HOOK:
            return memory
        moved = replace(climb, rung=Rung.TERMINATE, at=outcome.at, asked=False)
        return replace(memory, climbs={**memory.climbs, climb.pid: moved})
    return memory
