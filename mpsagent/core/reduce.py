"""``reduce(state, input) -> (state, transitions)``: the only place where the state changes.

Gate, kernel and actions are taken in here; what the two logs say is in :mod:`mpsagent.core.reduce_logs`, what MPS
answers in :mod:`mpsagent.core.reduce_answers`, what people order in :mod:`mpsagent.core.reduce_people`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpsagent.core import inputs as inp
from mpsagent.core import memory_use, reduce_answers, reduce_logs, reduce_people, use
from mpsagent.core import transitions as tr
from mpsagent.core.actions import (
    Done,
    Freeze,
    KillServer,
    SignalClient,
    TellGate,
    TerminateClient,
    Thaw,
)
from mpsagent.core.changes import (
    Out,
    back,
    bounded,
    held_up,
    known_again,
    lost,
    more,
    put,
    server_ended,
    without,
)
from mpsagent.core.model import (
    DOUBT_MOST,
    FAULT_WITHIN,
    LOGS_EARLY,
    PROPERLY,
    SEEN_EVERY,
    Attachment,
    Client,
    Control,
    Doubt,
    Gate,
    Held,
    Key,
    Outcome,
    Refusal,
    Server,
    State,
)
from mpsagent.core.queue import Queue
from mpsagent.mps.events import Line
from mpsagent.wire import link

MOST_HELD = 10_000
"""The gate's own bound is lower; more is a mistake of the gate's."""
MOST_TURNED_AWAY = 1024
MOST_REFUSALS = 16
MOST_GONE = 256
NEVER = {
    "debugged": "it is being debugged, and would run without MPS and without limits",
    "unknown": "it says that it is of a kind that mpsagent does not know",
}
"""Reasons for which a connection is held and never handed over."""


def kind_of(event: inp.Input | Done) -> object:
    """Return what selects the reducer of an input: its class, of a log line or a message of the gate what it says."""
    if isinstance(event, Line):
        return event.what
    return type(event.what) if isinstance(event, inp.GateSaid) else type(event)


def reduce(state: State, event: inp.Input | Done) -> tuple[State, list[tr.Transition]]:
    """Return the state of a control daemon after ``event``, and what happened. An input without effect returns
    ``state`` itself."""
    out: Out = []
    kind = kind_of(event)
    if (rule := _RULES.get(kind)) is not None:
        state = rule(state, event, out)
    return reduce_each(state, event), out


def reduce_each(state: State, event: inp.Input | Done) -> State:
    """Return the state of one of several control daemons after an input about all of them."""
    rule = _EACH.get(kind_of(event))
    return state if rule is None else rule(state, event)


# --- the gate ---------------------------------------------------------------------------------------------------------


def _gate_connected(state: State, event: inp.GateSaid[link.Hello], out: Out) -> State:
    out.append(tr.GateConnected(event.at, event.what.gate))
    clients = {pid: replace(one, at_gate=None) for pid, one in state.clients.items()}
    return replace(_nothing_held(state), gate=Gate(event.what.gate, event.at), clients=clients)


def _gate_lost(state: State, event: inp.LinkLost, out: Out) -> State:
    if state.gate is None:
        return state
    out.append(tr.GateLost(event.at))
    return replace(_nothing_held(state), gate=None)


def _nothing_held(state: State) -> State:
    """The gate tells all that it holds again. A connection that is told again is not a new one."""
    before = dict(state.before)
    for held in (*state.held.values(), *state.never.values()):
        if not held.of_client:
            before.setdefault(held.process, held)
    return replace(state, held=Queue(), never={}, turned_away={}, slowed={}, before=before)


def _gate_synced(state: State, event: inp.GateSaid[link.Synced], out: Out) -> State:
    if state.gate is None:
        return state
    for held in state.before.values():
        out.append(replace(_gone(state, held, event.at), lost=True))
    return replace(state, gate=replace(state.gate, synced=True), before={})


def _gone(state: State, held: Held, at: float) -> tr.ClientLeft:
    _, job = state.job(held.peer)
    return tr.ClientLeft(at, held.peer.pid, held.peer.uid, max(0.0, at - held.since), job)


def _is_client(state: State, peer: inp.Peer) -> bool:
    known = state.clients.get(peer.pid)
    return known is not None and known.peer.start == peer.start


def _has_ended(state: State, peer: inp.Peer) -> bool:
    """Return whether the end of a client is on record. The gate may report the client later: it has found it in its
    store, or was handing over a further context."""
    return (peer.pid, peer.start) in state.gone


def _knocked(state: State, event: inp.GateSaid[link.Knock], out: Out) -> State:
    said, peer = event.what, event.peer
    of_client = _is_client(state, peer) or _has_ended(state, peer)
    held = Held(said.connection, peer, said.since, of_client=of_client, never=said.never)
    if len(state.held) + len(state.never) >= MOST_HELD:
        return state
    if held.process in state.before:
        state = replace(state, before=without(state.before, held.process))
    elif not held.of_client and not state.held.has(held.process):
        told = said.since, peer.pid, peer.uid
        why = NEVER.get(said.never, NEVER["unknown"])
        out.append(tr.ClientHeld(*told, why) if said.never else tr.ClientWaiting(*told, said.connection))
    if said.never:
        return replace(state, never={**state.never, said.connection: held})
    return replace(state, held=state.held.put(held))


def _known(state: State, event: inp.GateSaid[link.Known], out: Out) -> State:
    said, peer = event.what, event.peer
    if _is_client(state, peer):
        client = known_again(state.clients[peer.pid], event)
        return replace(state, clients={**state.clients, peer.pid: client})
    if _has_ended(state, peer):
        return state
    state = _another(state, peer, event.at, out)
    before = state.before.get((peer.pid, peer.start))
    number, job = state.job(peer)
    most = None if said.most is None or _worked_before(state, peer.pid, said.since) else said.most.memory
    client = Client(
        peer, said.since, limits=said.limits, most_memory=most,
        connections=said.connections, lease=number, job=job, daemon=state.user, counts=said.counts,
    )  # fmt: skip
    if event.earlier is not None:
        client = _remembered(peer, event.earlier, state.user)
    client = known_again(client, event)
    client = replace(client, since=min(client.since, said.since))
    if before is not None:  # it passed while the link was down
        client = replace(client, waited=max(0.0, said.since - before.since))
        told = (said.since, peer.pid, peer.uid, client.waited, client.limits, client.fail_safe)
        out.append(tr.ClientConnected(*told, lease=client.lease, job=client.job))
        state = replace(state, before=without(state.before, before.process))
    if client.unseen and state.gate is not None and state.gate.synced:  # before that: an earlier agent has said it
        told = (client.since, peer.pid, peer.uid, 0.0, client.limits, False)
        out.append(tr.ClientConnected(*told, lease=client.lease, job=client.job, unseen=True))
    return _taken_over(state, client, event.at)


def _remembered(peer: inp.Peer, earlier: inp.Remembered, daemon: Key) -> Client:
    """Return the client as an earlier agent knew it."""
    outcome = next((one for one in Outcome if one == earlier.outcome), Outcome.OK)
    return Client(
        peer, earlier.since, earlier.waited, earlier.limits, earlier.most_memory, earlier.fail_safe,
        earlier.connections, terminated=earlier.terminated, outcome=outcome, lease=earlier.lease,
        job=earlier.job, daemon=daemon, counts=earlier.counts, counted=earlier.counted,
    )  # fmt: skip


def _client_remembered(state: State, event: inp.ClientRemembered, out: Out) -> State:
    """Add the client. The rule ``relayed`` reports it to the gate. MPS is asked if it has left its server meanwhile."""
    if _is_client(state, event.peer):
        return state
    state = _another(state, event.peer, event.at, out)
    return _taken_over(state, _remembered(event.peer, event.earlier, state.user), event.at)


def _taken_over(state: State, client: Client, at: float) -> State:
    """A client that passed before this agent, or without it."""
    if state.control is not None and state.control.proven:
        client = _of_earlier(client, state.control, at)
    elif state.user is not None:  # its control daemon has gone, with the agent before, and no other one asks after it
        client = lost(client, at, confirmed=True)
    return _with_logs(state, client, client.since - LOGS_EARLY)


def _no_context(state: State, event: inp.GateSaid[link.NoContext], out: Out) -> State:
    said = event.what
    client = state.clients.get(said.pid)
    if client is None or client.peer.start != said.start:
        return state
    return replace(state, clients={**state.clients, said.pid: replace(client, counts=False)})


def _of_earlier(client: Client, control: Control, at: float) -> Client:
    """One that passed before this control daemon was there, where the end of the one before was not noticed (recording
    12, H5). It may have passed again since then, so MPS is asked."""
    before = client.since < control.started and client.detached is None
    return replace(client, said_left=at) if before and client.said_left is None else client


def _worked_before(state: State, pid: int, came: float) -> bool:
    """Return whether MPS had a new client before it came to the gate: an earlier gate has let it in, and the limits of
    its first contexts are not known."""
    server = state.server_of(pid)
    known = None if server is None else server.attached[pid]
    return known is not None and known.ended is None and known.since < came - LOGS_EARLY


def _with_logs(state: State, client: Client, since: float) -> State:
    """A new client, with what the logs said of it before the gate did."""
    server, left = state.server_of(client.pid), state.left.get(client.pid)
    if server is not None and (client.unseen or state.fits(client, server)):
        client = replace(client, server=server.pid)
    elif left is not None and left[0] >= since:
        client = replace(client, said_left=left[0], server=left[1])
    if left is not None:
        state = replace(state, left=without(state.left, client.pid))
    if client.outcome is Outcome.OK and any(client.pid in one.sticky for one in state.servers.values()):
        client = replace(client, outcome=Outcome.FAULTED)
    return replace(state, clients={**state.clients, client.pid: client})


def _another(state: State, peer: inp.Peer, at: float, out: Out) -> State:
    """An earlier process had this pid, and its end is only now known."""
    return state if peer.pid not in state.clients else _ended(state, inp.ProcessEnded(at, peer.pid), out)


def _left(state: State, event: inp.GateSaid[link.Left], out: Out) -> State:
    said = event.what
    if said.connection in state.turned_away:
        return replace(state, turned_away=without(state.turned_away, said.connection))
    if said.connection in state.never:
        out.append(_gone(state, state.never[said.connection], event.at))
        return replace(state, never=without(state.never, said.connection))
    held = state.held.get(said.connection)
    if held is None:
        return state
    rest = state.held.without(said.connection)
    if not held.of_client and not _is_client(state, held.peer) and not rest.has(held.process):
        out.append(_gone(state, held, event.at))
    return replace(state, held=rest)


def _handing(state: State, event: inp.GateSaid[link.Handing], out: Out) -> State:
    said = event.what
    held = state.held.get(said.connection)
    if held is None:
        held = state.turned_away.get(said.connection)
        if held is None:
            return state
        state = replace(state, turned_away=without(state.turned_away, said.connection))
    return replace(state, held=state.held.put(replace(held, handing=event.at)))


def _passed(state: State, event: inp.GateSaid[link.Passed], out: Out) -> State:
    said, peer = event.what, event.peer
    held = state.held.get(said.connection)
    since = event.at if held is None else held.since
    if held is not None and held.process == (peer.pid, peer.start):
        peer = held.peer  # what the kernel said when it came: more than the gate repeats
    if said.status:  # the client said so itself; a log's line might name any process
        why = f"its server did not take it (CUDA error {said.status})"
        out.append(tr.ClientRefused(event.at, peer.pid, peer.uid, why, state.job(peer)[1]))
        state = _refused(state, peer.pid, peer.start, peer.uid, peer.cgroup, why)
    unconfirmed = state.unconfirmed
    if not said.fail_safe and peer.uid in unconfirmed:
        unconfirmed = without(unconfirmed, peer.uid)
    state = replace(state, failed_handovers=0, start_failure=None)
    state = replace(state, held=state.held.without(said.connection), unconfirmed=unconfirmed)
    memory = None if said.limits is None else said.limits.memory
    if _is_client(state, peer):
        client = back(state.clients[peer.pid])
        client = replace(
            client, limits=said.limits, most_memory=more(client.most_memory, memory), fail_safe=said.fail_safe,
            connections=client.connections + 1, at_gate=(client.at_gate or 0) + 1, counts=True,
            counted=client.counted if client.counts else event.at,
        )  # fmt: skip
        return replace(state, clients={**state.clients, peer.pid: client})
    if _has_ended(state, peer):
        return state
    number, job = state.job(peer)
    most = None if _worked_before(state, peer.pid, since) else memory
    client = Client(
        peer, event.at, max(0.0, event.at - since), said.limits, most, said.fail_safe, at_gate=1, lease=number,
        job=job, daemon=state.user,
    )  # fmt: skip
    state = _another(state, peer, event.at, out)
    took = None if held is None or held.handing is None else max(0.0, event.at - held.handing)
    told = (event.at, peer.pid, peer.uid, client.waited, said.limits, said.fail_safe)
    out.append(tr.ClientConnected(*told, took, number, job))
    queue = state.held
    for other in queue.of((peer.pid, peer.start)):
        queue = queue.put(replace(other, of_client=True))
    return _with_logs(replace(state, held=queue), client, since)


def _handover_failed(state: State, event: inp.GateSaid[link.Failed], out: Out) -> State:
    said = event.what
    state = replace(state, failed_handovers=state.failed_handovers + 1)
    held = state.held.get(said.connection)
    if held is None or said.lost or held.failed != said.why:  # it is tried again and again
        out.append(tr.HandoverFailed(event.at, said.pid, said.uid, said.stage, said.why, said.lost))
    if held is None:
        return state
    if said.lost:
        return replace(state, held=state.held.without(said.connection))
    return replace(state, held=state.held.put(replace(held, handing=None, failed=said.why)))


def _unconfirmed(state: State, event: inp.GateSaid[link.Unconfirmed], out: Out) -> State:
    said = event.what
    _, why = state.unconfirmed.get(said.uid, (None, None))
    if why != said.why:
        out.append(tr.LimitsUnconfirmed(event.at, said.uid, said.why))
    return replace(state, unconfirmed=bounded({**state.unconfirmed, said.uid: (event.at, said.why)}, 64))


def _slowed(state: State, event: inp.GateSaid[link.Slowed], out: Out) -> State:
    return replace(state, slowed=bounded({**state.slowed, event.what.uid: event.what.until}, 1024))


def _applied(state: State, event: inp.GateSaid[link.Applied], out: Out) -> State:
    if state.gate is None or event.what.number <= state.applied:
        return state
    return replace(state, applied=event.what.number, unkept=event.what.unkept)


def _front_end(state: State, event: inp.GateSaid[link.FrontEnd], out: Out) -> State:
    """An administrator's ``terminate_client S P`` is as good as ours: it must not be asked twice."""
    said = event.what
    out.append(tr.FrontEndUsed(event.at, said.pid, said.uid, said.command, said.refused))
    match said.command.split():
        case ["terminate_client", _, pid] if said.uid == 0 and not said.refused and pid.isdecimal():
            client = state.clients.get(int(pid[:10]))
            if client is not None and client.terminated is None:
                return replace(state, clients={**state.clients, client.pid: replace(client, terminated=event.at)})
    return state


