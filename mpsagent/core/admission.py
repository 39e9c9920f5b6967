"""Who is let in at the gate, with which limits: the table that the gate is told.

It names the user whose turn it is, or with ``sharing = "one-server"`` all who work or wait; the gate hands them over in
the order of arrival. Held, not refused: while a server is in FAULT or ends by a person's order, the control daemon is
away, a server is full or a drain is on, everybody waits. Refused are only users whom the policy denies, and everybody
while the instance has failed: these get their CUDA error at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest

from mpsagent.core import actions as act
from mpsagent.core import memory_use, own_daemons
from mpsagent.core.inputs import Peer
from mpsagent.core.lines import line
from mpsagent.core.model import Drain, Held, Status
from mpsagent.core.rule import Decision, Reason
from mpsagent.core.view import View
from mpsagent.mps.limits import Total
from mpsagent.policy.policy import Rules
from mpsagent.policy.shares import Share
from mpsagent.wire.link import Admissions, HeldUp, Job, Named, Refuse, Release, User

RULE = "admission"
RELEASE_AFTER = 0.5
"""Seconds after a client left its server, its process living on, until its next connection is a new admission. A
program that makes one context after the other must not lose its turn in between."""
MOST_USERS = 128
"""Users in one table; 48 processes fit at a time, so who is not in it yet is still to wait anyway."""
MOST_PROCESSES, OF_ONE_USER = 128, 8
"""Held processes in one table, in which each has its own limits."""
DEVICES = 16
"""With this number of devices a table of these users and processes fits into one message; with more, fewer do."""
TOLD_EVERY = 60.0
"""Seconds in which one refused process of a user is told the reason. A line costs a helper process."""
AGAIN = 0.2
"""Seconds until a message that the gate did not read is sent again."""


NEXT = Reason("next", "is admitted next")


@dataclass(frozen=True, slots=True)
class Memory:
    """``sent``: what this gate (by its pid and the time of its link) was told last, and the number of that."""

    number: int = 0
    sent: Admissions | None = None
    gate: tuple[int, float] | None = None
    refused: frozenset[int] = frozenset()
    """Connections that the gate was asked to turn away."""
    telling: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Connections that are refused when their process (pid, start) has the reason on its terminal."""
    told: Mapping[int, float] = field(default_factory=dict)
    """By uid: when a process of this user was last told why it is refused."""
    released: frozenset[tuple[int, int]] = frozenset()
    """Processes (pid, start) that the gate was asked to forget."""
    held_up: Mapping[int, float] = field(default_factory=dict)
    """What of ``State.held_up`` the gate was told."""
    again_at: float = float("-inf")


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    gate = view.state.gate
    if gate is None or not gate.synced:
        return Decision(Memory(number=memory.number, held_up=memory.held_up))
    told = (gate.pid, gate.since)
    if memory.gate != told:
        memory = Memory(number=memory.number, gate=told, held_up=memory.held_up)
    if now < memory.again_at:
        return Decision(memory, wake=memory.again_at)
    todo: list[act.Action] = list(_held_up(view, memory.held_up))
    held = tuple(holds(view, now))
    wanted, number = _admissions(view, held), memory.number
    if wanted != memory.sent:
        number += 1
        names = ", ".join(str(uid) for uid in wanted.users) or "none"
        reason = f"admitted users: {names}" if wanted.open else f"all users are held: {held[0].text}"
        todo.append(act.TellGate(message=replace(wanted, number=number), reason=reason, rule=RULE))
    memory, turned_away = _refusals(view, memory, now)
    released, leaving, wake = _releases(view, memory.released, now)
    costs = view.state.held_up
    fresh = replace(memory, number=number, sent=wanted, released=released, held_up=costs)
    wakes = [at for at in (wake, *(one.until for one in held)) if at is not None and at > now]
    return Decision(fresh, (*todo, *turned_away, *leaving), wake=min(wakes, default=None))


