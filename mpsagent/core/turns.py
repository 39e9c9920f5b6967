"""Taking turns: the nudge, and the end of a holder's turn.

The nudge: MPS tries to shut a contested server down with a doubling back-off, so the GPU idles after the holder has
left (1.3 to 3.9 s, growing with the time held; recording 02, R3). ``shutdown_server`` once, when the last client has
gone, ends that (0.51 to 0.57 s whatever the time held).

The end of a turn: once another user waits, the holder has ``switch.after``, a warning, ``switch.grace``, then the
action. New clients of the holder do not reset that clock, and MPS goes on admitting them: B could starve for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core import ladder
from mpsagent.core.ladder import LadderMemory, Rung, Section
from mpsagent.core.model import Client, Server, Status
from mpsagent.core.world import World
from mpsagent.mps.units import duration_text

PROMISE = "promise 2: the GPU is never idle while somebody waits"
NUDGE_AFTER = 0.5
"""MPS itself asks an idle server to make way when somebody new comes; the agent does after this many seconds."""
AGAIN = 1.0
"""Seconds until a nudge, a forced shutdown or a ``quit`` that was refused is sent again."""
FORCED_AGAIN = 20.0
"""Seconds until a forced shutdown that nobody heard of again is repeated: more than any deadline of the front-end."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A contested server. ``since``: when somebody else first waited; ``ending``: when its end was begun; ``forced``:
    its end by force has been asked for, ``again_at``: not to be repeated before."""

    server: int
    uid: int
    since: float
    warned: float | None = None
    ending: float | None = None
    forced: bool = False
    quit: bool = False
    reported: bool = False
    section: Section = "switch"
    again_at: float = float("-inf")
    members: Mapping[int, int] = field(default_factory=dict)
    """pid -> uid of the clients that it has now, or had when its server went."""
    starts: Mapping[int, int] = field(default_factory=dict)
    """pid -> start time of these processes, so that no later one with the same pid is taken for them."""


@dataclass(frozen=True, slots=True)
class TurnsMemory:
    """``nudged``: the idle period (server, since) that has been ended, ``nudge_at``: not to be repeated before."""

    nudged: tuple[int, float] | None = None
    nudge_at: float = float("-inf")
    turn: Turn | None = None
    tenure: tuple[int, float, float | None] | None = None
    """Who holds the GPU, since when, and when he was warned. A user's next server goes on with the tenure of his last:
    one of his clients that comes while that exits is served before all others (recording 01, S4)."""
    leaving: tuple[Turn, ...] = ()
    """Turns whose server is being forced out, until their leftovers have been put on the ladder."""


def decide(
    world: World, memory: TurnsMemory, ladders: LadderMemory, now: float
) -> tuple[TurnsMemory, LadderMemory, list[act.Action], float | None]:
    control = world.state.control
    if control is None or control.exited is not None or control.quitting is not None:
        return only_leftovers(world, memory, ladders, now)
    memory, ladders = _leftovers(world, memory, ladders, now)
    memory, todo, wake = _nudge(world, memory, now)
    memory = replace(memory, tenure=_tenure(world, memory))
    memory = replace(memory, turn=_contested(world, memory.turn, memory.tenure))
    if memory.turn is None:
        return memory, ladders, todo, wake
    server = world.state.servers[memory.turn.server]
    turn, ladders, made, at = _turn(world, memory.turn, server, ladders, now)
    memory = replace(memory, turn=turn)
    if (turn.forced or turn.quit) and all(left.server != turn.server for left in memory.leaving):
        memory = replace(memory, leaving=(*memory.leaving, turn))
    return memory, ladders, todo + made, min((t for t in (wake, at) if t is not None), default=None)


def only_leftovers(
    world: World, memory: TurnsMemory, ladders: LadderMemory, now: float
) -> tuple[TurnsMemory, LadderMemory, list[act.Action], float | None]:
    """What there is to decide while no turns are taken: nobody is served, or nobody is heard."""
    memory, ladders = _leftovers(world, memory, ladders, now)
    return replace(memory, turn=None, nudged=None, tenure=None), ladders, [], None


# --- the nudge --------------------------------------------------------------------------------------------------------


def _nudge(world: World, memory: TurnsMemory, now: float) -> tuple[TurnsMemory, list[act.Action], float | None]:
    """Once in each idle period. One that began before anybody else waited is left to MPS for a moment: it asks the
    server itself when the first of them comes."""
    server = world.holder()
    if server is None or server.uid is None or server.status is not Status.ACTIVE:
        return memory, [], None
    if server.idle_since is None or server.stop_tried is not None or world.clients(server):
        return memory, [], None  # at work, or MPS is asking it just now
    waits = [w for w in world.state.waiting if w.uid != server.uid and not w.gone]
    mark = (server.pid, server.idle_since)
    if not waits or memory.nudged == mark:
        return memory, [], None
    first = min(w.since for w in waits)
    due = max(memory.nudge_at, server.idle_since if server.idle_since >= first else first + NUDGE_AFTER)
    if now < due:
        return memory, [], due
    reason = f"the last client of user {server.uid} has gone and user {waits[0].uid} waits"
    enforce = world.rules(server.uid).enforce_switch
    nudge = act.ShutdownServer(server=server.pid, reason=reason, rule=PROMISE, enforce=enforce)
    return replace(memory, nudged=mark), [nudge], None


# --- whose turn it is -------------------------------------------------------------------------------------------------


def _tenure(world: World, memory: TurnsMemory) -> tuple[int, float, float | None] | None:
    server, known = world.state.holder(), memory.tenure
    if server is None or server.uid is None or server.ready is None:
        return known
    if known is None or known[0] != server.uid:
        return (server.uid, server.ready, None)
    if not any(w.uid != server.uid and not w.gone for w in world.state.waiting):
        return (*known[:2], None)
    return known if memory.turn is None else (*known[:2], memory.turn.warned)


def _contested(world: World, turn: Turn | None, tenure: tuple[int, float, float | None] | None) -> Turn | None:
    """The turn that is running out, or None. Its clock starts when somebody else begins to wait for this server and
    stops only when nobody else waits any more or the server has gone. An end that has been begun is carried through."""
    server = world.state.holder()
    if server is None or server.uid is None or server.uid == world.parked_uid or server.forced:
        return None
    same = turn is not None and turn.server == server.pid
    since = [w.since for w in world.state.waiting if w.uid != server.uid and not w.gone]
    if server.ready is None or not (since or (same and turn is not None and turn.ending is not None)):
        return None
    if turn is not None and same:
        return turn
    held, warned = (server.ready, None) if tenure is None else tenure[1:]
    return Turn(server=server.pid, uid=server.uid, since=max(min(since), held), warned=warned)


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
    if turn.ending is not None and rules.enforce_switch:
        return _ending(world, turn, ladders, now)
    if times is None or server.status is Status.SHUTTING_DOWN:
        return turn, ladders, [], None
    warn, end = times
    waiting = world.others_waiting(server)
    rule = rules.origin("switch.after").key
    if not waiting:  # the end that was begun is not enforced any more
        return turn, ladders, [], None
    if now < warn:
        return turn, ladders, [], warn
    todo: list[act.Action] = []
    first = turn.warned is None
    warned = now if turn.warned is None else turn.warned
    turn = replace(turn, warned=warned)
    end = max(end, warned + rules.switch_grace)  # nobody's turn ends without the grace, also after a reload
    if first:
        reason = (
            f"user {turn.uid} has held the GPU for {duration_text(now - turn.since)} while user {waiting[0]} waits; "
            f"its turn ends in {duration_text(end - now)} ({rules.switch_action})"
        )
        todo.append(act.Report(kind="turn.warning", reason=reason, rule=rule, uid=turn.uid, server=turn.server))
    if now < end:
        return turn, ladders, todo, end
    reason = f"the turn of user {turn.uid} is over: user {waiting[0]} has waited {duration_text(now - turn.since)}"
    if rules.switch_action == "none" or not rules.enforce_switch:
        if not turn.reported:
            todo.append(act.Report(kind="turn.over", reason=reason, rule=rule, uid=turn.uid, server=turn.server))
        return replace(turn, reported=True), ladders, todo, None
    todo.append(act.Report(kind="turn.ended", reason=reason, rule=rule, uid=turn.uid, server=turn.server))
    quits = rules.switch_action == "quit"
    turn, ladders, made, wake = _ending(world, replace(turn, ending=now, quit=quits), ladders, now)
    return turn, ladders, todo + made, wake


def _ending(
    world: World, turn: Turn, ladders: LadderMemory, now: float
) -> tuple[Turn, LadderMemory, list[act.Action], float | None]:
    """``terminate_client`` for each client there is, then the server by force. Who comes meanwhile goes with it; nobody
    else has clients on this server, so a client that does not answer does not hold up the rest."""
    assert turn.ending is not None
    due = turn.ending + world.policy.hang_terminate
    rules, policy = world.rules(turn.uid), world.policy
    clients = world.state.clients_of(turn.server)
    turn = _remember(world, turn, clients)
    if turn.quit:
        return _quitting(world, turn, ladders, now)
    rule = rules.origin("switch.after").key
    if turn.ending == now:
        for client in clients:
            ladders = ladder.begin(
                world, ladders, client.pid, turn.members[client.pid], turn.server, now,
                reason=f"the turn of user {turn.uid} is over", rule=rule, section="switch", hook=True,
            )  # fmt: skip
    if now < turn.again_at:
        return turn, ladders, [], turn.again_at
    asking = any(c.server == turn.server and c.rung <= Rung.TERMINATE for c in ladders.climbs.values())
    due += policy.hook_deadline if rules.before_end_hook else 0.0
    if asking and now < due and not turn.forced:
        return turn, ladders, [], due
    reason = f"the turn of user {turn.uid} is over and its clients have been asked to end"
    force = act.ShutdownServer(server=turn.server, force=True, reason=reason, rule=rule)
    return replace(turn, forced=True, again_at=now + FORCED_AGAIN), ladders, [force], now + FORCED_AGAIN


def _quitting(
    world: World, turn: Turn, ladders: LadderMemory, now: float
) -> tuple[Turn, LadderMemory, list[act.Action], float | None]:
    if now < turn.again_at:
        return turn, ladders, [], turn.again_at
    rules = world.rules(turn.uid)
    timeout = max(1, round(rules.kill_grace))
    refused = ", ".join(f"{w.pid} of user {w.uid}" for w in world.state.waiting[:20]) or "none"
    reason = f"the turn of user {turn.uid} is over; waiting clients that are refused: {refused}"
    action = act.QuitControl(timeout=timeout, reason=reason, rule=rules.origin("switch.action").key)
    again = now + timeout + FORCED_AGAIN
    return replace(turn, again_at=again), ladders, [action], again


def _remember(world: World, turn: Turn, clients: tuple[Client, ...]) -> Turn:
    members = {c.pid: c.uid if c.uid is not None else turn.uid for c in clients}
    starts = {pid: world.processes[pid].start for pid in members if pid in world.processes}
    starts = {pid: turn.starts.get(pid, start) for pid, start in starts.items()}
    if (members, starts) == (turn.members, turn.starts):
        return turn
    return replace(turn, members=members, starts=starts)


def _leftovers(
    world: World, memory: TurnsMemory, ladders: LadderMemory, now: float
) -> tuple[TurnsMemory, LadderMemory]:
    """After a forced shutdown the processes live on with MPS_RPC_FAILURE (recording 01, S6): signal what is left."""
    staying: list[Turn] = []
    for turn in memory.leaving:
        if turn.server in world.state.servers:
            staying.append(_remember(world, turn, world.state.clients_of(turn.server)))
            continue
        rules = world.rules(turn.uid)
        for pid, uid in turn.members.items():
            if pid in turn.starts:
                ladders = ladder.begin(
                    world, ladders, pid, uid, turn.server, now,
                    reason=f"left over from the turn of user {turn.uid}", start=turn.starts[pid],
                    rule=rules.origin("switch.action").key, section=turn.section, signals_only=True,
                )  # fmt: skip
    if tuple(staying) == memory.leaving:
        return memory, ladders
    return replace(memory, leaving=tuple(staying)), ladders


def note(memory: TurnsMemory, outcome: act.Outcome) -> TurnsMemory:
    """What did not get through is sent again, after a moment. A ``quit`` that is not answered in time has been heard:
    the log says so, and nothing else is decided while it goes on."""
    action, turn = outcome.action, memory.turn
    if outcome.ok or not action.enforce:
        return memory
    if isinstance(action, act.ShutdownServer) and not action.force:
        return replace(memory, nudged=None, nudge_at=outcome.at + AGAIN)
    ours = isinstance(action, act.QuitControl) or (
        isinstance(action, act.ShutdownServer) and turn is not None and action.server == turn.server
    )
    if turn is not None and turn.ending is not None and ours:
        return replace(memory, turn=replace(turn, again_at=outcome.at + AGAIN))
    return memory