def _handshake(state: State, event: inp.GateSaid[link.HandshakeSeen], out: Out) -> State:
    said = event.what
    if state.gate is None or state.known_handshake == said.known:
        return state
    if not said.known:
        out.append(tr.HandshakeUnknown(event.at, said.greeting))
    return replace(state, known_handshake=said.known)


def _gate_refused(state: State, event: inp.GateSaid[link.Refused], out: Out) -> State:
    said = event.what
    held = state.held.get(said.connection)
    job = None if held is None else state.job(held.peer)[1]
    out.append(tr.ClientRefused(event.at, said.pid, said.uid, said.why, job))
    if said.pid > 0 and said.start:
        state = _refused(state, said.pid, said.start, said.uid, said.cgroup, said.why)
    if said.connection in state.never:
        return replace(state, never=without(state.never, said.connection))
    if held is not None:
        return replace(state, held=state.held.without(said.connection))
    return state if said.pid > 0 else replace(state, unseen=state.unseen + 1)


def _refused(state: State, pid: int, start: int, uid: int, cgroup: str | None, why: str) -> State:
    number = state.refusals[-1].number + 1 if state.refusals else 1
    refusals = *state.refusals, Refusal(number, pid, start, uid, cgroup, why)
    return replace(state, refusals=refusals[-MOST_REFUSALS:])