def _held_up(view: View, told: Mapping[int, float]) -> Iterator[act.Action]:
    """Yield the seconds for which users have held others up, and which the gate has not been told yet."""
    for uid, seconds in view.state.held_up.items():
        more = seconds - told.get(uid, 0.0)
        if more > 0:
            reason = f"clients of user {uid} have held other users' clients up for {more:.1f} s"
            yield act.TellGate(message=HeldUp(uid, more), reason=reason, rule=RULE)


def _drained(drain: Drain) -> str:
    by = "" if drain.by is None else f" by user {drain.by}"
    until = "MPS has been restarted" if drain.restart else "an administrator runs mpsagent-cli resume"
    return f"maintenance (drain{by}): no new client is admitted until {until}"


def holds(view: View, now: float) -> Iterator[Reason]:
    """Return the reasons that hold all users alike, in the order in which waiting users see them."""
    state, control, fault = view.state, view.state.control, view.faulted(now)
    if state.gate is not None and not state.gate.synced:
        yield Reason("gate", "the queue is not known yet, because mpsagent has just started")
    if view.given_up is not None:
        yield Reason("failed", f"is refused: {view.given_up}")
    if state.drain is not None:
        yield Reason("drain", _drained(state.drain), known=True)
    if view.elsewhere:
        yield Reason("daemon", own_daemons.full(view) or "this user's own control daemon is being started")
    elif view.leaving:
        yield Reason("daemon", own_daemons.full(view) or "", known=True)
    if control is None or not control.proven:
        yield Reason("control", "MPS is starting again; you keep your place")
    elif control.quitting is not None or view.retiring:
        yield Reason("control", "MPS is stopping and starts again; you keep your place")
    if fault[0]:
        server = next((one.pid for one in state.servers.values() if one.status is Status.FAULT), None)
        what = (
            "MPS has just recovered from a fault; you keep your place"
            if server is None
            else f"server {server} is in FAULT"
        )
        yield Reason("fault", what, until=fault[1])
    for one in state.servers.values():
        if one.doubt is not None and now < one.doubt.until and one.status is Status.ACTIVE:
            what = f"a client of server {one.pid} has died at work, and a fault may follow"
            yield Reason("doubt", what, known=True, until=one.doubt.until)
    if view.pause_until is not None and now < view.pause_until:
        failure = state.start_failure
        said = f": {failure.reason}" if failure is not None and failure.reason else ""
        yield Reason("starts", f"MPS's servers do not start{said}", until=view.pause_until)


def hold(view: View, uid: int) -> Reason | None:
    """Return the reason for which the table does not name a user, except those that hold all; None: it does."""
    turn = view.turn
    if view.denied(uid):
        return Reason("denied", f"is refused: {view.denial(uid)}")
    if not view.identified(uid):
        return Reason("name", "the name service has not identified this user yet (getent passwd)")
    if view.outgoing and uid not in view.state.users():
        return Reason("daemon", own_daemons.full(view) or "this user's own control daemon is being started")
    if not view.ever_fits(uid):
        where = total_places(view.rules(uid))
        return Reason("total", f"no process of this user fits in its total ({where}): run mpsagent-cli policy check")
    if view.together:
        return None
    if turn is None:
        return view.turn_waits or NEXT
    if turn.uid == uid:
        return None if turn.let_in else Reason("turn", "this user's own turn is over")
    whose = f"it is the turn of user {turn.uid}"
    if uid in view.suspended:
        count = len(view.state.clients_of_user(uid))
        what = "its process is" if count == 1 else f"its {count} processes are"
        their = "its" if count == 1 else "their"
        return Reason("paused", f"{what} frozen with {their} memory: {whose}")
    if turn.no_room is not None and uid == view.waiting()[0]:
        whose += f", who cannot be paused: {turn.no_room}"
    return Reason("turn", whose)


def total_places(whose: Rules | Share) -> str:
    """Return the keys of a total, each with its file and line."""
    given = ("total_active_threads", whose.total_threads), ("total_memory_limit", whose.total_memory)
    return "; ".join(dict.fromkeys(whose.place(name) for name, value in given if value is not None))


