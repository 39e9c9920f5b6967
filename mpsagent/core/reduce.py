"""``apply(state, event) -> state``: the only place where the state changes.

control.log and server.log are two files; a reader may see a line of the one before an older line of the other. So each
rule looks at the times that it knows: a server that has ended is not brought back by a late line of its log, and a
client that is connected is not put back into the pending list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mpsagent.core.model import Client, Control, Server, State, Status, Waiting
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits

V = TypeVar("V")
_KEPT_ENDED = 64
_KEPT_UIDS = 64  # for those about to connect to a server whose user is unknown; it takes 48 at a time
# Far above what MPS can have (one server, 48 clients of it): only a forged log comes here. Waiting clients are
# processes that any user may start; those beyond the most are not counted until they are served.
_MOST_SERVERS = 64
_MOST_CLIENTS = 4096
_MOST_WAITING = 4096


def apply(state: State, event: ev.Event) -> State:
    """The state after ``event``. Events that change nothing return ``state`` itself."""
    rule = _RULES.get(type(event))
    return state if rule is None else rule(state, event)


def apply_all(state: State, events: list[ev.Event] | list[ev.LogEvent]) -> State:
    for event in events:
        rule = _RULES.get(type(event))
        if rule is not None:
            state = rule(state, event)
    return state


def _without(mapping: Mapping[int, V], key: int) -> dict[int, V]:
    return {k: v for k, v in mapping.items() if k != key}


def _put(state: State, server: Server) -> State:
    return replace(state, servers=_bounded({**state.servers, server.pid: server}, _MOST_SERVERS))


def _server(state: State, pid: int, at: float) -> Server | None:
    """The server, made known when it is only now heard of (the agent came late); None for a late line of a server that
    has ended or that belonged to an earlier daemon. Only ``Startup`` and ``Starting new server`` bring a pid back."""
    known = state.servers.get(pid)
    if known is not None:
        return known
    if pid in state.ended or _of_earlier_daemon(state, at):
        return None
    return Server(pid=pid, uid=None, status=Status.ACTIVE, started=at)


def _of_earlier_daemon(state: State, at: float) -> bool:
    control = state.control
    return control is not None and at < (control.started if control.exited is None else control.exited)


def _bounded(mapping: dict[int, V], size: int) -> dict[int, V]:
    while len(mapping) > size:
        del mapping[next(iter(mapping))]
    return mapping


# --- control daemon ---------------------------------------------------------------------------------------------------


def _control_started(state: State, event: ev.ControlStarted) -> State:
    ended = {**state.ended, **dict.fromkeys(state.servers, event.at)}
    control = Control(pid=event.pid, started=event.at, socket=event.socket)
    return State(control=control, unknown_lines=state.unknown_lines, ended=_bounded(ended, _KEPT_ENDED))


def _control_version(state: State, event: ev.ControlVersion) -> State:
    return replace(state, control=replace(state.control, version=event.version)) if state.control else state


def _control_gone(state: State, event: ev.ControlExited | ev.ControlGone) -> State:
    """Its servers exit with it (recording 03, Q10); who waited is no longer queued anywhere."""
    if state.control is None or state.control.exited is not None:
        return state
    if (
        event.pid is not None and event.pid != state.control.pid
    ):  # another one, or a step of its fork into the background
        return state
    ended = _bounded({**state.ended, **dict.fromkeys(state.servers, event.at)}, _KEPT_ENDED)
    return replace(
        state, control=replace(state.control, exited=event.at), servers={}, clients={}, waiting=(), ended=ended, uids={}
    )


def _quit(state: State, event: ev.QuitIssued) -> State:
    if state.control is None:
        return state
    return replace(state, control=replace(state.control, quitting=event.at, quit_by=event.at + event.timeout))


def _command(state: State, event: ev.CommandRead) -> State:
    """``quit`` without a timeout says nothing more: it waits for the clients, however long (recording 02, R10)."""
    if state.control is None or state.control.exited is not None or event.text.strip() != "quit":
        return state
    return replace(state, control=replace(state.control, quitting=event.at))


def _conversation(state: State, event: ev.CommandAnswer | ev.ConnectionLine) -> State:
    """A ``quit`` that is answered has been refused (recording 02, R7: another user's); one that is taken is not, though
    connections go on being accepted (R10)."""
    control = state.control
    if isinstance(event, ev.ConnectionLine) and event.text != "UI closed":
        return state
    if control is None or control.quitting is None or control.quit_by is not None or control.exited is not None:
        return state
    return replace(state, control=replace(control, quitting=None))


# --- servers ----------------------------------------------------------------------------------------------------------


def _server_starting(state: State, event: ev.ServerStarting) -> State:
    known = state.servers.get(event.pid)
    if known is not None and known.uid is None:  # its own log was read first
        server = replace(known, uid=event.uid, started=min(known.started, event.at))
    elif state.ended.get(event.pid, float("-inf")) > event.at:
        return state
    else:
        server = Server(pid=event.pid, uid=event.uid, status=Status.INITIALIZING, started=event.at)
    state = replace(_put(state, server), ended=_without(state.ended, event.pid))
    if not any(c.uid is None and c.server == event.pid for c in state.clients.values()):
        return state
    clients = {
        pid: replace(c, uid=event.uid) if c.uid is None and c.server == event.pid else c
        for pid, c in state.clients.items()
    }
    return replace(state, clients=clients)


def _server_startup(state: State, event: ev.ServerStartup) -> State:
    if event.server in state.servers or state.ended.get(event.server, float("-inf")) >= event.at:
        return state
    if _of_earlier_daemon(state, event.at):
        return state
    server = Server(pid=event.server, uid=None, status=Status.INITIALIZING, started=event.at)
    return replace(_put(state, server), ended=_without(state.ended, event.server))


def _server_ready(state: State, event: ev.ServerReady) -> State:
    server = _server(state, event.pid, event.at)
    if server is None:
        return state
    idle = None if state.clients_of(event.pid) else event.at
    status = Status.ACTIVE if server.status is Status.INITIALIZING else server.status
    # The dead among those who waited for this server are in nobody's list any more.
    waiting = tuple(w for w in state.waiting if not (w.gone and w.uid == server.uid))
    state = state if len(waiting) == len(state.waiting) else replace(state, waiting=waiting)
    return _put(state, replace(server, status=status, ready=event.at, idle_since=idle))


def _server_exited(state: State, event: ev.ServerExited) -> State:
    known = state.servers.get(event.pid)
    if known is not None and known.started > event.at:  # a later process with the same pid
        return state
    clients = {pid: c for pid, c in state.clients.items() if c.server != event.pid}
    ended = _bounded({**state.ended, event.pid: event.at}, _KEPT_ENDED)
    waiting = state.waiting
    if known is not None and known.status is Status.INITIALIZING:
        # Those for whom it was started go behind all others (conformance scenarios X24 and X26).
        waiting = tuple(sorted(waiting, key=lambda w: w.uid == known.uid))
    servers = _without(state.servers, event.pid)
    return replace(state, servers=servers, clients=clients, ended=ended, waiting=waiting)


def _reported(state: State, event: ev.ServerStarted) -> State:
    server = _server(state, event.server, event.at)
    return state if server is None else _put(state, replace(server, reported=True))


def _stuck(state: State, event: ev.ServerStuck) -> State:
    server = _server(state, event.server, event.at)
    if server is None or server.stuck_since is not None:
        return state
    return _put(state, replace(server, stuck_since=event.at))


def _stop_tried(state: State, event: ev.ShutdownTried | ev.ShutdownRefused) -> State:
    server = state.servers.get(event.pid)
    if server is None:
        return state
    tried = event.at if isinstance(event, ev.ShutdownTried) else None
    return _put(state, replace(server, stop_tried=tried))


def _stopping(state: State, event: ev.ServerStopping | ev.ShutdownForced) -> State:
    forced = isinstance(event, ev.ShutdownForced)
    server = _server(state, event.pid if isinstance(event, ev.ShutdownForced) else event.server, event.at)
    if server is None:
        return state
    since = event.at if server.stopping_since is None else min(event.at, server.stopping_since)
    server = replace(server, status=Status.SHUTTING_DOWN, forced=server.forced or forced, stopping_since=since)
    return _put(state, server)


def _threads(state: State, event: ev.ThreadsSet) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    return _put(state, replace(server, limits=Limits(event.percent, server.limits.memory)))


def _memory(state: State, event: ev.MemorySet) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    memory = _without(server.limits.memory, event.device)
    if event.size:
        memory[event.device] = event.size
    return _put(state, replace(server, limits=Limits(server.limits.threads, memory)))


def _status_seen(state: State, event: ev.ServerStatusSeen) -> State:
    """MPS's own word outweighs what was read from the logs."""
    server = state.servers.get(event.server)
    if server is None:
        return state
    if event.status == Status.ACTIVE and server.status is Status.FAULT:
        return _put(state, _recovered(server))
    if event.status == Status.FAULT and server.status is Status.ACTIVE:
        return _put(state, replace(server, status=Status.FAULT, fault_since=event.at))
    return state


# --- clients ----------------------------------------------------------------------------------------------------------


def _queued(state: State, event: ev.ClientQueued) -> State:
    client = state.clients.get(event.pid)
    if client is not None and client.since >= event.at:
        return state
    uids = _bounded({**state.uids, event.pid: event.uid}, _KEPT_UIDS)
    if len(state.waiting) >= _MOST_WAITING or any(w.pid == event.pid and not w.gone for w in state.waiting):
        return replace(state, uids=uids)
    return replace(state, uids=uids, waiting=(*state.waiting, Waiting(event.pid, event.uid, event.at)))


def _admitted(state: State, event: ev.ClientAdmitted) -> State:
    # A server that is known to be this user's tells the user of its clients; kept is only what nothing else tells.
    if state.uids.get(event.pid) != event.uid and state.server_of(event.uid) is None:
        state = replace(state, uids=_bounded({**state.uids, event.pid: event.uid}, _KEPT_UIDS))
    client = state.clients.get(event.pid)
    if client is not None and client.uid is None:
        state = replace(state, clients={**state.clients, event.pid: replace(client, uid=event.uid)})
    if any(w.pid == event.pid for w in state.waiting):
        state = replace(state, waiting=tuple(w for w in state.waiting if w.pid != event.pid))
    return state


def _connected(state: State, event: ev.ContextConnected) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    known = state.clients.get(event.pid)
    if known is None or known.server != event.server:
        waited = next((w.since for w in state.waiting if w.pid == event.pid), None)
        # The server's own user first: lines of control.log may be forged (conformance scenario X2), or of an older pid.
        uid = state.uids.get(event.pid) if server.uid is None else server.uid
        known = Client(pid=event.pid, uid=uid, server=event.server, since=event.at, queued=waited)
        if waited is not None:
            state = replace(state, waiting=tuple(w for w in state.waiting if w.pid != event.pid))
    client = replace(known, contexts=known.contexts | {event.context})
    clients = _bounded({**state.clients, event.pid: client}, _MOST_CLIENTS)
    return replace(_put(state, replace(server, idle_since=None, last_context=event.pid)), clients=clients)


def _context_gone(state: State, event: ev.ContextExiting) -> State:
    client = state.clients.get(event.pid)
    if client is None or client.server != event.server:
        return state
    contexts = client.contexts - {event.context}
    return replace(state, clients={**state.clients, event.pid: replace(client, contexts=contexts)})


def _disconnected(state: State, event: ev.ClientDisconnected) -> State:
    client = state.clients.get(event.pid)
    if client is None or client.server != event.server or client.since > event.at:
        return state
    clients = _without(state.clients, event.pid)
    state = replace(state, clients=clients, uids=_without(state.uids, event.pid))
    server = state.servers.get(event.server)
    if server is None:
        return state
    if not any(c.server == server.pid for c in clients.values()):
        server = replace(server, idle_since=event.at)
    if event.pid in server.sticky:
        server = replace(server, sticky=tuple(pid for pid in server.sticky if pid != event.pid))
        if not server.sticky and server.status is Status.FAULT:
            server = _recovered(server)
    return _put(state, server)


def _associated(state: State, event: ev.DeviceAssociated) -> State:
    server = state.servers.get(event.server)
    client = state.clients.get(server.last_context) if server else None
    if client is None or event.uuid in client.devices:
        return state
    return replace(state, clients={**state.clients, client.pid: replace(client, devices=client.devices | {event.uuid})})


def _full(state: State, event: ev.ClientsFull) -> State:
    server = _server(state, event.server, event.at)
    if server is None or server.max_clients == event.limit:
        return state
    return _put(state, replace(server, max_clients=event.limit))


def _process_gone(state: State, event: ev.ProcessGone) -> State:
    """Only a waiting client is marked: it stays in MPS's pending list until its user's server is Ready (conformance
    scenario X1). One that stands behind another of its user changes nothing there and is dropped, so that the dead do
    not fill the list. A connected one's end is in server.log."""
    found = next((w for w in state.waiting if w.pid == event.pid and not w.gone), None)
    if found is None:
        return state
    first = next(w for w in state.waiting if w.uid == found.uid)
    if first is not found:
        return replace(state, waiting=tuple(w for w in state.waiting if w is not found))
    return replace(state, waiting=tuple(replace(w, gone=True) if w is found else w for w in state.waiting))


def _terminating(state: State, event: ev.TerminationAsked) -> State:
    client = state.clients.get(event.pid)
    if client is None or client.server != event.server:
        return state
    return replace(state, clients={**state.clients, client.pid: replace(client, terminated=True)})


# --- faults -----------------------------------------------------------------------------------------------------------


def _recovered(server: Server) -> Server:
    status = Status.ACTIVE if server.stopping_since is None else Status.SHUTTING_DOWN
    return replace(server, status=status, sticky=(), devices_faulted=(), fault_since=None)


def _fault(state: State, event: ev.FaultStarted) -> State:
    server = _server(state, event.server, event.at)
    if server is None:
        return state
    if server.status is Status.FAULT:  # a second fault before the first was over: its clients are added
        return state
    return _put(state, replace(server, status=Status.FAULT, fault_since=event.at, sticky=(), devices_faulted=()))


def _fault_device(state: State, event: ev.FaultDevice) -> State:
    server = state.servers.get(event.server)
    if server is None or event.device in server.devices_faulted:
        return state
    return _put(state, replace(server, devices_faulted=(*server.devices_faulted, event.device)))


def _fault_client(state: State, event: ev.FaultClient) -> State:
    server = state.servers.get(event.server)
    if server is None or event.pid in server.sticky:
        return state
    return _put(state, replace(server, sticky=(*server.sticky, event.pid)))


def _destroyed(state: State, event: ev.ContextDestroyed) -> State:
    """The faulted device's server context has gone: the server takes new clients again (recording 03, Q4: before the
    last client's disconnection is logged)."""
    server = state.servers.get(event.server)
    if server is None or server.status is not Status.FAULT:
        return state
    left = tuple(d for d in server.devices_faulted if d != event.device)
    return _put(state, replace(server, devices_faulted=left) if left else _recovered(server))


def _unknown(state: State, event: ev.Unknown) -> State:
    return replace(state, unknown_lines=state.unknown_lines + 1)


_RULES: dict[type, Callable[[State, Any], State]] = {
    ev.ControlStarted: _control_started,
    ev.ControlVersion: _control_version,
    ev.ControlExited: _control_gone,
    ev.ControlGone: _control_gone,
    ev.QuitIssued: _quit,
    ev.CommandRead: _command,
    ev.CommandAnswer: _conversation,
    ev.ConnectionLine: _conversation,
    ev.ServerStarting: _server_starting,
    ev.ServerStartup: _server_startup,
    ev.ServerReady: _server_ready,
    ev.ServerExited: _server_exited,
    ev.ServerStopping: _stopping,
    ev.ShutdownForced: _stopping,
    ev.ShutdownTried: _stop_tried,
    ev.ShutdownRefused: _stop_tried,
    ev.ServerStarted: _reported,
    ev.ServerStuck: _stuck,
    ev.ThreadsSet: _threads,
    ev.MemorySet: _memory,
    ev.ServerStatusSeen: _status_seen,
    ev.ClientQueued: _queued,
    ev.ClientAdmitted: _admitted,
    ev.ContextConnected: _connected,
    ev.ContextExiting: _context_gone,
    ev.ClientDisconnected: _disconnected,
    ev.DeviceAssociated: _associated,
    ev.ClientsFull: _full,
    ev.ProcessGone: _process_gone,
    ev.TerminationAsked: _terminating,
    ev.FaultStarted: _fault,
    ev.FaultDevice: _fault_device,
    ev.FaultClient: _fault_client,
    ev.ContextDestroyed: _destroyed,
    ev.Unknown: _unknown,
}
