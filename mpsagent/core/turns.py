"""Taking turns: one user at a time has the GPU, decided by the queue at the gate.

The user whose connection came first is next, or another one by ``priority`` and ``queue``. All processes of the user
whose turn it is are let in, because a program whose processes wait for each other must never be split. The next user is
let in when the last process of the one before has ended or left its server. Once another user waits, the turn has
``switch.after``, a warning, ``switch.grace``, then the action: each client is ended by the ladder (``terminate``), or
the control daemon quits (``quit``). With ``pause`` the turn lasts ``switch.slice`` instead, its processes are frozen
(:mod:`mpsagent.core.pause`), and the user is in the queue again from then on.

With ``sharing = "together"`` or ``"apart"`` there are no turns: admission lets all users in. A policy that wants
another form of server takes hold when a turn is over: then the control daemon is asked to quit, and a new one is
started.

Nothing is foreseen and nothing raced: the gate lets a user in only when this rule says so. To take the admission back
without a race, the rule waits until the gate has said that a table without the user is in force (``applied``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Client, Server, Status
from mpsagent.core.pause import may_freeze
from mpsagent.core.room import misfit, pausable
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import Turn, View
from mpsagent.mps.units import duration_text
from mpsagent.policy.policy import Rules

PROMISE = "promise 2: the GPU is never idle while a user waits"
SETTLE = 0.3
"""Seconds after the last process's end in which its server notices that (15 to 30 ms, measured); asked to shut down
before that, MPS refuses and backs off."""
SHUTDOWN_AGAIN = 1.0
SHUTDOWN_SELDOM = 5.0
SHUTDOWNS = 10
"""How often a server is asked once a second to make way, then every ``SHUTDOWN_SELDOM`` seconds."""
AGAIN = 20.0
"""Seconds until a ``quit`` that was not heard of again is repeated: more than any deadline of the front-end."""
QUIT_TIMEOUT = 2
"""Seconds that MPS is given to quit when no client is left."""
MOST_SERVED = 1024
"""Users of whom it is remembered when their last turn ended."""
FREEZE = 10.0
"""Seconds in which all processes of a user have to stand; then the turn ends as ``switch.otherwise`` says."""
TAKE_UP = 10.0
"""Seconds for which the gate may try in vain to hand the first client of a turn over while others wait."""


class Asked(NamedTuple):
    """A server that was asked to make way: ``since`` when, when last, how often."""

    server: int
    since: float
    last: float
    times: int


@dataclass(frozen=True, slots=True)
class Memory:
    """``turn``: who has the GPU; ``closing``: its user is shut out, so that the next one can be let in; ``idle``: it
    has lain idle since, wanted by no other user; ``worked``: a client of this turn has been at work; ``tried``: since
    when the gate has tried to hand its first one over; ``left``: when the user before had it last; ``served``: when the
    last turn of users ended, as far as that counts for the queue; ``suspended``: users whose processes stand, or are
    being frozen, since when; ``shutdown``: the server that is in the next user's
    way; ``quit``: control daemon that was asked to quit, and when."""

    turn: Turn | None = None
    closing: bool = False
    idle: bool = False
    worked: bool = False
    tried: float | None = None
    left: float | None = None
    served: Mapping[int, float] = field(default_factory=dict)
    suspended: Mapping[int, float] = field(default_factory=dict)
    shutdown: Asked | None = None
    quit: tuple[int, float] | None = None
    reported: bool = False


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    if view.together or view.sharing == "apart":
        over: list[tr.Transition] = [tr.UserResumed(now, uid, now - at) for uid, at in memory.suspended.items()]
        over += [] if memory.turn is None else [_ended(memory.turn, now)]
        return Decision(Memory() if memory != Memory() else memory, (), (), tuple(over))
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    happened: list[tr.Transition] = []
    wakes: list[float] = []
    memory, happened = _adopt(view, memory, now)
    memory, told = _suspended(view, memory, now)
    happened += told
    if (memory.turn is not None and view.turn is None) or view.suspended != memory.suspended:  # its own contest nothing
        view = replace(view, turn=memory.turn, suspended=memory.suspended, _found={}, _times={})
    if memory.turn is not None:
        memory, made, asked, told, at = _present(view, memory, now)
        todo += made
        requests += asked
        happened += told
        wakes += at
    if memory.turn is None and view.synced and view.turn is None:  # else the view is of the turn that is over
        memory, made, told, at = _next(view, memory, now)
        todo += made
        happened += told
        wakes += at
    return Decision(memory, tuple(todo), tuple(requests), tuple(happened), min(wakes, default=None))


def _adopt(view: View, memory: Memory, now: float) -> tuple[Memory, list[tr.Transition]]:
    """Clients that were let in by another than this rule, before this agent came: the turn is theirs."""
    users = [uid for uid in view.state.users() if uid not in memory.suspended]
    if memory.turn is not None or not users:
        return memory, []
    first = min(c.since for c in view.state.clients_of_user(users[0]))
    if memory.left is None and len(users) == 1:
        return _begin(memory, users[0], first), []
    gap = None if memory.left is None else max(0.0, now - memory.left)  # None: until now they worked together
    return _begin(memory, users[0], now), [tr.TurnBegan(now, users[0], gap)]


def _suspended(view: View, memory: Memory, now: float) -> tuple[Memory, list[tr.Transition]]:
    """Paused users whose processes have ended or may not stand any more go on; who works beside the user whose turn it
    is, since before this agent, a drain or a fault, is paused."""
    state, turn = view.state, memory.turn
    doubtful = view.faulted(now)[0]
    kept = {
        uid: at for uid, at in memory.suspended.items() if state.clients_of_user(uid) and view.may_pause(uid)
    } if not doubtful else {}  # fmt: skip
    holder = None if turn is None else turn.uid  # its pause was not over yet
    over = [(uid, at) for uid, at in memory.suspended.items() if uid not in kept and uid != holder]
    told: list[tr.Transition] = [tr.UserResumed(now, uid, now - at) for uid, at in over]
    if turn is not None and view.synced and not doubtful:
        for uid in state.users():
            if uid != turn.uid and uid not in kept and view.may_pause(uid):
                kept[uid] = memory.served.get(uid, now)
                told.append(tr.UserPaused(now, uid, len(state.clients_of_user(uid))))
    return (memory if kept == memory.suspended else replace(memory, suspended=kept)), told


def _begin(memory: Memory, uid: int, since: float) -> Memory:
    suspended = {other: at for other, at in memory.suspended.items() if other != uid}
    return Memory(turn=Turn(uid, since), left=memory.left, served=memory.served, suspended=suspended)


def _over(view: View, memory: Memory, now: float, *, behind: bool) -> tuple[Memory, list[tr.Transition]]:
    """The turn is over. ``behind``: what its user has waiting is behind all who wait now."""
    assert memory.turn is not None
    uid = memory.turn.uid
    # Also of those who wait no more, for as long as others do who have waited for that turn's end.
    held = view.state.held
    came = min((first.since for one in held.users()[:1] if (first := held.first(one))), default=float("inf"))
    served = {other: at for other, at in memory.served.items() if at > came or held.first(other) is not None}
    served = dict(sorted(served.items(), key=lambda one: one[1])[-MOST_SERVED:])
    served = {**served, uid: now} if behind else served
    return Memory(left=now, served=served, suspended=memory.suspended), [_ended(memory.turn, now)]


# --- the present turn -------------------------------------------------------------------------------------------------

_Present = tuple[Memory, list[act.Action], list[EndClient], list[tr.Transition], list[float]]


def _present(view: View, memory: Memory, now: float) -> _Present:
    turn, state = memory.turn, view.state
    assert turn is not None
    clients = state.clients_of_user(turn.uid)
    if turn.ending is not None and clients:
        return _ending(view, memory, turn, clients, now)
    if not view.synced:  # it is not known who waits: no clock is reset, and none is over
        return memory, [], [], [], []
    if turn.pausing is not None and clients:
        return _pausing(view, memory, turn, clients, now)
    if clients or state.held.hands_over(turn.uid):
        # When it was to be over: a process passed before the table was in force, so it goes on.
        memory = replace(memory, closing=False, idle=False, worked=memory.worked or bool(clients))
        return _at_work(view, memory, turn, clients, now)
    others, first = view.others(), state.held.first(turn.uid)
    if not others and state.drain is None and not view.outdated:
        if turn.ending is None:
            turn = replace(turn, contested=None, warned=None)
            return replace(memory, turn=turn, closing=False, idle=True, worked=False, tried=None), [], [], [], []
        if first is not None:  # what comes now is a new turn
            memory, told = _over(view, memory, now, behind=False)
            return memory, [], [], told, []
    contested = view.contested()
    fresh = turn.ending is None and not memory.worked and not memory.closing and view.identified(turn.uid)
    # A turn that has only just begun is its user's; one that no user wanted goes to who comes first.
    if first is not None and fresh and (not memory.idle or contested is None or first.since <= contested):
        memory, wake = _on_its_way(view, memory, turn.uid, now)
        if not memory.closing:
            return memory, [], [], [], wake
    memory = replace(memory, closing=True)
    if not view.shut_out(turn.uid):
        return memory, [], [], [], []
    had = memory.worked or memory.tried is not None or turn.ending is not None
    memory, told = _over(view, memory, now, behind=had)
    return memory, [], [], told, []


def _on_its_way(view: View, memory: Memory, uid: int, now: float) -> tuple[Memory, list[float]]:
    """Its first connection is on its way through the gate; who came later waits, but not without end."""
    if view.sent is None or not view.sent[1].open or view.state.drain is not None or view.state.to_end():
        return replace(memory, tried=None), []
    if memory.tried is None:
        if not view.let_in(uid):
            return memory, []
        memory = replace(memory, tried=now)
    assert memory.tried is not None
    if not view.others():
        return memory, []
    over = memory.tried + TAKE_UP
    return (memory, [over]) if now < over else (replace(memory, closing=True), [])


def _ended(turn: Turn, now: float) -> tr.TurnEnded:
    return tr.TurnEnded(now, turn.uid, max(0.0, now - turn.since), (turn.ending or turn.pausing) is not None)


def _at_work(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> _Present:
    rules, waiting = view.rules(turn.uid), view.others()
    if turn.ending is not None:
        return _ending(view, memory, turn, clients, now)
    if not view.identified(turn.uid):
        return memory, [], [], [], []
    first = view.contested()
    if first is None:
        fresh = replace(turn, contested=None, warned=None)
        return replace(memory, turn=fresh, reported=False), [], [], [], []
    if turn.contested is None:
        began = _taken_up(view, memory, turn, clients)
        if now < began:
            return memory, [], [], [], [began]
        turn = replace(turn, contested=max(first, began))
        memory = replace(memory, turn=turn)
    view = replace(view, turn=turn)
    if clients and turn.began is None:
        turn = replace(turn, began=max(turn.since, min(client.since for client in clients)))
        memory = replace(memory, turn=turn)
    fault, known_at = view.faulted(now)
    if rules.switch_action == "pause" and fault:  # everybody is held until it is over, and then paused
        return memory, [], [], [], [] if known_at is None else [known_at]
    pauses = pausable(view)
    times = view.deadlines(turn, pauses)
    if times is None or view.state.drain is not None:
        return memory, [], [], [], []
    warn, _ = times
    if now < warn:
        return memory, [], [], [], [warn]
    if pauses and not clients:  # the first one is only being handed over
        return memory, [], [], [], []
    if pauses:
        turn = replace(turn, pausing=now, warned=None)
        return _pausing(view, replace(memory, turn=turn, closing=True), turn, clients, now)
    todo: list[act.Action] = []
    rule = rules.origin("switch.after").key
    kept = _goes_on(rules)
    if turn.warned is None:
        turn = replace(turn, warned=now)
        memory = replace(memory, turn=turn)
        end = (view.deadlines(turn, pauses) or (now, now))[1]
        ends = f"its turn ends in {duration_text(end - now)}"
        held = duration_text(now - (turn.contested or now))
        reason = f"user {turn.uid} has had the GPU for {held} while user {waiting[0]} waits; {kept or ends}"
        todo.append(act.Report(kind="turn.warning", reason=reason, rule=rule, uid=turn.uid))
    end = (view.deadlines(turn, pauses) or (now, now))[1]
    if now < end:
        return memory, todo, [], [], [end]
    reason = (
        f"the turn of user {turn.uid} is over: user {waiting[0]} has waited "
        f"{duration_text(now - (turn.contested or now))}"
    )
    if kept:
        if not memory.reported:
            todo.append(act.Report(kind="turn.over", reason=f"{reason}; {kept}", rule=rule, uid=turn.uid))
        return replace(memory, reported=True), todo, [], [], []
    todo.append(act.Report(kind="turn.ending", reason=reason, rule=rule, uid=turn.uid))
    turn = replace(turn, ending=now)
    memory, made, requests, told, at = _ending(view, replace(memory, turn=turn), turn, clients, now)
    return memory, todo + made, requests, told, at


def _taken_up(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...]) -> float:
    """When the user could begin: the first client has been let in. Until then MPS starts a server, which takes seconds
    where many contexts are made at once (5 to 9 s on two H200, beside the clients of a second agent), and turns of 5 s
    would be over before anyone is served."""
    latest = turn.since + view.policy.hang_server_ready
    if clients:
        return min(latest, max(turn.since, min(client.since for client in clients)))
    return turn.since if memory.worked else latest


def _goes_on(rules: Rules) -> str:
    """Why a turn does not end when its time is over; empty when it does."""
    if not rules.enforce_switch:
        return "it goes on all the same, because this is not enforced"
    key = "otherwise" if rules.switch_action == "pause" else "action"
    return f'it goes on all the same (switch.{key} = "none")' if rules.forced_end == "none" else ""


def _pausing(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> _Present:
    """The user is shut out first, so that no process is frozen in the middle of its hand-over; then all are frozen;
    then the turn is over."""
    uid = turn.uid
    rest = {other: at for other, at in memory.suspended.items() if other != uid}
    goes_on = replace(memory, turn=replace(turn, pausing=None), closing=False, suspended=rest)
    if not view.may_pause(uid) or not view.others() or view.faulted(now)[0]:
        return goes_on, [], [], [], []
    if uid not in memory.suspended:
        if not may_freeze(view, uid):
            return replace(memory, closing=True), [], [], [], []
        memory = replace(memory, suspended={**memory.suspended, uid: now})
    if all(c.frozen is not None or c.detached is not None for c in clients):
        memory, told = _over(view, memory, now, behind=True)
        memory = replace(memory, suspended={**memory.suspended, uid: now})
        return memory, [], [], [*told, tr.UserPaused(now, uid, len(clients))], []
    due = memory.suspended[uid] + FREEZE
    if now < due:
        return memory, [], [], [], [due]
    late = [str(c.pid) for c in clients if c.frozen is None]
    reason = f"the processes of user {uid} are not paused: {', '.join(late)} did not stop within {FREEZE:.0f} s"
    report = act.Report(
        kind="turn.not_paused", reason=reason, rule=view.rules(uid).origin("switch.action").key, uid=uid
    )
    assert goes_on.turn is not None
    return replace(goes_on, turn=replace(goes_on.turn, unpausable=True)), [report], [], [], []


def _ending(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> _Present:
    """Each client on the ladder. After ``hang.terminate`` those who were not asked yet are signalled, if only clients
    of the same user are there: they all go."""
    assert turn.ending is not None
    rules, policy = view.rules(turn.uid), view.policy
    if not rules.enforce_switch:
        return replace(memory, turn=replace(turn, ending=None)), [], [], [], []
    rule = rules.origin("switch.after").key
    due = turn.ending + policy.hang_terminate + (policy.hook_deadline if rules.before_end_hook else 0.0)
    control = view.state.control if view.control_alive else None
    # Once another daemon runs, the clients of the one that quit are leftovers.
    same = control is not None and (memory.quit is None or memory.quit[0] == control.pid)
    quits_all = rules.forced_end == "quit" and not memory.suspended  # who is paused is not to pay for it
    if quits_all and control is not None and same:
        quits, at = _quit(view, memory, turn, now)
        return replace(memory, quit=(control.pid, now)) if quits else memory, quits, [], [], [at]
    alone = len(view.state.users()) <= 1
    late = (now >= due and alone) or quits_all
    requests = [
        EndClient(
            pid=c.pid, start=c.peer.start, uid=c.uid, reason=f"the turn of user {turn.uid} is over", rule=rule,
            section="switch", hook=True, signals_only=late,
        )
        for c in clients
    ]  # fmt: skip
    return memory, [], requests, [], [due] if now < due else []


def _quit(view: View, memory: Memory, turn: Turn, now: float) -> tuple[list[act.Action], float]:
    """``quit -t N`` once; who waits is held at the gate meanwhile."""
    rules, control = view.rules(turn.uid), view.state.control
    timeout = max(1, round(rules.kill_grace))
    again = float("-inf") if memory.quit is None else memory.quit[1] + timeout + AGAIN
    if control is None or control.quitting is not None or now < again:
        return [], max(again, now + 1.0)
    reason = f"the turn of user {turn.uid} is over; waiting users are held meanwhile"
    action = act.QuitControl(timeout=timeout, reason=reason, rule=rules.origin("switch.action").key)
    return [action], now + timeout + AGAIN


# --- the next turn ----------------------------------------------------------------------------------------------------


def _next(view: View, memory: Memory, now: float) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """The first in the queue, once the way is free."""
    state, waiting, asked = view.state, view.waiting(), memory.shutdown
    memory = replace(memory, shutdown=None)
    if not (waiting or view.outdated) or not view.control_alive or view.given_up is not None:
        return memory, [], [], []
    if state.drain is not None or (state.control is not None and state.control.quitting is not None):
        return memory, [], [], []
    if not view.settled:  # a client whom an earlier table let in may be on its way through the gate
        return replace(memory, shutdown=asked), [], [], []
    if view.outdated:
        return _renew(view, memory, now)
    # One who comes and has no room beside the paused ones is waited for with their next turn, which ends them.
    uid = next((one for one in waiting if not memory.suspended or misfit(view, one) is None), waiting[0])
    told: list[tr.Transition] = []
    if uid in memory.suspended:
        told = [tr.UserResumed(now, uid, now - memory.suspended[uid])]
    if not view.shared:
        blocking = [
            s for s in state.servers.values() if s.uid != uid or s.status in (Status.SHUTTING_DOWN, Status.FAULT)
        ]
        if blocking:
            return _make_way(view, replace(memory, shutdown=asked), blocking, uid, now)
    gap = None if memory.left is None else max(0.0, now - memory.left)
    return _begin(memory, uid, now), [], [tr.TurnBegan(now, uid, gap), *told], []


def _renew(view: View, memory: Memory, now: float) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """Nothing works, so the control daemon makes way for one with the policy's form of server."""
    control = view.state.control
    if control is None or view.state.held.handing or view.passed_untouched:
        return memory, [], [], []
    due = now if memory.quit is None or memory.quit[0] != control.pid else memory.quit[1] + QUIT_TIMEOUT + AGAIN
    if now < due:
        return memory, [], [], [due]
    form = "one server for all users" if view.policy.multiuser else "a server for each turn"
    then = f"{form}: a new control daemon is started"
    then = "a control daemon for each user" if view.template else then
    reason = f"nothing works, and the policy wants {then}"
    action = act.QuitControl(timeout=QUIT_TIMEOUT, reason=reason, rule=view.instance_rule("sharing"))
    return replace(memory, quit=(control.pid, now)), [action], [], []


