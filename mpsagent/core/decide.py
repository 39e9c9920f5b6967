"""``decide(world, memory, now) -> Decision``: all decisions in one call, without a clock and without an effect.

``now`` and all times are seconds since the epoch on a clock that does not jump. The caller carries the actions out
(those with ``enforce`` False are only reported), tells :func:`note` how each ended, and calls again on every event and
no later than ``deadline``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core import caps, drain, faults, hangs, ladder, limits, orphans, starts, turns
from mpsagent.core.world import World

PASSES = 6
"""More than one decision ever sets off in a row."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the decisions remember between two calls; one part for each of them."""

    limits: limits.LimitsMemory = field(default_factory=limits.LimitsMemory)
    ladder: ladder.LadderMemory = field(default_factory=ladder.LadderMemory)
    turns: turns.TurnsMemory = field(default_factory=turns.TurnsMemory)
    faults: faults.FaultsMemory = field(default_factory=faults.FaultsMemory)
    hangs: hangs.HangsMemory = field(default_factory=hangs.HangsMemory)
    caps: caps.CapsMemory = field(default_factory=caps.CapsMemory)
    drain: drain.DrainMemory = field(default_factory=drain.DrainMemory)
    orphans: orphans.OrphansMemory = field(default_factory=orphans.OrphansMemory)
    starts: starts.StartsMemory = field(default_factory=starts.StartsMemory)


@dataclass(frozen=True, slots=True)
class Decision:
    """``deadline``: when to decide again at the latest, None when only an event can change anything."""

    memory: Memory
    actions: list[act.Action]
    deadline: float | None


def decide(world: World, memory: Memory, now: float) -> Decision:
    """Passes over all decisions until one has nothing to add: what the ladder does may end a turn, and so on."""
    todo: list[act.Action] = []
    for _ in range(PASSES):
        before = memory
        memory, made, wake = _pass(world, before, now)
        todo += made
        if not made and memory == before:
            break
    return Decision(memory, todo, wake)


def _pass(world: World, memory: Memory, now: float) -> tuple[Memory, list[act.Action], float | None]:
    # Arming comes first: its window is 55 ms (recording 04, T1). The ladder comes last and takes up what others began.
    start, kills, wake9 = starts.decide(world, memory.starts, memory.limits, now)
    limit, todo, wake1 = limits.decide(world, memory.limits, now, start.killed)
    todo += kills  # what is asked for before the daemon has noticed is heard before the next start (X22, X23)
    hang, made, wake2 = hangs.decide(world, memory.hangs, memory.ladder, now)
    todo += made
    orphan, made, wake8 = orphans.decide(world, memory.orphans, now)
    todo += made
    fault, climbs, made, wake3 = faults.decide(world, memory.faults, memory.ladder, now)
    todo += made
    cap, climbs, made, wake4 = caps.decide(world, memory.caps, climbs, now)
    todo += made
    drained, turn, made, wake5 = drain.decide(world, memory.drain, memory.turns, now)
    todo += made
    if world.drain is None:
        turn, climbs, made, wake6 = turns.decide(world, turn, climbs, now)
    else:
        turn, climbs, made, wake6 = turns.only_leftovers(world, turn, climbs, now)
    todo += made
    climbs, made, wake7 = ladder.decide(world, climbs, now)
    todo += made
    wakes = [wake for wake in (wake1, wake2, wake3, wake4, wake5, wake6, wake7, wake8, wake9) if wake is not None]
    memory = Memory(limit, climbs, turn, fault, hang, cap, drained, orphan, start)
    return memory, todo, min(wakes, default=None)


def note(memory: Memory, outcome: act.Outcome) -> Memory:
    """The memory after an action has ended."""
    return Memory(
        limits.note(memory.limits, outcome),
        ladder.note(memory.ladder, outcome),
        turns.note(memory.turns, outcome),
        faults.note(memory.faults, outcome),
        hangs.note(memory.hangs, outcome),
        memory.caps,
        drain.note(memory.drain, outcome),
        memory.orphans,
        starts.note(memory.starts, outcome),
    )


def end_client(world: World, memory: Memory, pid: int, now: float, *, reason: str, rule: str, at_once: bool) -> Memory:
    """Put a client on the ladder by somebody's order. ``at_once``: without the hook."""
    client = world.state.clients.get(pid)
    if client is None or client.uid is None:
        return memory
    climbs = ladder.begin(
        world,
        memory.ladder,
        pid,
        client.uid,
        client.server,
        now,
        reason=reason,
        rule=rule,
        section="order",
        hook=not at_once,
    )
    return replace(memory, ladder=climbs)


def start_again(memory: Memory) -> Memory:
    """Leave the ``failed`` state: the next decision starts the control daemon."""
    return replace(memory, hangs=hangs.HangsMemory())
