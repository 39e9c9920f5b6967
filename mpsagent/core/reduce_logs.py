"""What control.log and server.log say, into the state.

Lines never make a process a client: they tell what happened to pids that passed the gate, and to servers. That a
client has left, or that a server hangs, is a hint until MPS's own answers confirm it (`confirmation`): lines can be
forged. The two logs are two files and may be read in another order than they were written, so each rule
looks at the times that it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mpsagent.core import transitions as tr
from mpsagent.core.changes import Out, bounded, put, recovered, server_ended, without
from mpsagent.core.model import Attachment, Control, Outcome, Server, StartFailure, State, Status
from mpsagent.mps import events as ev
from mpsagent.mps.events import Line, What
from mpsagent.mps.versions import places

Rule = Callable[[State, Line, Out], State]
_KEPT_LEFT = 256
_LEAST_CLIENTS = 16
"""What a server takes before Volta: a line that says less is not believed."""
_STARTED_EARLIER = 5.0
"""Seconds by which the control daemon's own first line may be older than the start that the kernel gave."""
# Far above what MPS can have: only a broken log comes here.
_MOST_ATTACHED = 256


def _late(state: State, at: float) -> bool:
    """A line of an earlier daemon, or one for which no daemon is known."""
    return state.control is None or at < state.control.started - 0.001


def _server(state: State, pid: int, at: float) -> Server | None:
    """The server, made known when it is only now heard of (the agent came late); None for a late line of a server that
    has ended or of an earlier daemon. Only ``Startup`` and ``Starting new server`` bring a pid back."""
    known = state.servers.get(pid)
    if known is not None:
        return known
    if pid in state.ended or _late(state, at):
        return None
    return Server(pid=pid, uid=None, status=Status.ACTIVE, started=at)


def _of(change: Callable[[Server, Line], Server], find: Callable[[State, int, float], Server | None]) -> Rule:
    """A rule for lines that change their server and nothing else."""

    def rule(state: State, event: Line, out: Out) -> State:
        server = find(state, event.server, event.at)
        changed = None if server is None else change(server, event)
        return state if changed is None or changed is server else put(state, changed)

    return rule


def _known(state: State, pid: int, at: float) -> Server | None:
    return state.servers.get(pid)


# --- the control daemon -----------------------------------------------------------------------------------------------


def _control_started(state: State, event: Line, out: Out) -> State:
    """Its own first line. A daemon that the kernel has confirmed is not replaced by a line."""
    control = state.control
    if control is not None and control.proven:
        if control.pid == event.pid and control.started - _STARTED_EARLIER <= event.at < control.started:
            return replace(state, control=replace(control, started=event.at))
        return state
    for pid, server in state.servers.items():
        if server.started < event.at:
            state = server_ended(state, pid, event.at, None, out)
    return replace(state, control=Control(pid=event.pid, started=event.at, socket=event.text))


def _control_version(state: State, event: Line, out: Out) -> State:
    if state.control is None or state.control.pid != event.pid:
        return state
    return replace(state, control=replace(state.control, version=event.number))


def _quit(state: State, event: Line, out: Out) -> State:
    if _late(state, event.at) or state.control is None:
        return state
    out.append(tr.ControlQuitting(event.at, event.number))
    return replace(state, control=replace(state.control, quitting=event.at, quit_by=event.at + event.number))


def _command(state: State, event: Line, out: Out) -> State:
    """``quit`` without a timeout says nothing more: it waits for the clients, however long (recording 02, R10)."""
    if state.control is None or _late(state, event.at) or event.text.strip() != "quit":
        return state
    return replace(state, control=replace(state.control, quitting=event.at))


def _conversation(state: State, event: Line, out: Out) -> State:
    """A ``quit`` that is answered has been refused (recording 02, R7: another user's); one that is taken is not, though
    connections go on being accepted (R10)."""
    control = state.control
    if event.what is ev.ConnectionLine and event.text != "UI closed":
        return state
    if control is None or control.quitting is None or control.quit_by is not None:
        return state
    return replace(state, control=replace(control, quitting=None))


# --- servers ----------------------------------------------------------------------------------------------------------


def _server_starting(state: State, event: Line, out: Out) -> State:
    if _late(state, event.at):
        return state
    known = state.servers.get(event.server)
    if known is not None and known.uid is None:  # its own log was read first
        return put(state, replace(known, uid=event.uid, started=min(known.started, event.at)))
    if known is not None or state.ended.get(event.server, float("-inf")) > event.at:
        return state
    out.append(tr.ServerStarting(event.at, event.server, event.uid))
    server = Server(pid=event.server, uid=event.uid, status=Status.INITIALIZING, started=event.at)
    return replace(put(state, server), ended=without(state.ended, event.server))