# --- the kernel -------------------------------------------------------------------------------------------------------


def _ended(state: State, event: inp.ProcessEnded, out: Out) -> State:
    client = state.clients.get(event.pid)
    if client is None or event.start not in (None, client.peer.start):
        return state
    out.append(
        tr.ClientEnded(
            event.at, client.pid, client.uid, client.server, str(client.outcome),
            max(0.0, event.at - client.since), client.waited, client.lease, client.job,
        )
    )  # fmt: skip
    if client.unanswered is not None:
        until = event.at if client.detached is None else client.detached
        state = held_up(state, client.uid, until - client.unanswered)
    server = state.server_of(client.pid)
    if server is not None:
        known = server.attached[client.pid]
        left = replace(known, ended=(event.at, client.uid))
        doubt = server.doubt
        if _died(client, server, known, event.at):
            until = event.at if doubt is None else max(event.at, doubt.until)
            doubt = _doubt(doubt, event.at)
            state = held_up(state, client.uid, doubt.until - until)
        state = put(state, replace(server, attached={**server.attached, client.pid: left}, doubt=doubt))
    return replace(
        state,
        clients=without(state.clients, event.pid),
        stopped=state.stopped - {event.pid},
        cpu_idle=without(state.cpu_idle, event.pid),
        lifts=without(state.lifts, event.pid) if event.pid in state.lifts else state.lifts,
        over=without(state.over, event.pid) if event.pid in state.over else state.over,
        parted=use.parted(state, client, event.at),
        gone=state.gone if event.lives else bounded({**state.gone, (client.pid, client.peer.start): None}, MOST_GONE),
    )


