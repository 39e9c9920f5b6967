"""Taking turns: one user at a time has the GPU, decided by the queue at the gate.

The user whose connection came first is next, or another one by ``priority`` and ``queue``. All processes of the user
whose turn it is are admitted, because a program whose processes wait for each other must never be split. The next user
is admitted when the last process of the one before has ended or left its server.

=========  ===============================================  ============================================================
phase      what it is                                       what ends it
=========  ===============================================  ============================================================
idle       nothing at work, and no other user wants it      its user comes: open; another one first: shut
open       its user works, or is on the way                 another one waits: contested; none is at work: idle;
                                                            10 s unused while another one or form waits: shut
contested  another user waits                               turn.time_limit: warned; turn.pause_slice: pausing
warned     its end is announced                             turn.grace: ending, or late
late       over, but continuing ("none", mode = "report")   a policy that ends it: ending
pausing    shut out; its processes are frozen               all are: over; not within 10 s: contested, and not paused
ending     shut out; the ladder for each client, or `quit`  all have gone: over
shut       shut out; nothing at work                        the gate confirms that: over
=========  ===============================================  ============================================================

With ``sharing = "one-server"`` or ``"per-user"`` there are no turns: admission admits all users. A policy that wants
another form of server takes effect when a turn is over: then the control daemon is asked to quit, and a new one is
started. Nothing is foreseen and nothing raced: the gate admits a user only when this rule decides so, and a turn is
over when the gate has reported that a table without its user is in force (``applied``).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.ladder import TERMINATE
from mpsagent.core.lines import line
from mpsagent.core.pause import may_freeze
from mpsagent.core.pause_room import deadlines, ends, leaving, no_room, pausable
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.turn_memory import AGAIN, Memory, Moment, ended
from mpsagent.core.turn_next import SHUTDOWN_AGAIN, following
from mpsagent.core.view import Phase, View
from mpsagent.mps.units import duration_text
from mpsagent.policy.policy import Rules

TAKE_UP = 10.0
"""Seconds for which the gate may try in vain to hand the first client of a turn over while others wait. Then its user
is shut out; a hand-over that is under way ends as it ends."""
FREEZE = 10.0
"""Seconds in which all processes of a user have to stop; then the turn ends after ``turn.time_limit``."""


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    if view.together or view.sharing == "per-user":
        over: list[tr.Transition] = [tr.UserResumed(now, uid, now - at) for uid, at in memory.suspended.items()]
        over += [] if memory.turn is None else [ended(memory.turn, view, now)]
        return Decision(Memory(), (), (), tuple(over))
    m = Moment(view, memory, now)
    _adopt(m)
    _suspended(m)
    memory = m.memory
    # a view without a turn that has just been adopted would say that its own user contests it
    if (memory.turn is not None and view.turn is None) or view.suspended != memory.suspended:
        m.view = replace(view, turn=memory.turn, suspended=memory.suspended)
    until = None if m.memory.turn is None else _present(m)
    if m.memory.turn is None and m.view.synced and m.view.turn is None:  # else the view is of the turn that is over
        until = following(m)
    if m.memory.turn is not None:
        end = ends(m.view, m.turn)
        by = None if end is None else end + leaving(m.view, m.turn.uid)
        m.remember(turn=replace(m.turn, ends=end, over=by, no_room=no_room(m.view, m.turn)))
    return Decision(m.memory, tuple(m.actions), tuple(m.requests), tuple(m.told), until)


def _adopt(m: Moment) -> None:
    """Clients that were let in by another than this rule, before this agent came: the turn is theirs."""
    users, left = [uid for uid in m.view.state.users() if uid not in m.memory.suspended], m.memory.left
    if m.memory.turn is None and users:
        alone = left is None and len(users) == 1
        m.begin(users[0], min(c.since for c in m.view.state.clients_of_user(users[0])) if alone else m.now)
        if not alone:
            gap = None if left is None else max(0.0, m.now - left)  # None: until now they worked together
            m.told.append(tr.TurnBegan(m.now, users[0], gap))


def _suspended(m: Moment) -> None:
    """Paused users whose processes have ended or may not be frozen any more go on; who works beside the user whose turn
    it is, since before this agent, a drain or a fault, is paused."""
    view, now, was = m.view, m.now, m.memory.suspended
    doubtful = view.faulted(now)[0]
    kept = {
        uid: at for uid, at in was.items() if view.state.clients_of_user(uid) and view.may_stand(uid)
    } if not doubtful else {}  # fmt: skip
    holder = None if m.memory.turn is None else m.turn.uid  # its pause was not over yet
    over = [(uid, at) for uid, at in was.items() if uid not in kept and uid != holder]
    m.told += [tr.UserResumed(now, uid, now - at) for uid, at in over]
    if holder is not None and view.synced and not doubtful:
        for uid in view.state.users():
            if uid != holder and uid not in kept and view.may_pause(uid):
                kept[uid] = m.memory.served.get(uid, now)
                m.told.append(tr.UserPaused(now, uid, len(view.state.clients_of_user(uid))))
    if kept != was:
        m.remember(suspended=kept)


# --- the present turn: each phase says what becomes of it, and until when it waits ------------------------------------


def _present(m: Moment) -> float | None:
    """The turn in its phase, and at once in the one that it comes to by that."""
    for _ in PHASES:
        turn, clients, until = m.turn, m.clients, None
        if not m.view.synced and not (turn.phase == "ending" and clients):  # it is not known who waits
            return None
        if clients:
            first = max(turn.since, min(client.since for client in clients))
            m.to(turn.phase, began=first if turn.began is None else turn.began, tried=None)
        if m.view.mps_stopped:  # which no user does: what is tried meanwhile is not in vain
            m.to(turn.phase, tried=None)
        if not m.works and not m.wanted and turn.phase != "ending":
            m.to("idle", contested=None, warned=None, began=None, tried=None)
        else:
            until = (PHASES[turn.phase] if m.works or not turn.let_in else _between)(m)
        if m.memory.turn is None or m.turn.phase == turn.phase:
            return until
    return None


def _idle(m: Moment) -> None:
    """No user wanted the GPU."""
    m.to("open")


def _open(m: Moment) -> float | None:
    """Contested once another user wants the GPU and the first client has been let in. Until then MPS starts a server,
    which takes seconds where many contexts are made at once (5 to 9 s on two H200, beside the clients of a second
    agent), and turns of 5 s would be over before anyone is served."""
    since = m.view.contested() if m.view.identified(m.turn.uid) else None
    if since is None:
        return None
    until = float("inf")
    if m.turn.began is None:  # one hand-over in vain after the other leaves no moment between them
        tried = m.now if m.turn.tried is None else m.turn.tried
        until = tried + TAKE_UP
        m.to("open" if m.now < until else "shut", tried=tried)
        if m.now >= until:
            return None
    latest = m.turn.since + m.view.policy.hang_server
    began = latest if m.turn.began is None else min(latest, m.turn.began)
    if m.now >= began:
        m.to("contested", contested=max(since, began))
    return min(began, until)


def _contested(m: Moment) -> float | None:
    """Another user waits for the end. Contested: until `turn.time_limit`, or `turn.pause_slice` where the turn can end
    in a pause; warned: until `turn.grace` is over, too; late: for as long as the policy lets it go on."""
    view, uid, now, rules = m.view, m.turn.uid, m.now, m.view.rules(m.turn.uid)
    if not view.identified(uid):
        return None
    if view.contested() is None:
        grace_over = float("-inf") if m.turn.warned is None else m.turn.warned + rules.switch_grace
        if now < grace_over and not all(map(view.identified, view.state.held.users())):
            return grace_over  # after a restart of the agent the name service is asked for the waiting users
        m.to("open", contested=None, warned=None)
        return None
    fault, known_at = view.faulted(now)
    if rules.switch_action == "pause" and fault:  # all users are held until it is over, and then paused
        return known_at
    times, kept = deadlines(view, m.turn), _kept(rules)
    if times is None or view.state.drain is not None or now < times[0]:
        # The announced end does not come then: the next end is announced again, with its grace.
        m.to("contested", warned=None)
        return None if times is None or view.state.drain is not None else times[0]
    if m.memory.signalled is None and not kept:
        m.to("contested", warned=None)
        m.remember(signalled=frozenset())
    if pausable(view, m.turn):
        if m.clients:  # else the first one is only being handed over
            m.to("pausing", warned=None)
        return None
    waits, waited = f"user {view.others()[0]}", duration_text(now - (m.turn.contested or now))
    over = f"the turn of user {uid} is over: {waits} has waited {waited}"
    left = rules.switch_grace if m.turn.warned is None else times[1] - now
    ends = kept or f"its turn ends in {duration_text(left)}"
    warning = f"user {uid} has had the GPU for {waited} while {waits} waits; {ends}"
    if m.turn.warned is None:
        m.report("turn.warning", warning)
        m.remember(signalled=None if kept else frozenset())
        m.actions += [] if kept else [*_signals(m, warning)]
        m.to("warned", warned=now)
    elif left > 0:
        m.actions += [] if kept else _signals(m, warning)
        return times[1]
    elif not kept:
        m.report("turn.ending", over)
        m.to("ending", ending=now)
    elif m.turn.phase == "warned":
        m.report("turn.over", f"{over}; {kept}")
        m.to("late")
        m.remember(signalled=None)
    return None


def _between(m: Moment) -> float | None:
    """None of its user's processes works: the next one is on its way through the gate. Who came later waits for that,
    but not without end; between two processes of a user who has more of them waiting than may work at once
    (``max_clients``, a total, the gate's pace) the turn lasts as long as any other; and a turn that no user wanted
    goes to the user who comes first."""
    view, state, turn, until = m.view, m.view.state, m.turn, float("inf")
    first, contested = state.held.first(turn.uid), view.contested()
    mine = first is not None and (turn.phase != "idle" or contested is None or first.since <= contested)
    mine = mine and view.identified(turn.uid) and not view.ends_soon(turn.uid)
    ends = state.drain is not None
    if turn.began is not None:
        times = deadlines(view, turn)
        until = float("-inf") if ends or view.outdated else until if times is None else times[1]
    tried = turn.tried
    if mine and (ends or view.sent is None or not view.sent[1].open):
        tried = None
    elif mine and tried is None and view.let_in(turn.uid):
        tried = m.now
    if tried is not None:
        until = min(until, tried + TAKE_UP)
    goes_on = mine and m.now < until
    m.to(("open" if turn.phase == "idle" else turn.phase) if goes_on else "shut", tried=tried)
    return until if until < float("inf") else None


def _pausing(m: Moment) -> float | None:
    """Its user is shut out first, so that no process is frozen in the middle of its hand-over; then all are frozen;
    then the turn is over."""
    view, uid, clients = m.view, m.turn.uid, m.clients
    if not clients:
        m.to(m.turn.reached if m.works else "shut")
        return None
    rest, unpausable = {other: at for other, at in m.memory.suspended.items() if other != uid}, m.turn.unpausable
    if view.may_pause(uid) and view.others() and not view.faulted(m.now)[0]:
        if uid not in m.memory.suspended and not may_freeze(view, uid):
            return None
        since = m.memory.suspended.get(uid, m.now)
        m.remember(suspended={**rest, uid: since})
        if all(c.frozen is not None or c.detached is not None for c in clients):
            m.over(behind=True)
            m.remember(suspended={**rest, uid: m.now})
            m.told.append(tr.UserPaused(m.now, uid, len(clients)))
            return None
        if m.now < since + FREEZE:
            return since + FREEZE
        late = [c for c in clients if c.frozen is None]
        pids = ", ".join(str(c.pid) for c in late)
        reason = f"the processes of user {uid} are not paused: {pids} did not stop within {FREEZE:.0f} s"
        m.report("turn.not_paused", reason, "turn.on_expiry")
        unpausable = frozenset((c.pid, c.peer.start) for c in late)
    m.remember(suspended=rest)
    m.to(m.turn.reached, unpausable=unpausable)
    return None


def _ending(m: Moment) -> float | None:
    """Each client on the ladder, or the daemon quits; over when all have gone and its user is shut out. After
    ``TERMINATE`` seconds clients that were not asked yet are signalled, if only clients of the same user are
    there: they all go."""
    view, uid, ending = m.view, m.turn.uid, m.turn.ending or m.now
    if not m.works:
        fresh = not m.wanted and view.state.held.first(uid) is not None  # what comes now is a new turn
        if fresh or view.shut_out(uid):
            m.over(behind=not fresh)
        return None
    rules = view.rules(uid)
    if not rules.enforce:
        m.to(m.turn.reached, ending=None)
        return None
    control = view.state.control if view.control_alive else None
    quits_all = rules.forced_end == "restart-mps" and not m.memory.suspended  # who is paused is not to pay for it
    # Once another daemon runs, the clients of the one that quit are leftovers.
    if quits_all and control is not None and (m.memory.quit is None or m.memory.quit[0] == control.pid):
        reason = f"the turn of user {uid} is over; waiting users are held until its clients have gone"
        return m.quit(control, max(1, round(rules.kill_grace)), reason, rules.origin("turn.on_expiry").key)
    due = _signalled(m, ending)
    late = (m.now >= due and len(view.state.users()) <= 1) or quits_all
    reason, rule = f"the turn of user {uid} is over", rules.origin("turn.time_limit").key
    m.requests += [EndClient.of(c, reason, rule, "turn", signals_only=late) for c in m.clients]
    return due if m.now < due else None


def _signalled(m: Moment, end: float) -> float:
    """Return when processes that MPS has not been asked to end are signalled, for a turn that ends at ``end``."""
    policy = m.view.policy
    return end + TERMINATE + (policy.hook_deadline if m.view.rules(m.turn.uid).before_end_hook else 0.0)


def _shut(m: Moment) -> None:
    """Its user is shut out; over when the gate says that it is so. A process that passed before that goes on."""
    if m.clients:
        m.to(m.turn.reached)
    elif not m.works and m.view.shut_out(m.turn.uid):
        m.over(behind=m.turn.began is not None or m.turn.tried is not None)


PHASES: Mapping[Phase, Callable[[Moment], float | None]] = {
    "idle": _idle,
    "open": _open,
    "contested": _contested,
    "warned": _contested,
    "late": _contested,
    "pausing": _pausing,
    "ending": _ending,
    "shut": _shut,
}


def _kept(rules: Rules) -> str:
    """Why a turn does not end when its time is over; empty when it does."""
    if not rules.enforce:
        return "it goes on all the same, because the policy does not enforce its end"
    return 'it goes on all the same (turn.on_expiry = "none")' if rules.forced_end == "none" else ""


def _signals(m: Moment, reason: str) -> Iterator[act.Action]:
    """What the user's programs see of the warning, at which training scripts save, and people on their terminals; also
    one that is let in later."""
    uid, rules = m.turn.uid, m.view.rules(m.turn.uid)
    known = m.memory.signalled or frozenset()
    cgroups = {(one.pid, one.peer.start): one.peer.cgroup for one in m.clients if one.detached is None}
    clients = cgroups.keys() - known
    m.remember(signalled=known | clients)
    for pid, start in sorted(clients) if rules.terminal and uid else ():
        text = f"{reason} ({rules.place('turn.time_limit')}): save your work"
        yield line(m.view, (pid, start), uid, cgroups[pid, start], text)
    if rules.switch_warning_signal != "none" and clients:
        number, rule = signal.Signals[rules.switch_warning_signal], rules.origin("turn.warning_signal").key
        for pid, start in sorted(clients):
            why = f"{reason}; {number.name} to client {pid} of user {uid}"
            yield act.WarnClient(pid=pid, start=start, uid=uid, signal=int(number), reason=why, rule=rule)


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not get through is sent again, after a moment."""
    action, asked = done.action, memory.shutdown
    if isinstance(action, act.ShutdownServer) and not done.ok and asked is not None and asked.server == action.server:
        soon = 0.1 if asked.times <= 3 else SHUTDOWN_AGAIN
        again = asked._replace(last=done.at + soon - SHUTDOWN_AGAIN, times=min(asked.times, 4))
        return replace(memory, shutdown=again)
    if isinstance(action, act.QuitControl) and not done.ok and memory.quit is not None:
        return replace(memory, quit=(memory.quit[0], done.at - AGAIN))
    return memory
