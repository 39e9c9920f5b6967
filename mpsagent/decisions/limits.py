"""Limits without a gap: the floor, the parked server, arming, verification.

MPS hands its default limits to a server when that becomes Ready, and a client that was waiting is attached in the same
moment; nothing sent after Ready reaches it (recording 02, R2: 4 of 4 escaped). So the defaults have to be right before.
With a parked server every first client of a user waits for a server to exit, 55 ms or more (recording 04, T1), and a
changed default does not reach a running server (recording 06, V1), so one can arm while the holder goes on working.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.decisions import actions as act
from mpsagent.decisions.world import World, exceeds, limits_text, same_limits
from mpsagent.facts.model import Limits, Server, Status

RETRY = 1.0
"""Seconds before a refused or unanswered setting is tried again; doubles up to RETRY_MOST."""
RETRY_MOST = 30.0
PROMISE = "promise 1: no client gets more than its policy"


@dataclass(frozen=True, slots=True)
class LimitsMemory:
    """``asked``: defaults on their way; ``known``: defaults the daemon has confirmed; ``given``: by server, what its next
    context will get; ``drifted``: servers that started with something else than their user's limits."""

    daemon: int | None = None
    asked: Limits | None = None
    known: Limits | None = None
    failures: int = 0
    retry_at: float = float("-inf")
    parking_until: float = float("-inf")
    door_asked: bool = False
    given: Mapping[int, Limits] = field(default_factory=dict)
    changing: frozenset[int] = frozenset()
    drifted: frozenset[int] = frozenset()


def next_user(world: World) -> int | None:
    """The user whose server comes next, as far as the pending list tells."""
    server = world.state.holder()
    for uid in world.state.next_users():
        if server is None or server.status is Status.SHUTTING_DOWN or server.uid != uid:
            return uid
    return None


def decide(world: World, memory: LimitsMemory, now: float) -> tuple[LimitsMemory, list[act.Action], float | None]:
    control = world.state.control
    if control is None or control.exited is not None or not world.control_alive:
        return LimitsMemory(), [], None
    if memory.daemon != control.pid:  # a new daemon has forgotten every default (recording 06, V4)
        memory = LimitsMemory(daemon=control.pid)
    if control.quitting is not None:
        return memory, [], None
    todo: list[act.Action] = []
    memory, armed = _arm(world, memory, now)
    todo += armed
    memory, parked = _park(world, memory, now)
    todo += parked
    memory, verified = _verify(world, memory)
    todo += verified
    waits = [at for at in (memory.retry_at, memory.parking_until) if at > now]
    return memory, todo, min(waits, default=None)


def _arm(world: World, memory: LimitsMemory, now: float) -> tuple[LimitsMemory, list[act.Action]]:
    """Keep the daemon's defaults at what the next server has to start with."""
    server = world.state.holder()
    if server is not None and server.status is Status.INITIALIZING:
        return memory, []  # the daemon answers nothing until Ready; what is armed is for this very server
    uid = next_user(world)
    wanted = world.floor() if uid is None else world.limits(uid)
    if memory.asked is not None or (memory.known is not None and same_limits(memory.known, wanted)):
        return memory, []
    if memory.known is not None and memory.retry_at > now:
        return memory, []
    if uid is None:
        reason, rule = f"nobody waits: back to the floor, {limits_text(wanted)}", PROMISE
    else:
        reason = f"user {uid} is served next: {limits_text(wanted)}"
        rule = world.rules(uid).origin("threads").key or PROMISE
    action = act.SetDefaults(limits=wanted, uid=uid, reason=reason, rule=rule)
    return replace(memory, asked=wanted), [action]


def _park(world: World, memory: LimitsMemory, now: float) -> tuple[LimitsMemory, list[act.Action]]:
    """Start the parked server when nobody has one, and open the door once it is Ready."""
    floor, state = world.floor(), world.state
    at_floor = memory.known is not None and same_limits(memory.known, floor) and memory.asked is None
    needed = floor != Limits()
    server = state.holder()
    if not world.door_open and not memory.door_asked and at_floor:
        if not needed or (server is not None and server.status is Status.ACTIVE):
            opened = act.OpenDoor(reason="the floor is set and confirmed: users may come in", rule=PROMISE)
            return replace(memory, door_asked=True), [opened]
    if not needed or server is not None or state.waiting or not at_floor or memory.parking_until > now:
        return memory, []
    start = act.StartServer(
        uid=world.parked_uid,
        reason="nobody has a server: park one, so that the next user's first client has to wait while it is armed for",
        rule=PROMISE,
    )
    return replace(memory, parking_until=now + 5.0), [start]


def _verify(world: World, memory: LimitsMemory) -> tuple[LimitsMemory, list[act.Action]]:
    """Hold what each server said it started with against its user's limits; correct it for later clients."""
    todo: list[act.Action] = []
    given = {pid: limits for pid, limits in memory.given.items() if pid in world.state.servers}
    drifted = memory.drifted & given.keys()
    changing = memory.changing & given.keys()
    for server in world.state.servers.values():
        uid = server.uid
        if uid is None or uid == world.parked_uid or uid not in world.identities:
            continue
        if not server.reported or server.ready is None or server.status is Status.SHUTTING_DOWN:
            continue
        wanted = world.limits(uid)
        first = server.pid not in given
        if first:
            given[server.pid] = server.limits
            ok = same_limits(server.limits, wanted)
            todo.append(_verdict(server, uid, wanted, ok))
            if not ok:
                drifted |= {server.pid}
        if server.pid not in changing and not same_limits(given[server.pid], wanted):
            why = "it started with other limits" if first else "the policy has changed"
            todo.append(
                act.SetServerLimits(
                    server=server.pid,
                    limits=wanted,
                    reason=f"{why}: later clients of user {uid} get {limits_text(wanted)}",
                    rule=world.rules(uid).origin("threads").key or PROMISE,
                )
            )
            changing |= {server.pid}
    if (given, drifted, changing) == (memory.given, memory.drifted, memory.changing):
        return memory, todo
    return replace(memory, given=given, drifted=drifted, changing=changing), todo


def _verdict(server: Server, uid: int, wanted: Limits, ok: bool) -> act.Report:
    said = limits_text(server.limits)
    if ok:
        reason, kind = f"server {server.pid} of user {uid} started with {said}", "limits.verified"
    else:
        more = "MORE" if exceeds(server.limits, wanted) else "less"
        reason = f"server {server.pid} of user {uid} started with {said}: {more} than its policy ({limits_text(wanted)})"
        kind = "limits.mismatch"
    return act.Report(kind=kind, reason=reason, rule=PROMISE, uid=uid, server=server.pid)


def note(memory: LimitsMemory, outcome: act.Outcome) -> LimitsMemory:
    """What became of an action."""
    action = outcome.action
    if isinstance(action, act.SetDefaults):
        if outcome.ok:
            return replace(memory, known=action.limits, asked=None, failures=0, retry_at=float("-inf"))
        wait = min(RETRY * 2.0**memory.failures, RETRY_MOST)
        # Nobody knows what a refused batch has left behind: the next wish is sent whatever it is.
        failures = min(memory.failures + 1, 10)
        return replace(memory, known=None, asked=None, failures=failures, retry_at=outcome.at + wait)
    if isinstance(action, act.SetServerLimits):
        given = {**memory.given, action.server: action.limits} if outcome.ok else memory.given
        changing = memory.changing - {action.server} if outcome.ok else memory.changing
        return replace(memory, given=given, changing=changing)
    if isinstance(action, act.OpenDoor) and not outcome.ok:
        return replace(memory, door_asked=False)
    return memory
