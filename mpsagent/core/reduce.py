"""``reduce(state, input) -> (state, transitions)``: the only place where the state changes.

Gate, kernel, people and machine are taken in here; what the two logs say is in :mod:`mpsagent.core.reduce_logs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpsagent.core import inputs as inp
from mpsagent.core import reduce_logs
from mpsagent.core import transitions as tr
from mpsagent.core.actions import Done, ReleaseClient, SignalClient, TerminateClient
from mpsagent.core.model import Client, Control, Drain, Gate, Held, Outcome, State
from mpsagent.core.reduce_logs import Out, bounded, server_ended, without

MOST_HELD = 10_000
"""The gate's own bound is lower; more is a mistake of the gate's."""


def reduce(state: State, event: inp.Input | Done) -> tuple[State, list[tr.Transition]]:
    """The state after ``event``, and what happened. What changes nothing returns ``state`` itself."""
    out: Out = []
    rule = _RULES.get(type(event))
    return (state if rule is None else rule(state, event, out)), out


# --- the gate ---------------------------------------------------------------------------------------------------------


def _gate_connected(state: State, event: inp.GateConnected, out: Out) -> State:
    out.append(tr.GateConnected(event.at, event.pid))
    return replace(state, gate=Gate(event.pid, event.at), held={})


def _gate_synced(state: State, event: inp.GateSynced, out: Out) -> State:
    return state if state.gate is None else replace(state, gate=replace(state.gate, synced=True))


def _gate_lost(state: State, event: inp.GateLost, out: Out) -> State:
    if state.gate is None:
        return state
    out.append(tr.GateLost(event.at))
    return replace(state, gate=None, held={})


def _is_client(state: State, peer: inp.Peer) -> bool:
    known = state.clients.get(peer.pid)
    return known is not None and known.peer.start == peer.start


def _knocked(state: State, event: inp.Knocked, out: Out) -> State:
    of_client = _is_client(state, event.peer)
    if not of_client and not any(h.peer[:4] == event.peer[:4] for h in state.held.values()):
        out.append(tr.ClientWaiting(event.since, event.peer.pid, event.peer.uid, event.connection))
    held = Held(event.connection, event.peer, event.since, of_client=of_client)
    return replace(state, held=bounded({**state.held, event.connection: held}, MOST_HELD))


def _known(state: State, event: inp.Known, out: Out) -> State:
    if _is_client(state, event.peer):
        return state
    client = Client(event.peer, event.since, limits=event.limits)
    return replace(state, clients={**state.clients, event.peer.pid: client})


def _left(state: State, event: inp.Left, out: Out) -> State:
    held = state.held.get(event.connection)
    if held is None:
        return state
    rest = without(state.held, event.connection)
    if not held.of_client and not any(h.peer[:4] == held.peer[:4] for h in rest.values()):
        waited = max(0.0, event.at - held.since)
        out.append(tr.ClientLeft(event.at, held.peer.pid, held.peer.uid, waited))
    return replace(state, held=rest)


def _handing(state: State, event: inp.HandingOver, out: Out) -> State:
    held = state.held.get(event.connection)
    if held is None:
        return state
    return replace(state, held={**state.held, event.connection: replace(held, handing=event.at)})


def _passed(state: State, event: inp.Passed, out: Out) -> State:
    held, peer = state.held.get(event.connection), event.peer
    unconfirmed = state.unconfirmed
    if not event.fail_safe and peer.uid in unconfirmed:
        unconfirmed = without(unconfirmed, peer.uid)
    state = replace(state, held=without(state.held, event.connection), unconfirmed=unconfirmed)
    if _is_client(state, peer):
        client = state.clients[peer.pid]
        client = replace(client, limits=event.limits, fail_safe=event.fail_safe, detached=None)
        return replace(state, clients={**state.clients, peer.pid: client})
    since = event.at if held is None else held.since
    client = Client(peer, event.at, max(0.0, event.at - since), event.limits, event.fail_safe)
    if peer.pid in state.clients:  # an earlier process had this pid, and its end is only now known
        state = _ended(state, inp.ProcessEnded(event.at, peer.pid), out)
    out.append(tr.ClientConnected(event.at, peer.pid, peer.uid, client.waited, event.limits, event.fail_safe))
    others = {number: replace(h, of_client=True) if h.peer[:4] == peer[:4] else h for number, h in state.held.items()}
    return replace(state, clients={**state.clients, peer.pid: client}, held=others)


def _handover_failed(state: State, event: inp.HandoverFailed, out: Out) -> State:
    out.append(tr.HandoverFailed(event.at, event.pid, event.uid, event.stage, event.why, event.lost))
    held = state.held.get(event.connection)
    if held is None:
        return state
    if event.lost:
        return replace(state, held=without(state.held, event.connection))
    again = replace(held, handing=None, failed=held.failed + 1)
    return replace(state, held={**state.held, event.connection: again})


def _unconfirmed(state: State, event: inp.Unconfirmed, out: Out) -> State:
    if state.unconfirmed.get(event.uid) == event.why:
        return state
    out.append(tr.LimitsUnconfirmed(event.at, event.uid, event.why))
    return replace(state, unconfirmed=bounded({**state.unconfirmed, event.uid: event.why}, 64))


def _applied(state: State, event: inp.Applied, out: Out) -> State:
    if state.gate is None or event.number <= state.gate.applied:
        return state
    return replace(state, gate=replace(state.gate, applied=event.number))


def _front_end(state: State, event: inp.FrontEndUsed, out: Out) -> State:
    out.append(tr.FrontEndUsed(event.at, event.pid, event.uid, event.command))
    return state


def _handshake(state: State, event: inp.HandshakeSeen, out: Out) -> State:
    if state.gate is None or state.gate.known_handshake == event.known:
        return state
    if not event.known:
        out.append(tr.HandshakeUnknown(event.at, event.greeting))
    return replace(state, gate=replace(state.gate, known_handshake=event.known))


def _gate_refused(state: State, event: inp.GateRefused, out: Out) -> State:
    out.append(tr.ClientRefused(event.at, event.pid, event.uid, event.why))
    return state


# --- the kernel -------------------------------------------------------------------------------------------------------


def _ended(state: State, event: inp.ProcessEnded, out: Out) -> State:
    client = state.clients.get(event.pid)
    if client is None:
        return state
    server = state.server_of(event.pid)
    out.append(
        tr.ClientEnded(
            event.at, client.pid, client.uid, None if server is None else server.pid, str(client.outcome),
            max(0.0, event.at - client.since), client.waited,
        )
    )  # fmt: skip
    return replace(
        state,
        clients=without(state.clients, event.pid),
        stopped=state.stopped - {event.pid},
        cpu_idle_since=without(state.cpu_idle_since, event.pid),
    )


def _control_runs(state: State, event: inp.ControlRuns, out: Out) -> State:
    known = state.control
    if known is not None and known.pid == event.pid:
        return replace(state, control=replace(known, proven=True))
    state = _no_servers(state, event.at, out)
    out.append(tr.ControlStarted(event.at, event.pid))
    control = Control(event.pid, event.started, event.socket, proven=True)
    return replace(state, control=control, silent_since=None)


def _control_gone(state: State, event: inp.ControlGone, out: Out) -> State:
    """Its servers exit with it (recording 03, Q10); who was being handed over is held again."""
    if state.control is None or state.control.pid != event.pid:
        return state
    out.append(tr.ControlEnded(event.at, event.pid))
    state = _no_servers(state, event.at, out)
    return replace(state, control=None, silent_since=None)


def _no_servers(state: State, at: float, out: Out) -> State:
    for pid in list(state.servers):
        state = server_ended(state, pid, at, None, out)
    return state


def _seen(state: State, event: inp.ProcessesSeen, out: Out) -> State:
    if (state.stopped, state.cpu_idle_since) == (event.stopped, event.idle_since):
        return state
    return replace(state, stopped=event.stopped, cpu_idle_since=event.idle_since)


def _silent(state: State, event: inp.DaemonSilent, out: Out) -> State:
    since = None if not event.silent else event.at if state.silent_since is None else state.silent_since
    return state if since == state.silent_since else replace(state, silent_since=since)


# --- people and the machine -------------------------------------------------------------------------------------------


def _policy(state: State, event: inp.PolicyChanged, out: Out) -> State:
    return replace(state, policy=event.policy)


def _devices(state: State, event: inp.DevicesFound, out: Out) -> State:
    return state if state.devices == event.devices else replace(state, devices=event.devices)


def _people(state: State, event: inp.PeopleKnown, out: Out) -> State:
    return replace(state, identities=dict(event.identities))


def _drain(state: State, event: inp.DrainOrdered, out: Out) -> State:
    return replace(state, drain=Drain(event.since, event.until))


def _resumed(state: State, event: inp.DrainResumed, out: Out) -> State:
    return replace(state, drain=None)


def _restart(state: State, event: inp.RestartOrdered, out: Out) -> State:
    return replace(state, start_failure=None)


def _done(state: State, event: Done, out: Out) -> State:
    """What the agent did to a client is how that will have ended; a released one is none any more."""
    action = event.action
    if isinstance(action, ReleaseClient) and event.ok:
        client = state.clients.get(action.pid)
        if client is None or client.detached is None or client.peer.start != action.start:
            return state
        return _ended(state, inp.ProcessEnded(event.at, action.pid), out)
    if isinstance(action, TerminateClient | SignalClient) and event.ok:
        client = state.clients.get(action.pid)
        if client is not None and client.peer.start == action.start and client.outcome is Outcome.OK:
            ended = replace(client, outcome=Outcome.ENDED)
            return replace(state, clients={**state.clients, action.pid: ended})
    return state


_RULES: dict[type, Callable[[State, Any, Out], State]] = {
    **reduce_logs.RULES,
    inp.GateConnected: _gate_connected,
    inp.GateSynced: _gate_synced,
    inp.GateLost: _gate_lost,
    inp.Knocked: _knocked,
    inp.Known: _known,
    inp.Left: _left,
    inp.HandingOver: _handing,
    inp.Passed: _passed,
    inp.HandoverFailed: _handover_failed,
    inp.Unconfirmed: _unconfirmed,
    inp.Applied: _applied,
    inp.FrontEndUsed: _front_end,
    inp.HandshakeSeen: _handshake,
    inp.GateRefused: _gate_refused,
    inp.ProcessEnded: _ended,
    inp.ControlRuns: _control_runs,
    inp.ControlGone: _control_gone,
    inp.ProcessesSeen: _seen,
    inp.DaemonSilent: _silent,
    inp.PolicyChanged: _policy,
    inp.DevicesFound: _devices,
    inp.PeopleKnown: _people,
    inp.DrainOrdered: _drain,
    inp.DrainResumed: _resumed,
    inp.RestartOrdered: _restart,
    Done: _done,
}
