"""Limits without a gap: the floor, the parked server, arming, verification.

MPS hands its default limits to a server when that becomes Ready, and a client that was waiting is attached in the same
moment; nothing sent after Ready reaches it (recording 02, R2: 4 of 4 escaped). So the defaults have to be right before.
With a parked server every first client of a user waits for a server to exit, 55 ms or more (recording 04, T1), and a
changed default does not reach a running server (recording 06, V1), so one can arm while the holder goes on working.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.model import Server, Status
from mpsagent.core.world import World, exceeds, limits_text, same_limits
from mpsagent.mps.limits import Limits

RETRY = 1.0
"""Seconds before a refused or unanswered setting is tried again; doubles up to RETRY_MOST."""
RETRY_MOST = 30.0
RETRY_UNHEARD = 0.002
"""The same when another front-end was connected: most stay for a millisecond (conformance scenario X25)."""
SLOW_START = 5.0
"""Seconds after which a server that is not Ready (60 to 600 ms) may end without having been it: then the next one
starts at once, so the defaults must fit both. What is asked while the daemon blocks is heard before the next start."""
CORRECT_AGAIN = 5.0
"""Seconds until a running server that refused its user's limits is told again."""
PROMISE = "promise 1: no client gets more than its policy"


@dataclass(frozen=True, slots=True)
class LimitsMemory:
    """``asked``: defaults on their way; ``known``: defaults the daemon has confirmed; ``refused``: the wish that failed
    last, not sent again before ``retry_at``; ``given``: by server, what its next context gets; ``changing``: servers
    whose limits are on their way; ``correct_at``: when to try again for those that refused; ``drifted``: servers that
    started with something else than their user's limits; ``would``: the user whom arming was last only reported for."""

    daemon: int | None = None
    asked: Limits | None = None
    known: Limits | None = None
    refused: Limits | None = None
    failures: int = 0
    retry_at: float = float("-inf")
    parking_until: float = float("-inf")
    door_asked: bool = False
    door_at: float = float("-inf")
    given: Mapping[int, Limits] = field(default_factory=dict)
    changing: frozenset[int] = frozenset()
    correct_at: Mapping[int, float] = field(default_factory=dict)
    drifted: frozenset[int] = frozenset()
    would: int | None = None


def next_users(world: World, killed: Collection[int] = ()) -> tuple[int, ...]:
    """The users of whom one is served next, the likeliest first; nearly always one.

    Who waits for the present server's own user waits because that is leaving, and goes first, whoever waits longer
    (conformance scenario X20); but last, when that server has been ``killed`` before it was Ready (X26); when the guess
    was wrong more than once, it is everybody. A server that is started for a client that has died leads straight to the
    next one (X1), so then there are more.
    """
    server, state = world.state.holder(), world.state
    users = list(state.next_users())
    if len(killed) > 1:
        return tuple(users)
    if server is not None and server.uid in users:
        others = [uid for uid in users if uid != server.uid]
        users = [*others, server.uid] if server.pid in killed else [server.uid, *others]
    found: list[int] = []
    for uid in users:
        found.append(uid)
        if any(w.uid == uid and not w.gone for w in state.waiting):
            break
    return tuple(found)


def _least(limits: list[Limits]) -> Limits:
    """What is within all of these."""
    memory: dict[int, int] = {}
    for one in limits:
        for device, size in one.memory.items():
            memory[device] = min(size, memory.get(device, size))
    return Limits(min(one.threads for one in limits), memory)


def decide(
    world: World, memory: LimitsMemory, now: float, killed: Collection[int] = ()
) -> tuple[LimitsMemory, list[act.Action], float | None]:
    """``killed``: servers that have been killed before they were Ready, since one was Ready last."""
    control = world.state.control
    if control is None or control.exited is not None or not world.control_alive:
        return LimitsMemory(), [], None
    if memory.daemon != control.pid:  # a new daemon has forgotten every default (recording 06, V4)
        memory = LimitsMemory(daemon=control.pid)
    if control.quitting is not None:
        return memory, [], None
    todo: list[act.Action] = []
    memory, armed = _arm(world, memory, now, killed)
    todo += armed
    memory, parked = _park(world, memory, now)
    todo += parked
    memory, verified = _verify(world, memory, now)
    todo += verified
    waits = [memory.retry_at, memory.parking_until, memory.door_at, *memory.correct_at.values()]
    waits += [s.started + SLOW_START for s in world.state.servers.values() if s.status is Status.INITIALIZING]
    waits = [at for at in (*waits, _between_servers(world, killed)) if at > now]
    return memory, todo, min(waits, default=None)


