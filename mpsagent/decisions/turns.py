"""Taking turns: the nudge, and the end of a holder's turn.

The nudge: MPS tries to shut a contested server down with a doubling back-off, so the GPU idles after the holder has left
(1.3 to 3.9 s, growing with the time held; recording 02, R3). ``shutdown_server`` once, when the last client has gone, ends
that (0.51 to 0.57 s whatever the time held).

The end of a turn: once another user waits, the holder has ``switch.after``, a warning, ``switch.grace``, then the action.
New clients of the holder do not reset that clock, and MPS goes on admitting them: B could starve for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.decisions import actions as act
from mpsagent.decisions import ladder
from mpsagent.decisions.ladder import LadderMemory, Rung
from mpsagent.decisions.world import World
from mpsagent.facts.model import Client, Server, Status
from mpsagent.facts.units import duration_text

PROMISE = "promise 2: the GPU is never idle while somebody waits"


@dataclass(frozen=True, slots=True)
class Turn:
    """A contested server. ``since``: when somebody else first waited; ``ending``: when its end was begun."""

    server: int
    uid: int
    since: float
    warned: float | None = None
    ending: float | None = None
    forced: bool = False
    quit: bool = False
    reported: bool = False
    members: Mapping[int, int] = field(default_factory=dict)
    """pid -> uid of the clients it had when its end began and later."""


@dataclass(frozen=True, slots=True)
class TurnsMemory:
    nudged: tuple[int, float] | None = None
    turn: Turn | None = None
    leaving: tuple[Turn, ...] = ()
    """Turns whose server has been forced out, until their leftovers have been put on the ladder."""


def decide(
    world: World, memory: TurnsMemory, ladders: LadderMemory, now: float
) -> tuple[TurnsMemory, LadderMemory, list[act.Action], float | None]:
    todo: list[act.Action] = []
    memory, ladders, left = _leftovers(world, memory, ladders, now)
    todo += left
    memory, nudged = _nudge(world, memory)
    todo += nudged
    memory = replace(memory, turn=_contested(world, memory.turn))
    if memory.turn is None or memory.turn.forced:
        return memory, ladders, todo, None
    server = world.state.servers[memory.turn.server]
    turn, ladders, made, wake = _turn(world, memory.turn, server, ladders, now)
    todo += made
    if turn.forced:
        return replace(memory, turn=turn, leaving=(*memory.leaving, turn)), ladders, todo, wake
    return replace(memory, turn=turn), ladders, todo, wake


# --- the nudge --------------------------------------------------------------------------------------------------------


def _nudge(world: World, memory: TurnsMemory) -> tuple[TurnsMemory, list[act.Action]]:
    server = world.holder()
    if server is None or server.status is not Status.ACTIVE or server.idle_since is None or world.clients(server):
        return memory, []
    waiting = world.others_waiting(server)
    mark = (server.pid, server.idle_since)
    if not waiting or memory.nudged == mark or server.stop_tried is not None:
        return memory, []  # MPS itself is asking it just now, or it has been asked
    reason = f"the last client of user {server.uid} has gone and user {waiting[0]} waits"
    return replace(memory, nudged=mark), [act.ShutdownServer(server=server.pid, reason=reason, rule=PROMISE)]


# --- whose turn it is -------------------------------------------------------------------------------------------------


def _contested(world: World, turn: Turn | None) -> Turn | None:
    """The turn that is running out, or None. Its clock starts when somebody else begins to wait for this server and
    stops only when nobody else waits any more or the server has gone."""
    server = world.state.holder()
    if server is None or server.uid is None or server.uid == world.parked_uid or server.forced:
        return None
    since = [w.since for w in world.state.waiting if w.uid != server.uid]
    if not since or server.ready is None:
        return None
    if turn is not None and turn.server == server.pid:
        return turn
    return Turn(server=server.pid, uid=server.uid, since=max(min(since), server.ready))


def deadlines(world: World, turn: Turn) -> tuple[float, float] | None:
    """When the holder is warned and when its turn ends; None when it may stay."""
    rules = world.rules(turn.uid)
    if rules.switch_exempt or rules.switch_after is None:
        return None
    warn = turn.since + rules.switch_after
    return warn, warn + rules.switch_grace


def _turn(
    world: World, turn: Turn, server: Server, ladders: LadderMemory, now: float
) -> tuple[Turn, LadderMemory, list[act.Action], float | None]:
    rules = world.rules(turn.uid)
    times = deadlines(world, turn)
    clients = world.clients(server)
    if turn.ending is not None and not turn.quit:
        return _ending(world, turn, clients, ladders, now)
    if times is None or turn.quit or server.status is Status.SHUTTING_DOWN:
        return turn, ladders, [], None
    warn, end = times
    waiting = world.others_waiting(server)
    rule = rules.origin("switch.after").key
    if now < warn:
        return turn, ladders, [], warn
    todo: list[act.Action] = []
    if turn.warned is None:
        turn = replace(turn, warned=now)
        reason = (
            f"user {turn.uid} has held the GPU for {duration_text(now - turn.since)} while user {waiting[0]} waits; "
            f"its turn ends in {duration_text(max(0.0, end - now))} ({rules.switch_action})"
        )
        todo.append(act.Report(kind="turn.warning", reason=reason, rule=rule, uid=turn.uid, server=turn.server))
    if now < end:
        return turn, ladders, todo, end
    reason = f"the turn of user {turn.uid} is over: user {waiting[0]} has waited {duration_text(now - turn.since)}"
    if rules.switch_action == "none" or not rules.enforce_switch:
        if not turn.reported:
            todo.append(act.Report(kind="turn.over", reason=reason, rule=rule, uid=turn.uid, server=turn.server))
        return replace(turn, reported=True), ladders, todo, None
    if rules.switch_action == "quit":
        timeout = max(1, round(rules.kill_grace))
        todo.append(act.QuitControl(timeout=timeout, reason=reason, rule=rules.origin("switch.action").key))
        return replace(turn, ending=now, quit=True), ladders, todo, None
    todo.append(act.Report(kind="turn.ended", reason=reason, rule=rule, uid=turn.uid, server=turn.server))
    turn, ladders, made, wake = _ending(world, replace(turn, ending=now), clients, ladders, now)
    return turn, ladders, todo + made, wake


def _ending(
    world: World, turn: Turn, clients: tuple[Client, ...], ladders: LadderMemory, now: float
) -> tuple[Turn, LadderMemory, list[act.Action], float | None]:
    """``terminate_client`` for each client there is, then the server by force. Who comes meanwhile goes with it."""
    rules = world.rules(turn.uid)
    rule = rules.origin("switch.after").key
    members = {**turn.members, **{c.pid: c.uid if c.uid is not None else turn.uid for c in clients}}
    if turn.ending == now:
        for client in clients:
            ladders = ladder.begin(
                world, ladders, client.pid, members[client.pid], turn.server, now,
                reason=f"the turn of user {turn.uid} is over", rule=rule, hook=True,
            )  # fmt: skip
    turn = replace(turn, members=members)
    first = [c for c in ladders.climbs.values() if c.server == turn.server and c.rung <= Rung.TERMINATE]
    if first:
        return turn, ladders, [], None
    reason = f"the turn of user {turn.uid} is over and its clients have been asked to end"
    force = act.ShutdownServer(server=turn.server, force=True, reason=reason, rule=rule)
    return replace(turn, forced=True), ladders, [force], None


def _leftovers(
    world: World, memory: TurnsMemory, ladders: LadderMemory, now: float
) -> tuple[TurnsMemory, LadderMemory, list[act.Action]]:
    """After a forced shutdown the processes live on with MPS_RPC_FAILURE (recording 01, S6): signal what is left."""
    staying: list[Turn] = []
    for turn in memory.leaving:
        if turn.server in world.state.servers:
            # whoever got in before the server went belongs to it as well
            late = {c.pid: turn.uid for c in world.state.clients_of(turn.server) if c.pid not in turn.members}
            staying.append(replace(turn, members={**turn.members, **late}) if late else turn)
            continue
        for pid, uid in turn.members.items():
            ladders = ladder.begin(
                world, ladders, pid, uid, turn.server, now,
                reason=f"left over from the turn of user {turn.uid}",
                rule=world.rules(turn.uid).origin("switch.action").key, signals_only=True,
            )  # fmt: skip
    if tuple(staying) == memory.leaving:
        return memory, ladders, []
    return replace(memory, leaving=tuple(staying)), ladders, []


def note(memory: TurnsMemory, outcome: act.Outcome) -> TurnsMemory:
    """A nudge or a forced shutdown that did not get through is sent again."""
    action = outcome.action
    if outcome.ok or not isinstance(action, act.ShutdownServer):
        return memory
    if action.force:
        turn = memory.turn
        if turn is not None and turn.server == action.server and turn.forced:
            return replace(memory, turn=replace(turn, forced=False), leaving=memory.leaving[:-1])
        return memory
    return replace(memory, nudged=None)
