"""Taking turns: one user at a time has the GPU, decided by the queue at the gate.

The user whose connection came first is next; all processes of the user whose turn it is are let in, because a program
whose processes wait for each other must never be split. The next user is let in when the last process of the one before
has ended or left its server. Once another user waits, the turn has ``switch.after``, a warning, ``switch.grace``, then
the action: each client is ended by the ladder (``terminate``), or the control daemon quits (``quit``).

Nothing is foreseen and nothing raced: the gate lets a user in only when this rule says so. To take the admission back
without a race, the rule waits until the gate has said that a table without the user is in force (``applied``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Client, Server, Status
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import Turn, View
from mpsagent.mps.units import duration_text

PROMISE = "promise 2: the GPU is never idle while a user waits"
NAME_WAIT = 2.0
"""Seconds for the name service to say who a user is; then the fail-safe limits count."""
SETTLE = 0.3
"""Seconds after the last process's end in which its server notices that (15 to 30 ms, measured); asked to shut down
before that, MPS refuses and backs off."""
SHUTDOWN_AGAIN = 1.0
SHUTDOWN_SELDOM = 5.0
SHUTDOWNS = 10
"""How often a server is asked once a second to make way, then every ``SHUTDOWN_SELDOM`` seconds."""
AGAIN = 20.0
"""Seconds until a ``quit`` that was not heard of again is repeated: more than any deadline of the front-end."""
TAKE_UP = 10.0
"""Seconds for which the gate may try in vain to hand the first client of a turn over while others wait."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``turn``: who has the GPU; ``closing``: its user is shut out, so that the next one can be let in; ``idle``: it
    has lain idle since, wanted by no other user; ``worked``: a client of this turn has been at work; ``tried``: since
    when the gate has tried to hand its first one over; ``left``: when the user before had it last; ``served``: when the
    last turn of each user in the queue ended; ``shutdown``: server that was asked to make way, when, how often;
    ``quit``: control daemon that was asked to quit, and when."""

    turn: Turn | None = None
    closing: bool = False
    idle: bool = False
    worked: bool = False
    tried: float | None = None
    left: float | None = None
    served: Mapping[int, float] = field(default_factory=dict)
    shutdown: tuple[int, float, int] | None = None
    quit: tuple[int, float] | None = None
    reported: bool = False


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    happened: list[tr.Transition] = []
    wakes: list[float] = []
    memory, happened = _adopt(view, memory, now)
    if memory.turn is not None and view.turn is None:  # its own clients do not contest it
        view = replace(view, turn=memory.turn)
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
    users = view.state.users()
    if memory.turn is not None or not users:
        return memory, []
    first = min(c.since for c in view.state.clients_of_user(users[0]))
    if memory.left is None:
        return _begin(memory, users[0], first), []
    return _begin(memory, users[0], now), [tr.TurnBegan(now, users[0], max(0.0, now - memory.left))]


def _begin(memory: Memory, uid: int, since: float) -> Memory:
    return Memory(turn=Turn(uid, since), left=memory.left, served=memory.served)


def _over(view: View, memory: Memory, now: float, *, behind: bool) -> tuple[Memory, list[tr.Transition]]:
    """The turn is over. ``behind``: what its user has waiting is behind all who wait now."""
    assert memory.turn is not None
    uid = memory.turn.uid
    served = {other: at for other, at in memory.served.items() if other in view.state.held.users()}
    return Memory(left=now, served={**served, uid: now} if behind else served), [_ended(memory.turn, now)]


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
    if clients or state.held.hands_over(turn.uid):
        # When it was to be over: a process passed before the table was in force, so it goes on.
        memory = replace(memory, closing=False, idle=False, worked=memory.worked or bool(clients))
        return _at_work(view, memory, turn, clients, now)
    others, first = view.others(), state.held.first(turn.uid)
    if not others and state.drain is None:
        if turn.ending is None:
            turn = replace(turn, contested=None, warned=None)
            return replace(memory, turn=turn, closing=False, idle=True, worked=False, tried=None), [], [], [], []
        if first is not None:  # what comes now is a new turn
            memory, told = _over(view, memory, now, behind=False)
            return memory, [], [], told, []
    contested = view.contested()
    fresh = turn.ending is None and not memory.worked and not memory.closing
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
    if view.sent is None or not view.sent[1].open or view.state.drain is not None:
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
    return tr.TurnEnded(now, turn.uid, max(0.0, now - turn.since), turn.ending is not None)


def _at_work(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> _Present:
    rules, waiting = view.rules(turn.uid), view.others()
    if turn.ending is not None:
        return _ending(view, memory, turn, clients, now)
    first = view.contested()
    if first is None:
        fresh = replace(turn, contested=None, warned=None)
        return replace(memory, turn=fresh, reported=False), [], [], [], []
    if turn.contested is None:
        turn = replace(turn, contested=max(first, turn.since))
        memory = replace(memory, turn=turn)
    times = turn.deadlines(rules)
    if times is None or view.state.drain is not None:
        return memory, [], [], [], []
    warn, _ = times
    if now < warn:
        return memory, [], [], [], [warn]
    todo: list[act.Action] = []
    rule = rules.origin("switch.after").key
    if turn.warned is None:
        turn = replace(turn, warned=now)
        memory = replace(memory, turn=turn)
        end = (turn.deadlines(rules) or (now, now))[1]
        reason = (
            f"user {turn.uid} has held the GPU for {duration_text(now - (turn.contested or now))} while user "
            f"{waiting[0]} waits; its turn ends in {duration_text(end - now)} ({rules.switch_action})"
        )
        todo.append(act.Report(kind="turn.warning", reason=reason, rule=rule, uid=turn.uid))
    end = (turn.deadlines(rules) or (now, now))[1]
    if now < end:
        return memory, todo, [], [], [end]
    reason = (
        f"the turn of user {turn.uid} is over: user {waiting[0]} has waited "
        f"{duration_text(now - (turn.contested or now))}"
    )
    if rules.switch_action == "none" or not rules.enforce_switch:
        if not memory.reported:
            todo.append(act.Report(kind="turn.over", reason=reason, rule=rule, uid=turn.uid))
        return replace(memory, reported=True), todo, [], [], []
    todo.append(act.Report(kind="turn.ending", reason=reason, rule=rule, uid=turn.uid))
    turn = replace(turn, ending=now)
    memory, made, requests, told, at = _ending(view, replace(memory, turn=turn), turn, clients, now)
    return memory, todo + made, requests, told, at


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
    if rules.switch_action == "quit" and control is not None and same:
        quits, at = _quit(view, memory, turn, now)
        return replace(memory, quit=(control.pid, now)) if quits else memory, quits, [], [], [at]
    alone = len(view.state.users()) <= 1
    late = (now >= due and alone) or rules.switch_action == "quit"
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
    state, waiting = view.state, view.waiting()
    if not waiting or state.drain is not None or not view.control_alive or view.given_up is not None:
        return memory, [], [], []
    if state.control is not None and state.control.quitting is not None:
        return memory, [], [], []
    if not view.settled:  # a client whom an earlier table let in may be on its way through the gate
        return memory, [], [], []
    uid = waiting[0]
    if uid not in state.identities:
        first = state.held.first(uid)
        came = now if first is None else first.since
        due = max(came, came if state.gate is None else state.gate.since) + NAME_WAIT
        if now < due:
            known = [other for other in waiting if other in state.identities]
            if not known:
                return memory, [], [], [due]
            uid = known[0]
    if not view.shared:
        blocking = [
            s for s in state.servers.values() if s.uid != uid or s.status in (Status.SHUTTING_DOWN, Status.FAULT)
        ]
        if blocking:
            return _make_way(view, memory, blocking, uid, now)
    gap = None if memory.left is None else max(0.0, now - memory.left)
    return _begin(memory, uid, now), [], [tr.TurnBegan(now, uid, gap)], []


def _make_way(
    view: View, memory: Memory, blocking: list[Server], uid: int, now: float
) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """The server of the user before has to exit first. It is told at once when its last client has left, instead of
    MPS's own back-off, which grows to seconds (recording 02, R3). One that starts, stops or is in FAULT is waited for:
    other rules see to that."""
    server = blocking[0]
    if server.status is not Status.ACTIVE:
        return memory, [], [], []
    due = server.idle_since if server.idle_since is not None else (memory.left or now) + SETTLE
    asked = memory.shutdown if memory.shutdown is not None and memory.shutdown[0] == server.pid else None
    if asked is not None:
        due = max(due, asked[1] + (SHUTDOWN_AGAIN if asked[2] < SHUTDOWNS else SHUTDOWN_SELDOM))
    if now < due:
        return memory, [], [], [due]
    whose = f"server {server.pid}" if server.uid is None else f"user {server.uid}"
    reason = f"the last client of {whose} has gone and user {uid} waits"
    action = act.ShutdownServer(server=server.pid, reason=reason, rule=PROMISE)
    count = 1 if asked is None else asked[2] + 1
    return replace(memory, shutdown=(server.pid, now, count)), [action], [], []


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not get through is sent again, after a moment."""
    action, asked = done.action, memory.shutdown
    if isinstance(action, act.ShutdownServer) and not done.ok and asked is not None and asked[0] == action.server:
        soon = 0.1 if asked[2] <= 3 else SHUTDOWN_AGAIN
        return replace(memory, shutdown=(action.server, done.at + soon - SHUTDOWN_AGAIN, min(asked[2], 4)))
    if isinstance(action, act.QuitControl) and not done.ok and memory.quit is not None and action.rule != "drain":
        return replace(memory, quit=(memory.quit[0], done.at - AGAIN))
    return memory
