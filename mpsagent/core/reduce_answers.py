"""What MPS itself answers: its servers, their status, their clients. It outweighs what was read from the logs, and it
is what confirms it (:mod:`mpsagent.core.confirmation`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.changes import Out, back, put, recovered, server_ended, without
from mpsagent.core.model import NAMED_FOR, Attachment, Server, State, Status

_LONG_ENOUGH = 1.0
"""Seconds after a ``quit`` line in which an answer may still be one to an earlier question."""
_JUST_NOW = 0.1
"""Seconds within which an answer of MPS may be older than what was read in a log: it confirms nothing then."""


def _status_seen(state: State, event: inp.ServerStatusSeen, out: Out) -> State:
    """MPS's own word outweighs what was read from the logs."""
    server = state.servers.get(event.server)
    if server is None:
        return state
    if event.status == Status.FAULT and server.status is Status.INITIALIZING:
        return state  # one that does not start says so, too, for its last milliseconds (550 without a GPU)
    if event.status == Status.FAULT and server.mended is not None and event.at <= server.mended + _JUST_NOW:
        return state
    if event.status == Status.FAULT and server.status is not Status.FAULT:
        out.append(tr.FaultBegan(event.at, server.pid, server.uid))
        return put(state, replace(server, status=Status.FAULT, fault_since=event.at, fault_confirmed=True, mended=None))
    if event.status == Status.FAULT:
        return state if server.fault_confirmed else put(state, replace(server, fault_confirmed=True))
    if event.status != Status.ACTIVE:
        return state
    fresh = replace(
        server, stuck_since=_unless_over(server.stuck_since, event.at), mended=None,
        stop_tried=_unless_over(server.stop_tried, event.at),
        stopping_since=_unless_over(server.stopping_since, event.at),
    )  # fmt: skip
    fault = _unless_over(server.fault_since, event.at)
    if server.status is Status.FAULT:
        return put(state, fresh if fault is not None else replace(recovered(fresh, event.at, out), mended=None))
    if fresh.stopping_since is None:
        ready = event.at if server.ready is None else server.ready
        fresh = replace(fresh, status=Status.ACTIVE, forced=False, ready=ready)
    return state if fresh == server else put(state, fresh)


def _unless_over(since: float | None, answered: float) -> float | None:
    """What a line said, unless MPS has answered since that all is well."""
    return since if since is not None and answered <= since + _JUST_NOW else None


def _listed(state: State, event: inp.ServersListed, out: Out) -> State:
    """Who is asked and answers is not quitting. A client whose server is not in the list has left it."""
    control = state.control
    if control is not None and control.quitting is not None and event.at > control.quitting + _LONG_ENOUGH:
        state = replace(state, control=replace(control, quitting=None, quit_by=None))
    for pid in event.known_before - event.servers.keys():
        if pid in state.servers:
            state = server_ended(state, pid, event.at, None, out)
    # One of a user begins as root, and becomes its user then: what is root's the next list says.
    own = control is None or not control.multiuser
    for pid, uid in event.servers.items():
        if pid not in state.servers and pid not in event.known_before:
            whose = None if own and uid == 0 else uid
            server = Server(
                pid, whose, Status.ACTIVE, event.at, ready=event.at, idle_since=event.at, confirmed=whose is not None
            )
            state = replace(put(state, server), ended=without(state.ended, pid))
        elif (known := state.servers.get(pid)) is not None and (not known.confirmed or known.uid != uid):
            early = uid == 0 and (known.status is Status.INITIALIZING or event.at < (known.ready or 0.0))
            state = put(state, replace(known, confirmed=True, uid=known.uid if early else uid))
    return _confirmed(replace(state, listed_at=event.at))


def _confirmed(state: State) -> State:
    """A client has left when the log says so and a newer list of MPS's is without it."""
    clients = dict(state.clients)
    for client in state.clients.values():
        left, asked = client.said_left, state.listed_at
        if left is None and asked is not None and state.carries(client, asked):
            left = client.since + NAMED_FOR
        if left is None or client.detached is not None or asked is None:
            continue
        # MPS does not list a channel without a context: one that the log says has come again is about to make it.
        came = (s.attached.get(client.pid) for s in state.candidates(client))
        left = max([left, *(one.since + NAMED_FOR for one in came if one is not None and one.contexts - one.lost)])
        if asked < left:
            continue
        if all(s.listed_at is not None and s.listed_at >= left and client.pid not in s.listed
               for s in state.candidates(client)):  # fmt: skip
            clients[client.pid] = replace(client, detached=left)
    return replace(state, clients=clients)


def _clients_listed(state: State, event: inp.ClientsListed, out: Out) -> State:
    """Which pids have a context on a server, by MPS's own answer."""
    server = state.servers.get(event.server)
    if server is None:
        return state
    attached: dict[int, Attachment] = {}
    for pid, one in server.attached.items():
        if pid not in event.pids and one.since <= event.at:
            one = replace(one, contexts=one.contexts & {0})
            if pid not in state.clients:
                continue
        attached[pid] = one
    for pid in event.pids:
        one = attached.get(pid, Attachment(event.at))
        contexts = one.contexts if one.contexts - {0} else frozenset({0, 1})
        attached[pid] = replace(_seen(one, event.seen.get(pid), event.at), contexts=contexts)
    clients = {
        pid: back(replace(one, server=server.pid)) if pid in event.pids else one for pid, one in state.clients.items()
    }
    idle = None if attached else server.idle_since if server.idle_since is not None else event.at
    server = replace(server, attached=attached, idle_since=idle, listed_at=event.at, listed=event.pids)
    return _confirmed(replace(put(state, server), clients=clients))


def _seen(one: Attachment, now: inp.Seen | None, asked: float) -> Attachment:
    """Return the attachment with the process that has its pid now. A process that is younger than what the log says of
    the pid is another one. A client that was released because it is another user's by now is no client of that user:
    with a setuid program, its first user could have that user's process terminated."""
    if now is not None and (now.born > one.since or (one.ended is not None and one.ended[1] != now.uid)):
        now = None
    before = one.seen
    same = before is not None and now is not None and (before.uid, before.start) == (now.uid, now.start)
    return replace(one, seen=now, confirmed=same and before is not None and before.at < asked)


RULES: dict[type, Callable[[State, Any, Out], State]] = {
    inp.ServerStatusSeen: _status_seen,
    inp.ServersListed: _listed,
    inp.ClientsListed: _clients_listed,
}