def _died(client: Client, server: Server, known: Attachment, at: float) -> bool:
    """Return whether a client's process has ended while its work may have been on the GPU: MPS has ended it, or its
    contexts were not closed before, by its server's log."""
    if client.held or client.pid in server.sticky:
        return False
    closed = float("-inf") if known.closed is None else known.closed
    return client.terminated is not None or bool(known.contexts - known.lost - {0}) or at < closed + PROPERLY


def _doubt(known: Doubt | None, at: float) -> Doubt:
    """Return the doubt after a client has died. Deaths within a doubt prolong it, up to DOUBT_MOST, and then new
    clients are admitted for as long. A death after a doubt begins another one. The user of the client pays for each:
    see :func:`mpsagent.core.changes.held_up`."""
    most = float("inf") if known is None else known.since + DOUBT_MOST
    if known is None or at >= known.since + 2 * DOUBT_MOST or (known.until <= at and known.until < most):
        return Doubt(at, at + FAULT_WITHIN)
    return Doubt(known.since, min(at + FAULT_WITHIN, most))


def _control_runs(state: State, event: inp.ControlRuns, out: Out) -> State:
    known = state.control
    multiuser = state.policy.multiuser if event.multiuser is None else event.multiuser
    asked = multiuser if event.asked is None else event.asked
    if known is not None and known.pid == event.pid:
        if not known.proven:  # its first line was there before
            state = replace(state, clients={p: _of_earlier(c, known, event.at) for p, c in state.clients.items()})
        return replace(state, control=replace(known, proven=True, multiuser=multiuser, asked_multiuser=asked))
    state = _no_servers(state, event.at, out)
    out.append(tr.ControlStarted(event.at, event.pid))
    control = Control(
        event.pid, event.started, event.socket, proven=True, multiuser=multiuser, asked_multiuser=asked
    )  # fmt: skip
    return replace(state, control=control, silent_since=None)