def _server_startup(state: State, event: Line, out: Out) -> State:
    if event.server in state.servers or state.ended.get(event.server, float("-inf")) >= event.at:
        return state
    if _late(state, event.at):
        return state
    server = Server(pid=event.server, uid=None, status=Status.INITIALIZING, started=event.at)
    return replace(put(state, server), ended=without(state.ended, event.server))


def _server_ready(state: State, event: Line, out: Out) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    status = Status.ACTIVE if server.status is Status.INITIALIZING else server.status
    idle = None if server.attached else event.at
    out.append(tr.ServerReady(event.at, event.server, server.uid))
    state = replace(state, start_failure=None)
    return put(state, replace(server, status=status, ready=event.at, idle_since=idle))


def _server_exited(state: State, event: Line, out: Out) -> State:
    known = state.servers.get(event.server)
    if known is not None and known.started > event.at:  # a later process with the same pid
        return state
    failed = known is not None and known.status is Status.INITIALIZING
    state = server_ended(state, event.server, event.at, event.number, out)
    if not failed:
        return state
    failure = state.start_failure or StartFailure(0, event.at, event.at)
    failure = replace(failure, count=failure.count + 1, last=event.at)
    out.append(tr.ServerStartFailed(event.at, event.server, failure.reason, failure.count))
    return replace(state, start_failure=failure)


def _server_failed(state: State, event: Line, out: Out) -> State:
    """The reason comes before the line that says that the server has exited."""
    if _late(state, event.at):
        return state
    failure = state.start_failure or StartFailure(0, event.at, event.at)
    return replace(state, start_failure=replace(failure, reason=event.text))


def _stop_tried(server: Server, event: Line) -> Server:
    since = event.at if server.stop_tried is None else server.stop_tried
    return replace(server, stop_tried=since if event.what is ev.ShutdownTried else None)


def _stopping(server: Server, event: Line) -> Server:
    since = event.at if server.stopping_since is None else min(event.at, server.stopping_since)
    forced = server.forced or event.what is ev.ShutdownForced
    return replace(server, status=Status.SHUTTING_DOWN, forced=forced, stopping_since=since)


def _limits(server: Server, event: Line) -> Server:
    if server.reported:  # later ones are of single hand-overs
        return server
    if event.what is ev.ThreadsSet:
        return replace(server, limits=replace(server.limits, threads=event.percent))
    memory = without(server.limits.memory, event.device)
    if event.size:
        memory[event.device] = event.size
    return replace(server, limits=replace(server.limits, memory=memory))


# --- clients ----------------------------------------------------------------------------------------------------------


def _connected(state: State, event: Line, out: Out) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    known = server.attached.get(event.pid)
    if known is None or event.context == 0:
        known = Attachment(event.at)
    attachment = replace(known, contexts=known.contexts | {event.context}, lost=known.lost - {event.context})
    attached = bounded({**server.attached, event.pid: attachment}, _MOST_ATTACHED)
    server = replace(server, idle_since=None, last_context=event.pid, attached=attached)
    state = put(state, server)
    client = state.clients.get(event.pid)
    if client is None:
        if state.held.of_pid(event.pid):
            return state
        return replace(state, foreign_lines=state.foreign_lines + 1)
    late = client.said_left is not None and client.said_left > event.at
    if late or not state.fits(client, server) or (client.server == server.pid and client.said_left is None):
        return state
    # One that had left has come through another process, or the line is forged: MPS is asked.
    left = None if client.detached is None else event.at
    named = replace(client, server=server.pid, said_left=left, detached=None)
    return replace(state, clients={**state.clients, event.pid: named})


def _context_lost(server: Server, event: Line) -> Server:
    known = server.attached.get(event.pid)
    if known is None or event.context == 0 or event.context in known.lost or event.context not in known.contexts:
        return server
    left = replace(known, lost=known.lost | {event.context}, closed=event.at)
    return replace(server, attached={**server.attached, event.pid: left})


def _context_gone(server: Server, event: Line) -> Server:
    known = _context_lost(server, event).attached.get(event.pid)
    if known is None:
        return server
    this = {event.context}
    left = replace(known, contexts=known.contexts - this, lost=known.lost - this)
    return replace(server, attached={**server.attached, event.pid: left})


def _disconnected(state: State, event: Line, out: Out) -> State:
    server = state.servers.get(event.server)
    if server is None:
        return state
    known = server.attached.get(event.pid)
    if known is not None and known.since > event.at:
        return state
    if server.turned_away == event.pid:
        return put(state, replace(server, turned_away=0))
    attached = without(server.attached, event.pid)
    server = replace(server, attached=attached, idle_since=server.idle_since if attached else event.at)
    if event.pid in server.sticky:
        server = replace(server, sticky=tuple(pid for pid in server.sticky if pid != event.pid))
        if not server.sticky and server.status is Status.FAULT:
            server = recovered(server, event.at, out)
    state = put(state, server)
    client = state.clients.get(event.pid)
    if client is None:
        left = bounded({**state.left, event.pid: (event.at, server.pid)}, _KEPT_LEFT)
        return replace(state, left=left)
    if client.detached is None and client.said_left is None and state.server_of(event.pid) is None:
        gone = replace(client, said_left=event.at, server=server.pid)
        state = replace(state, clients={**state.clients, event.pid: gone})
    return state


