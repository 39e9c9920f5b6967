"""Taking turns: one user at a time has the GPU, decided by the queue at the gate.

The user whose connection came first is next; all processes of the user whose turn it is are let in, because a program
whose processes wait for each other must never be split. The next user is let in when the last process of the one before
has ended or left its server. Once another user waits, the turn has ``switch.after``, a warning, ``switch.grace``, then
the action: each client is ended by the ladder (``terminate``), or the control daemon quits (``quit``).

Nothing is foreseen and nothing raced: the gate lets a user in only when this rule says so. To take the admission back
without a race, the rule waits until the gate has said that a table without the user is in force (``applied``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Client, Server, Status
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import SHARED_UID, Turn, View
from mpsagent.mps.units import duration_text

PROMISE = "promise 2: the GPU is never idle while a user waits"
NAME_WAIT = 2.0
"""Seconds for the name service to say who a user is; then the fail-safe limits count."""
SETTLE = 0.3
"""Seconds after the last process's end in which its server notices that (15 to 30 ms, measured); asked to shut down
before that, MPS refuses and backs off."""
SHUTDOWN_AGAIN = 1.0
AGAIN = 20.0
"""Seconds until a ``quit`` that was not heard of again is repeated: more than any deadline of the front-end."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``turn``: who has the GPU; ``closing``: its user is shut out, so that the next one can be let in; ``left``: when
    the user before had it last; ``shutdown``: server that was asked to make way, and when."""

    turn: Turn | None = None
    closing: bool = False
    left: float | None = None
    shutdown: tuple[int, float] | None = None
    quit_at: float | None = None
    reported: bool = False


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    state = view.state
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    happened: list[tr.Transition] = []
    wakes: list[float] = []
    memory = _adopt(view, memory, now)
    if memory.turn is not None:
        memory, made, asked, told, at = _present(view, memory, now)
        todo += made
        requests += asked
        happened += told
        wakes += at
    if memory.turn is None and state.gate is not None and state.gate.synced:
        memory, made, told, at = _next(view, memory, now)
        todo += made
        happened += told
        wakes += at
    return Decision(memory, tuple(todo), tuple(requests), tuple(happened), min(wakes, default=None))


def _adopt(view: View, memory: Memory, now: float) -> Memory:
    """Clients that were at work before this agent came: the turn is theirs."""
    users = view.state.users()
    if memory.turn is not None or not users:
        return memory
    first = min(c.since for c in view.state.clients_of_user(users[0]))
    return Memory(turn=Turn(users[0], first))


# --- the present turn -------------------------------------------------------------------------------------------------

_Present = tuple[Memory, list[act.Action], list[EndClient], list[tr.Transition], list[float]]


def _present(view: View, memory: Memory, now: float) -> _Present:
    turn = memory.turn
    assert turn is not None
    clients = view.state.clients_of_user(turn.uid)
    handing = any(h.handing is not None for h in view.state.held_of(turn.uid))
    if clients or handing:
        if memory.closing:  # a process passed before the table was in force: the turn goes on
            memory = replace(memory, closing=False)
        return _at_work(view, memory, turn, clients, now)
    mine = bool(view.state.held_of(turn.uid))
    if not view.waiting() and (mine or turn.ending is None) and view.state.drain is None:
        if turn.ending is not None:  # what comes now is a new turn
            memory = Memory(left=now)
            return memory, [], [], [_ended(turn, now)], []
        fresh = replace(turn, contested=None, warned=None)
        return replace(memory, turn=fresh, closing=False), [], [], [], []
    if mine and turn.ending is None and turn.contested is None and not memory.closing:
        # Its own first connection is on its way through the gate; who came later waits.
        first = view.state.queue()[0]
        if first == turn.uid:
            return memory, [], [], [], []
    memory = replace(memory, closing=True)
    if not view.shut_out(turn.uid):
        return memory, [], [], [], []
    return Memory(left=now), [], [], [_ended(turn, now)], []


def _ended(turn: Turn, now: float) -> tr.TurnEnded:
    return tr.TurnEnded(now, turn.uid, max(0.0, now - turn.since), turn.ending is not None)


def _at_work(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> _Present:
    rules, waiting = view.rules(turn.uid), view.waiting()
    if turn.ending is not None:
        return _ending(view, memory, turn, clients, now)
    if not waiting:
        fresh = replace(turn, contested=None, warned=None)
        return replace(memory, turn=fresh, reported=False), [], [], [], []
    if turn.contested is None:
        first = min(h.since for uid in waiting for h in view.state.held_of(uid))
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
    """Each client on the ladder. After ``hang.terminate`` those who were not asked yet are signalled: only clients of
    the same user are left there, and they all go."""
    assert turn.ending is not None
    rules, policy = view.rules(turn.uid), view.policy
    if not rules.enforce_switch:
        return replace(memory, turn=replace(turn, ending=None)), [], [], [], []
    rule = rules.origin("switch.after").key
    due = turn.ending + policy.hang_terminate + (policy.hook_deadline if rules.before_end_hook else 0.0)
    if rules.switch_action == "quit":
        quits, at = _quit(view, memory, turn, now)
        if quits or view.control_alive:
            fresh = replace(memory, quit_at=now) if quits else memory
            return fresh, quits, [], [], [at]
    late = now >= due or rules.switch_action == "quit"
    requests = [
        EndClient(
            pid=c.pid, start=c.peer.start, uid=c.uid, reason=f"the turn of user {turn.uid} is over", rule=rule,
            section="switch", hook=True, signals_only=late,
        )
        for c in clients
    ]  # fmt: skip
    return memory, [], requests, [], [] if late else [due]


def _quit(view: View, memory: Memory, turn: Turn, now: float) -> tuple[list[act.Action], float]:
    """``quit -t N`` once; who waits is held at the gate meanwhile."""
    rules, control = view.rules(turn.uid), view.state.control
    timeout = max(1, round(rules.kill_grace))
    again = (memory.quit_at or float("-inf")) + timeout + AGAIN
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
    uid = waiting[0]
    if uid not in state.identities:
        came = min(h.since for h in state.held_of(uid))
        if now < max(came, state.gate.since if state.gate is not None else came) + NAME_WAIT:
            known = [other for other in waiting if other in state.identities]
            if not known:
                return memory, [], [], [came + NAME_WAIT, now + 0.1]
            uid = known[0]
    if not view.shared:
        blocking = [
            s for s in state.servers.values() if s.uid not in (uid, SHARED_UID) or s.status is not Status.ACTIVE
        ]
        blocking = [s for s in blocking if s.uid != uid or s.status in (Status.SHUTTING_DOWN, Status.FAULT)]
        if blocking:
            return _make_way(view, memory, blocking, uid, now)
    gap = None if memory.left is None else max(0.0, now - memory.left)
    return Memory(turn=Turn(uid, now)), [], [tr.TurnBegan(now, uid, gap)], []


def _make_way(
    view: View, memory: Memory, blocking: list[Server], uid: int, now: float
) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """The server of the user before has to exit first. It is told at once when its last client has left, instead of
    MPS's own back-off, which grows to seconds (recording 02, R3)."""
    server = blocking[0]
    if server.status in (Status.SHUTTING_DOWN, Status.INITIALIZING):
        return memory, [], [], []
    last = server.idle_since if server.idle_since is not None else (memory.left or now) + SETTLE
    asked = memory.shutdown
    due = max(last, asked[1] + SHUTDOWN_AGAIN if asked is not None and asked[0] == server.pid else last)
    if server.attached and now < due:
        return memory, [], [], [due]
    if now < due:
        return memory, [], [], [due]
    reason = f"the last client of user {server.uid} has gone and user {uid} waits"
    action = act.ShutdownServer(server=server.pid, reason=reason, rule=PROMISE)
    return replace(memory, shutdown=(server.pid, now)), [action], [], [now + SHUTDOWN_AGAIN]


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not get through is sent again, after a moment."""
    action = done.action
    if isinstance(action, act.ShutdownServer) and not done.ok and memory.shutdown is not None:
        return replace(memory, shutdown=(action.server, done.at - SHUTDOWN_AGAIN + 0.1))
    if isinstance(action, act.QuitControl) and not done.ok and memory.quit_at is not None:
        return replace(memory, quit_at=done.at - AGAIN)
    return memory