def _control_gone(state: State, event: inp.ControlGone, out: Out) -> State:
    """Its servers exit with it (recording 03, Q10); who was being handed over is held again."""
    if state.control is None or state.control.pid != event.pid:
        return state
    out.append(tr.ControlEnded(event.at, event.pid))
    state = _no_servers(state, event.at, out)
    drain = None if state.drain is not None and state.drain.restart else state.drain
    return replace(state, control=None, silent_since=None, drain=drain)


def _no_servers(state: State, at: float, out: Out) -> State:
    """The daemon has gone by the kernel's word, and with it every server: no client is at work any more."""
    for pid in list(state.servers):
        state = server_ended(state, pid, at, None, out)
    clients = {pid: c if c.detached is not None else lost(c, at, confirmed=True) for pid, c in state.clients.items()}
    return replace(state, listed_at=None, clients=clients)


def _seen(state: State, event: inp.ProcessesSeen, out: Out) -> State:
    for client in state.clients.values():
        if client.frozen is not None and event.at > client.frozen and client.pid not in event.stopped:
            out.append(tr.ClientResumed(event.at, client.pid, client.uid))
            state = _frozen(state, client.pid, client.peer.start, None)
    for server in state.servers.values():  # a stopped server notices nothing of a death, and it may run from now on
        if server.pid in event.stopped and server.doubt is not None and server.doubt.until > event.at - SEEN_EVERY:
            doubt = Doubt(event.at, event.at + SEEN_EVERY + FAULT_WITHIN)
            state = replace(state, servers={**state.servers, server.pid: replace(server, doubt=doubt)})
    seen = (event.stopped, event.cpu_idle, event.lifts)
    if (state.stopped, state.cpu_idle, state.lifts) == seen:
        return state
    return replace(state, stopped=event.stopped, cpu_idle=event.cpu_idle, lifts=event.lifts)


