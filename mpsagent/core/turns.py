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

from dataclasses import replace

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Client
from mpsagent.core.room import pausable
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.turn_ends import AGAIN, Present, ending, pausing, warnings
from mpsagent.core.turn_memory import Memory, begin, ended, over
from mpsagent.core.turn_next import SHUTDOWN_AGAIN, following
from mpsagent.core.view import Turn, View
from mpsagent.mps.units import duration_text
from mpsagent.policy.policy import Rules

TAKE_UP = 10.0
"""Seconds for which the gate may try in vain to hand the first client of a turn over while others wait."""


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    if view.together or view.sharing == "apart":
        over: list[tr.Transition] = [tr.UserResumed(now, uid, now - at) for uid, at in memory.suspended.items()]
        over += [] if memory.turn is None else [ended(memory.turn, now)]
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
        memory, made, told, at = following(view, memory, now)
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
        return begin(memory, users[0], first), []
    gap = None if memory.left is None else max(0.0, now - memory.left)  # None: until now they worked together
    return begin(memory, users[0], now), [tr.TurnBegan(now, users[0], gap)]


def _suspended(view: View, memory: Memory, now: float) -> tuple[Memory, list[tr.Transition]]:
    """Paused users whose processes have ended or may not stand any more go on; who works beside the user whose turn it
    is, since before this agent, a drain or a fault, is paused."""
    state, turn = view.state, memory.turn
    doubtful = view.faulted(now)[0]
    kept = {
        uid: at for uid, at in memory.suspended.items() if state.clients_of_user(uid) and view.may_stand(uid)
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


def _present(view: View, memory: Memory, now: float) -> Present:
    turn, state = memory.turn, view.state
    assert turn is not None
    clients = state.clients_of_user(turn.uid)
    if turn.ending is not None and clients:
        return ending(view, memory, turn, clients, now)
    if not view.synced:  # it is not known who waits: no clock is reset, and none is over
        return memory, [], [], [], []
    if turn.pausing is not None and clients:
        return pausing(view, memory, turn, clients, now)
    if clients or state.held.hands_over(turn.uid):
        # When it was to be over: a process passed before the table was in force, so it goes on.
        tried = None if clients else memory.tried
        memory = replace(memory, closing=False, idle=False, worked=memory.worked or bool(clients), tried=tried)
        return _at_work(view, memory, turn, clients, now)
    others, first = view.others(), state.held.first(turn.uid)
    if not others and state.drain is None and not view.outdated:
        if turn.ending is None:
            turn = replace(turn, contested=None, warned=None)
            return replace(memory, turn=turn, closing=False, idle=True, worked=False, tried=None), [], [], [], []
        if first is not None:  # what comes now is a new turn
            memory, told = over(view, memory, now, behind=False)
            return memory, [], [], told, []
    contested = view.contested()
    open_to_it = turn.ending is None and not memory.closing and view.identified(turn.uid)
    until = _own_until(view, turn) if memory.worked else float("inf")
    # One that has only just begun is its user's; one that no user wanted goes to who comes first.
    mine = memory.worked or not memory.idle or contested is None or (first is not None and first.since <= contested)
    if first is not None and open_to_it and mine and now < until:
        memory, wake = _on_its_way(view, memory, turn.uid, now)
        if not memory.closing:
            return memory, [], [], [], wake if until == float("inf") else [*wake, until]
    memory = replace(memory, closing=True)
    if not view.shut_out(turn.uid):
        return memory, [], [], [], []
    had = memory.worked or memory.tried is not None or turn.ending is not None
    memory, told = over(view, memory, now, behind=had)
    return memory, [], [], told, []


def _own_until(view: View, turn: Turn) -> float:
    """Between two processes of a user who has more of them waiting than may work at once (``max_clients``, a total,
    the gate's pace): the turn lasts as long as anybody's. Until when."""
    if view.state.drain is not None or view.state.to_end() or view.outdated:
        return float("-inf")
    view = replace(view, turn=turn)
    times = view.deadlines(turn, pausable(view))
    return float("inf") if times is None else times[1]


def _on_its_way(view: View, memory: Memory, uid: int, now: float) -> tuple[Memory, list[float]]:
    """Its next connection is on its way through the gate; who came later waits, but not without end."""
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


def _at_work(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> Present:
    rules, waiting = view.rules(turn.uid), view.others()
    if turn.ending is not None:
        return ending(view, memory, turn, clients, now)
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
        return pausing(view, replace(memory, turn=turn, closing=True), turn, clients, now)
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
        if not kept:
            todo += warnings(view, turn.uid, clients, reason, end - now)
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
    memory, made, requests, told, at = ending(view, replace(memory, turn=turn), turn, clients, now)
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