def _associated(server: Server, event: Line) -> Server:
    known = server.attached.get(server.last_context)
    if known is None or event.text in known.devices:
        return server
    fresh = replace(known, devices=known.devices | {event.text})
    return replace(server, attached={**server.attached, server.last_context: fresh})


def _full(state: State, event: Line, out: Out) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    out.append(tr.ServerFull(event.at, event.server, event.number))
    pid, attached = server.last_context, server.attached
    if pid in attached:  # its context was said to be connected before it was refused
        one = attached[pid]
        attached = {**attached, pid: replace(one, contexts=one.contexts - {max(one.contexts, default=0)} | {0})}
    limit = max(_LEAST_CLIENTS, event.number)
    return put(state, replace(server, max_clients=limit, attached=attached, turned_away=pid))


# --- faults -----------------------------------------------------------------------------------------------------------


def _fault(state: State, event: Line, out: Out) -> State:
    server = _server(state, event.server, event.at)
    if server is None or server.status is Status.FAULT:  # a second fault before the first was over adds to it
        return state
    out.append(tr.FaultBegan(event.at, server.pid, server.uid))
    server = replace(
        server,
        status=Status.FAULT,
        fault_since=event.at,
        sticky=(),
        devices_faulted=(),
        fault_confirmed=False,
        mended=None,
    )
    return put(state, server)


def _fault_device(server: Server, event: Line) -> Server:
    if event.device in server.devices_faulted:
        return server
    return replace(server, devices_faulted=(*server.devices_faulted, event.device))


def _fault_client(state: State, event: Line, out: Out) -> State:
    server = state.servers.get(event.server)
    if server is None or event.pid in server.sticky or len(server.sticky) >= _MOST_ATTACHED:
        return state
    client = state.clients.get(event.pid)
    out.append(tr.FaultClient(event.at, server.pid, event.pid, None if client is None else client.uid))
    state = put(state, replace(server, sticky=(*server.sticky, event.pid)))
    if client is not None and client.outcome is Outcome.OK:
        state = replace(state, clients={**state.clients, event.pid: replace(client, outcome=Outcome.FAULTED)})
    return state


def _destroyed(state: State, event: Line, out: Out) -> State:
    """The faulted device's server context has gone: the server takes new clients again (recording 03, Q4: before the
    last client's disconnection is logged)."""
    server = state.servers.get(event.server)
    if server is None or server.status is not Status.FAULT:
        return state
    left = tuple(d for d in server.devices_faulted if d != event.device)
    return put(state, replace(server, devices_faulted=left) if left else recovered(server, event.at, out))


def _unknown(state: State, event: Line, out: Out) -> State:
    out.append(tr.LineUnknown(event.at, event.source, event.text))
    return replace(state, unknown_lines=state.unknown_lines + 1)


RULES: dict[What, Rule] = {
    ev.ControlStarted: _control_started,
    ev.ControlVersion: _control_version,
    ev.QuitIssued: _quit,
    ev.CommandRead: _command,
    ev.CommandAnswer: _conversation,
    ev.ConnectionLine: _conversation,
    ev.ServerStarting: _server_starting,
    ev.ServerStartup: _server_startup,
    ev.ServerReady: _server_ready,
    ev.ServerExited: _server_exited,
    ev.ServerFailed: _server_failed,
    ev.ServerStopping: _of(_stopping, _server),
    ev.ShutdownForced: _of(_stopping, _server),
    ev.ShutdownTried: _of(_stop_tried, _known),
    ev.ShutdownRefused: _of(_stop_tried, _known),
    ev.ServerStarted: _of(lambda server, event: replace(server, reported=True), _server),
    ev.ServerStuck: _of(
        lambda server, event: server if server.stuck_since is not None else replace(server, stuck_since=event.at),
        _server,
    ),
    ev.ThreadsSet: _of(_limits, _server),
    ev.MemorySet: _of(_limits, _server),
    ev.ContextConnected: _connected,
    ev.ClientUnnamed: _of(lambda server, event: server if server.unnamed else replace(server, unnamed=True), _known),
    ev.ContextLost: _of(_context_lost, _known),
    ev.ContextExiting: _of(_context_gone, _known),
    ev.ClientDisconnected: _disconnected,
    ev.DeviceAssociated: _of(_associated, _known),
    ev.ClientsFull: _full,
    ev.DriverNamed: _of(lambda server, event: replace(server, max_clients=places(event.number)), _server),
    ev.FaultStarted: _fault,
    ev.FaultDevice: _of(_fault_device, _known),
    ev.FaultClient: _fault_client,
    ev.ContextDestroyed: _destroyed,
    ev.Unknown: _unknown,
}