def _frozen(state: State, pid: int, start: int, since: float | None) -> State:
    client = state.clients.get(pid)
    if client is None or client.peer.start != start or client.frozen == since:
        return state
    stopped = state.stopped - {pid} if since is None else state.stopped | {pid}
    return replace(state, stopped=stopped, clients={**state.clients, pid: replace(client, frozen=since)})


def _memory(state: State, event: inp.MemorySeen, out: Out) -> State:
    found = memory_use.seen(state, event.at, event.memory)
    if (state.memory, state.over) == (event.memory, found):
        return state
    return replace(state, memory=event.memory, over=found)


def _silent(state: State, event: inp.DaemonSilent, out: Out) -> State:
    since = None if not event.silent else event.at if state.silent_since is None else state.silent_since
    return state if since == state.silent_since else replace(state, silent_since=since)


# --- how actions ended ------------------------------------------------------------------------------------------------


def _done(state: State, event: Done, out: Out) -> State:
    """What the agent did to a client is how that will have ended; a released one is no client any more. A server that
    could not be killed does not belong to our control daemon: it has gone, or never was there."""
    action = event.action
    if not action.enforce:
        return state
    if isinstance(action, TellGate):
        return _told(state, event.at, action.message, out) if event.ok else state
    if isinstance(action, KillServer) and not event.ok:
        return server_ended(state, action.server, event.at, None, out) if action.server in state.servers else state
    if isinstance(action, Freeze | Thaw) and event.ok:
        return _frozen(state, action.pid, action.start, event.at if isinstance(action, Freeze) else None)
    if isinstance(action, TerminateClient):
        state = held_up(state, action.uid, event.took)
        client, gave_up = state.clients.get(action.pid), event.took > action.deadline - 0.1
        if client is not None and client.peer.start == action.start and gave_up and not event.ok:
            return replace(state, clients={**state.clients, client.pid: replace(client, unanswered=event.at)})
    if isinstance(action, TerminateClient | SignalClient) and event.ok:
        client = state.clients.get(action.pid)
        if client is not None and client.peer.start == action.start:
            outcome = Outcome.ENDED if client.outcome is Outcome.OK else client.outcome
            answered = client.terminated is None and isinstance(action, TerminateClient)
            terminated = event.at if answered else client.terminated
            ended = replace(client, outcome=outcome, terminated=terminated, held=client.held or event.held)
            return replace(state, clients={**state.clients, action.pid: ended})
    return state