def _arm(
    world: World, memory: LimitsMemory, now: float, killed: Collection[int]
) -> tuple[LimitsMemory, list[act.Action]]:
    """Keep the daemon's defaults at what the next server has to start with."""
    server = world.state.holder()
    starting = server is not None and server.status is Status.INITIALIZING and server.pid not in killed
    if starting and server is not None and now < server.started + SLOW_START:
        return memory, []  # the daemon answers nothing until Ready; what is armed is for this very server
    if memory.known is not None and now < _between_servers(world, killed):
        return memory, []  # the next server is on its way, for whoever was armed for when the last one was still there
    users = next_users(world, killed)
    uid = users[0] if users else None
    if not world.limits_enforced:
        return _unarmed(world, memory, uid, now)
    wanted = _least([world.limits(user) for user in users]) if users else world.floor()
    if not _due(memory, wanted, now):
        settled = memory.known is not None and same_limits(memory.known, wanted) and memory.refused is not None
        if settled:  # another wish was refused, unheard, and is none any more
            memory = replace(memory, refused=None, failures=0, retry_at=float("-inf"))
        return memory, []
    if uid is None:
        reason, rule = f"nobody waits: back to the floor, {limits_text(wanted)}", PROMISE
    else:
        reason = f"user {uid} is served next: {limits_text(wanted)}"
        rule = world.rules(uid).origin("threads").key or PROMISE
    action = act.SetDefaults(limits=wanted, uid=uid, reason=reason, rule=rule)
    return replace(memory, asked=wanted), [action]


def _between_servers(world: World, killed: Collection[int]) -> float:
    """Until when the next server's start has to be expected, of which nothing is in the log yet: one has exited and
    somebody waits. Whose it is can no longer be told from the order of arrival (conformance scenario X20), and what is
    sent now may be heard before it starts (found by killing the agent under load: one user got another's threads).
    After a server that was ``killed`` because of its limits, what is sent is for the next one."""
    if world.state.holder() is not None or not world.state.waiting:
        return float("-inf")
    ended = world.state.ended
    last = max(ended, key=lambda pid: ended[pid], default=0)
    return float("-inf") if last == 0 or last in killed else ended[last] + SLOW_START


def _due(memory: LimitsMemory, wanted: Limits, now: float) -> bool:
    """Whether this wish has to be sent: it is not what the daemon has, nothing is on its way, and it was not refused
    just now. Another wish than the refused one does not wait."""
    if memory.asked is not None or (memory.known is not None and same_limits(memory.known, wanted)):
        return False
    return memory.refused is None or now >= memory.retry_at or not same_limits(memory.refused, wanted)


def _unarmed(world: World, memory: LimitsMemory, uid: int | None, now: float) -> tuple[LimitsMemory, list[act.Action]]:
    """Limits are only reported: take back what was set before that, and say for whom one would arm."""
    ours = memory.known is not None or memory.refused is not None
    if ours and _due(memory, Limits(), now):
        reason = "limits are enforced no longer: the defaults that the agent had set are taken back"
        action = act.SetDefaults(limits=Limits(), uid=None, reason=reason, rule="enforce")
        return replace(memory, asked=Limits()), [action]
    if uid == memory.would or (uid is not None and uid not in world.identities):
        return memory, []
    memory = replace(memory, would=uid)
    if uid is None:
        return memory, []
    rules = world.rules(uid)
    wanted = rules.limits(world.devices)
    reason = f"user {uid} is served next: {limits_text(wanted)}"
    rule = rules.origin("threads").key
    return memory, [act.SetDefaults(limits=wanted, uid=uid, reason=reason, rule=rule, enforce=False)]


def _park(world: World, memory: LimitsMemory, now: float) -> tuple[LimitsMemory, list[act.Action]]:
    """Open the door once the floor is confirmed, and park a server while nobody has one.

    The door cannot wait until that server is Ready: servers run as their user and connect through the same directory.
    Who comes in before it is there gets the floor, which is less than anybody's policy, never more.
    """
    floor, state = world.floor(), world.state
    at_floor = memory.known is not None and same_limits(memory.known, floor) and memory.asked is None
    needed = floor != Limits()
    server = state.holder()
    if (at_floor or not needed) and not world.door_open and not memory.door_asked and now >= memory.door_at:
        why = "the floor is set and confirmed" if needed else "no limits are enforced"
        return replace(memory, door_asked=True), [act.OpenDoor(reason=f"{why}: users may come in", rule=PROMISE)]
    if server is not None and memory.parking_until > now:
        memory = replace(memory, parking_until=float("-inf"))  # it was heard: the next one need not wait
    if not needed or server is not None or state.waiting or not at_floor or memory.parking_until > now:
        return memory, []
    if not world.door_open:
        return memory, []
    start = act.StartServer(
        uid=world.parked_uid,
        reason="nobody has a server: park one, so that the next user's first client has to wait while it is armed for",
        rule=PROMISE,
    )
    return replace(memory, parking_until=now + 5.0), [start]