def _admitted(view: View) -> list[int]:
    """The users who may pass: whose turn it is; or, together, all who work or wait."""
    if view.outgoing:
        return view.welcome(view.state.users())[:MOST_USERS]
    if view.together:
        return view.welcome(dict.fromkeys((*view.state.users(), *view.state.held.users())))[: _most(view, MOST_USERS)]
    return [] if view.turn is None or hold(view, view.turn.uid) is not None else [view.turn.uid]


def _admissions(view: View, held: Sequence[Reason]) -> Admissions:
    """The table that follows from the state."""
    fail_safe, is_open = view.fail_safe(), all(one.known for one in held)
    devices = tuple(device.ordinal for device in view.state.devices)
    admitted = _admitted(view) if is_open else []
    users = _users(view, admitted, known_only=bool(held) or any(map(view.ends_soon, admitted)))
    named = list(_named(view, admitted)) if view.shares else []
    jobs = {share.counted_as: _job(view, share) for _, share in named if share is not None}
    return Admissions(
        open=is_open, users=users, room=view.room, fail_safe=fail_safe, devices=devices,
        set_limits=view.limits_enforced, processes={one.key: one for one, _ in named}, jobs=jobs,
        instance=view.name,
    )  # fmt: skip


def _most(view: View, rows: int) -> int:
    """Return how many of these rows fit, which have a memory limit for each device."""
    return rows * DEVICES // max(DEVICES, len(view.state.devices))


def _named(view: View, users: list[int]) -> Iterator[tuple[Named, Share | None]]:
    """Clients of jobs that are bounded, clients of unknown limits, and the next ones of each user, by turns: those that
    may not pass for another reason take no other client's place."""
    unknown = (one for one in view.state.clients.values() if one.limits is None and view.job(one.peer) is None)
    for one in chain(*view.jobs().values(), unknown):
        if one.detached is None:
            share = view.job(one.peer)
            # of limits that are not known, those of its next context
            limits = view.limits_of(one.peer).settable() if one.limits is None else one.limits
            yield Named(one.pid, one.peer.start, limits, "" if share is None else share.counted_as), share
    lines = [islice(_with_room(view, uid), OF_ONE_USER) for uid in users]
    for held in islice(filter(None, chain.from_iterable(zip_longest(*lines))), _most(view, MOST_PROCESSES)):
        share = view.job(held.peer)
        limits = view.limits_of(held.peer).settable()
        yield Named(held.peer.pid, held.peer.start, limits, "" if share is None else share.counted_as), share


def _with_room(view: View, uid: int) -> Iterator[Held]:
    """A client whose job is full is passed over: other clients of the user come from other jobs."""
    known = {(one.pid, one.peer.start) for one in view.state.clients_of_user(uid)}
    full, places = set[str](), set[tuple[object, ...]]()
    for held in view.state.held.line(uid):
        place = held.peer.cgroup, held.peer.lineage
        if held.process in known or place in places:  # 1,024 of one job that is full are passed over in 0.15 ms
            continue
        share = view.job(held.peer)
        if share is None or (share.job not in full and _has_room(view, held.peer, share)):
            yield held
        else:
            full.add(share.job)
            places.add(place)


def _has_room(view: View, peer: Peer, share: Share) -> bool:
    clients = view.clients_of_job(share.job)
    if share.max_clients is not None and len(clients) >= share.max_clients:
        return False
    total = share.total(view.state.devices) or Total()
    used = [memory_use.counted(view.state, one) or view.limits_of(one.peer) for one in clients]
    return total.fits(used, view.limits_of(peer))


def _job(view: View, share: Share) -> Job:
    total = share.total(view.state.devices)
    clients = view.clients_of_job(share.job)
    left = None if total is None else memory_use.left(view.state, clients, total)
    return Job(share.counted_as, share.max_clients, left)