def _told(state: State, at: float, message: link.FromAgent, out: Out) -> State:
    match message:
        case link.Refuse(connection, why):
            held = state.held.get(connection)
            if held is None or held.handing is not None:
                return state
            out.append(tr.ClientRefused(at, held.peer.pid, held.peer.uid, why, state.job(held.peer)[1]))
            turned_away = bounded({**state.turned_away, connection: held}, MOST_TURNED_AWAY)
            return replace(state, held=state.held.without(connection), turned_away=turned_away)
        case link.Release(pid, start):
            client = state.clients.get(pid)
            if client is not None and client.detached is not None:
                return _ended(state, inp.ProcessEnded(at, pid, start, lives=True), out)
    return state


def not_handed(state: State, admitted: frozenset[int]) -> State:
    """A table is in force, and no hand-over is under way that it does not allow: one that was has been given up."""
    queue = state.held
    for connection in queue.handing:
        if queue[connection].uid not in admitted:
            queue = queue.put(replace(queue[connection], handing=None))
    return state if queue is state.held else replace(state, held=queue)


OF_ALL = {
    link.Hello, link.Synced, inp.LinkLost, link.Knock, link.Left, link.Refused, link.Unconfirmed, link.Slowed,
    inp.ProcessesSeen, inp.MemorySeen, inp.Worked, inp.PolicyChanged, inp.DevicesFound, inp.PeopleKnown,
    inp.DrainOrdered, inp.DrainResumed, inp.TurnExtended, inp.RestartOrdered, inp.LeaseOrdered, inp.LeaseEndOrdered,
}  # fmt: skip
"""What is about no single control daemon."""


def _unknown_to_gate(state: State, event: object) -> State:
    return replace(state, applied=-1, unkept="", known_handshake=None)


_EACH: dict[object, Callable[[State, Any], State]] = {
    **reduce_people.EACH,
    link.Hello: _unknown_to_gate,
    inp.LinkLost: _unknown_to_gate,
}
"""What it changes in each control daemon."""

_RULES: dict[Any, Callable[[State, Any, Out], State]] = {
    **reduce_logs.RULES,
    **reduce_answers.RULES,
    **reduce_people.RULES,
    link.Hello: _gate_connected,
    link.Synced: _gate_synced,
    inp.LinkLost: _gate_lost,
    link.Knock: _knocked,
    link.Known: _known,
    link.NoContext: _no_context,
    link.Left: _left,
    link.Handing: _handing,
    link.Passed: _passed,
    link.Failed: _handover_failed,
    link.Unconfirmed: _unconfirmed,
    link.Slowed: _slowed,
    link.Applied: _applied,
    link.FrontEnd: _front_end,
    link.HandshakeSeen: _handshake,
    link.Refused: _gate_refused,
    inp.ClientRemembered: _client_remembered,
    inp.ProcessEnded: _ended,
    inp.ControlRuns: _control_runs,
    inp.ControlGone: _control_gone,
    inp.ProcessesSeen: _seen,
    inp.MemorySeen: _memory,
    inp.Worked: use.counted,
    inp.DaemonSilent: _silent,
    Done: _done,
}