def _verify(world: World, memory: LimitsMemory, now: float) -> tuple[LimitsMemory, list[act.Action]]:
    """Hold what each server said it started with against its user's limits; correct it for later clients."""
    todo: list[act.Action] = []
    given = {pid: limits for pid, limits in memory.given.items() if pid in world.state.servers}
    drifted = memory.drifted & given.keys()
    changing = memory.changing & given.keys()
    correct_at = {pid: at for pid, at in memory.correct_at.items() if pid in given}
    for server in world.state.servers.values():
        uid = server.uid
        if uid is None or uid == world.parked_uid or uid not in world.identities:
            continue
        if not server.reported or server.ready is None or server.status is Status.SHUTTING_DOWN:
            continue
        rules = world.rules(uid)
        wanted = rules.limits(world.devices)
        first = server.pid not in given
        if first:
            given[server.pid] = server.limits
            ok = same_limits(server.limits, wanted)
            todo.append(_verdict(server, uid, wanted, ok, rules.enforce_limits))
            if not ok and rules.enforce_limits:
                drifted |= {server.pid}
        if not rules.enforce_limits or server.pid in changing or now < correct_at.get(server.pid, now):
            continue
        if not same_limits(given[server.pid], wanted):
            why = "it started with other limits" if first else "the policy has changed"
            todo.append(
                act.SetServerLimits(
                    server=server.pid,
                    limits=wanted,
                    reason=f"{why}: later clients of user {uid} get {limits_text(wanted)}",
                    rule=rules.origin("threads").key,
                )
            )
            changing |= {server.pid}
            correct_at.pop(server.pid, None)
        elif server.idle_since is not None and server.idle_since > server.ready:
            drifted -= {server.pid}  # corrected, and those who had other limits have gone
    new = replace(memory, given=given, drifted=drifted, changing=changing, correct_at=correct_at)
    return (memory if new == memory else new), todo


def _verdict(server: Server, uid: int, wanted: Limits, ok: bool, enforced: bool) -> act.Report:
    said = limits_text(server.limits)
    if ok:
        reason, kind = f"server {server.pid} of user {uid} started with {said}", "limits.verified"
    else:
        more = "MORE" if exceeds(server.limits, wanted) else "less"
        reason = (
            f"server {server.pid} of user {uid} started with {said}: {more} than its policy ({limits_text(wanted)})"
        )
        kind = "limits.mismatch"
        if not enforced:
            reason, kind = f"{reason}, which is not enforced", "limits.not_enforced"
    return act.Report(kind=kind, reason=reason, rule=PROMISE, uid=uid, server=server.pid)


def note(memory: LimitsMemory, outcome: act.Outcome) -> LimitsMemory:
    """What became of an action."""
    action = outcome.action
    if not action.enforce:
        return memory
    if isinstance(action, act.SetDefaults):
        if outcome.ok:
            never = float("-inf")
            return replace(memory, known=action.limits, asked=None, refused=None, failures=0, retry_at=never)
        wait = min((RETRY if outcome.heard else RETRY_UNHEARD) * 2.0**memory.failures, RETRY_MOST)
        failures = min(memory.failures + 1, 10)
        at = outcome.at + wait
        # Nobody knows what a refused batch has left behind: the next wish is sent whatever it is.
        known = None if outcome.heard else memory.known
        return replace(memory, known=known, asked=None, refused=action.limits, failures=failures, retry_at=at)
    if isinstance(action, act.SetServerLimits):
        changing = memory.changing - {action.server}
        if outcome.ok:
            return replace(memory, given={**memory.given, action.server: action.limits}, changing=changing)
        correct_at = {**memory.correct_at, action.server: outcome.at + CORRECT_AGAIN}
        return replace(memory, changing=changing, correct_at=correct_at)
    if isinstance(action, act.OpenDoor):  # the world says whether it is open; if somebody shuts it, it is opened again
        return replace(memory, door_asked=False, door_at=outcome.at + RETRY)
    return memory