def _users(view: View, uids: list[int], *, known_only: bool) -> dict[int, User]:
    """Each with the limits and bounds that follow from the policy; they are made once, but for what counts besides."""
    state = view.state
    of = (state.policy, state.identities, state.devices, state.leases, view.room, view.shared, known_only)
    known, found = view.once("users", of, dict[int, User]), dict[int, User]()
    if len(known) > 2 * MOST_USERS:
        known.clear()
    for uid in uids:
        user = known.get(uid)
        if user is None:
            user = known[uid] = _user(view, uid, known_only=known_only)
        if user.total is not None and state.over:
            user = replace(user, total=memory_use.left(state, state.clients_of_user(uid), user.total))
        found[uid] = user
    return found


def _user(view: View, uid: int, *, known_only: bool) -> User:
    rules = view.rules(uid)
    return User(
        uid=uid,
        limits=view.limits(uid).settable(),
        admit="known" if known_only else "all",
        max_clients=rules.max_clients if rules.enforce else None,
        max_contexts=view.most_contexts(rules) if rules.enforce else None,
        named=view.shares,
        total=rules.total(view.state.devices) if rules.enforce else None,
    )


def _refusals(view: View, memory: Memory, now: float) -> tuple[Memory, list[act.Action]]:
    """Refuse the held connections of users whom the policy denies. One process of a user in a minute learns why on its
    terminal, before it gets the error and exits."""
    todo: list[act.Action] = []
    held = view.state.held
    refused = {number for number in memory.refused if number in held}
    telling = {number: process for number, process in memory.telling.items() if number in held}
    told = {uid: at for uid, at in memory.told.items() if now < at + TOLD_EVERY}
    for uid in held.users() if view.policy.denies or view.given_up is not None else ():
        if view.denied(uid):
            reason, rule = view.denial(uid), view.rules(uid).key("access")
        elif view.given_up is not None:
            reason, rule = view.given_up, RULE
        else:
            continue
        for one in held.line(uid):
            if one.connection in refused or one.connection in telling or one.handing is not None:
                continue
            if uid and uid not in told and view.rules(uid).terminal:
                told[uid], telling[one.connection] = now, one.process
                words = f"process {one.process[0]} may not use MPS: {reason}; ask an administrator of this node"
                todo.append(line(view, one.process, uid, one.peer.cgroup, words))
                continue
            refused.add(one.connection)
            todo.append(act.TellGate(message=Refuse(one.connection, reason), reason=reason, rule=rule))
    return replace(memory, refused=frozenset(refused), telling=telling, told=told), todo


def _releases(
    view: View, before: frozenset[tuple[int, int]], now: float
) -> tuple[frozenset[tuple[int, int]], list[act.Action], float | None]:
    todo: list[act.Action] = []
    asked: set[tuple[int, int]] = set()
    wake: float | None = None
    for client in view.state.clients.values():
        key = (client.pid, client.peer.start)
        if client.detached is None or client.pid in view.ending or client.frozen is not None:
            continue
        if key in before:
            asked.add(key)
            continue
        due = client.detached + RELEASE_AFTER
        if now < due:
            wake = due if wake is None else min(wake, due)
            continue
        asked.add(key)
        reason = f"client {client.pid} of user {client.uid} has left its server; its process lives on"
        todo.append(act.TellGate(message=Release(*key, client.at_gate or 0), reason=reason, rule=RULE))
    return frozenset(asked), todo, wake


def note(memory: Memory, done: act.Done) -> Memory:
    """What did not reach the gate is told again: the link was lost, and a new one begins with everything; or the gate
    does not read, and then it must not be told a thousand times a second."""
    if isinstance(done.action, act.Tell):
        process = done.action.pid, done.action.start
        left = {number: one for number, one in memory.telling.items() if one != process}
        return memory if len(left) == len(memory.telling) else replace(memory, telling=left)
    if done.ok or not isinstance(done.action, act.TellGate):
        return memory
    memory = replace(memory, again_at=done.at + AGAIN)
    match done.action.message:
        case Admissions():
            return replace(memory, sent=None)
        case Refuse(connection):
            return replace(memory, refused=memory.refused - {connection})
        case Release(pid, start):
            return replace(memory, released=memory.released - {(pid, start)})
        case HeldUp(uid, seconds):
            return replace(memory, held_up={**memory.held_up, uid: memory.held_up.get(uid, 0.0) - seconds})
    return memory