def _make_way(
    view: View, memory: Memory, blocking: list[Server], uid: int, now: float
) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """The server of the user before has to exit first. It is told at once when its last client has left: MPS's own
    back-off grows to seconds (recording 02, R3). One that starts, stops, is in FAULT or ordered to end is waited for:
    other rules see to that, and to one that never makes way."""
    server = blocking[0]
    if server.status is not Status.ACTIVE or server.shutdown is not None:
        return memory, [], [], []
    due = server.idle_since
    if due is None:
        due = now if memory.left is None else memory.left + SETTLE
    asked = memory.shutdown if memory.shutdown is not None and memory.shutdown.server == server.pid else None
    if asked is not None:
        due = max(due, asked.last + (SHUTDOWN_AGAIN if asked.times < SHUTDOWNS else SHUTDOWN_SELDOM))
    if now < due:
        return memory, [], [], [due]
    reason = f"the last client of {view.server_text(server)} has gone and user {uid} waits"
    action = act.ShutdownServer(server=server.pid, reason=reason, rule=PROMISE)
    asked = Asked(server.pid, now, now, 1) if asked is None else asked._replace(last=now, times=asked.times + 1)
    return replace(memory, shutdown=asked), [action], [], []


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not get through is sent again, after a moment."""
    action, asked = done.action, memory.shutdown
    if isinstance(action, act.ShutdownServer) and not done.ok and asked is not None and asked.server == action.server:
        soon = 0.1 if asked.times <= 3 else SHUTDOWN_AGAIN
        again = asked._replace(last=done.at + soon - SHUTDOWN_AGAIN, times=min(asked.times, 4))
        return replace(memory, shutdown=again)
    if isinstance(action, act.QuitControl) and not done.ok and memory.quit is not None and action.rule != "drain":
        return replace(memory, quit=(memory.quit[0], done.at - AGAIN))
    return memory
