"""Small changes of the state that several reducers make: a server put, ended or recovered; a client lost or back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.core.actions import Action
from mpsagent.core.model import Client, Key, Outcome, Server, State, Status
from mpsagent.wire import link

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T", bound=tr.Transition | Action)
Out = list[tr.Transition]

_KEPT_ENDED = 64
_MOST_HELD_UP = 1024
_MOST_SERVERS = 64
"""Far above what MPS can have: only a broken log comes here."""


def without(mapping: Mapping[K, V], key: K) -> dict[K, V]:
    return {k: v for k, v in mapping.items() if k != key}


def bounded(mapping: dict[K, V], size: int) -> dict[K, V]:
    while len(mapping) > size:
        del mapping[next(iter(mapping))]
    return mapping


def of_daemon(one: T, daemon: Key) -> T:
    """A transition or an action, said to be of this control daemon unless it says of which it is."""
    return one if daemon is None or one.daemon is not None else replace(one, daemon=daemon)


def put(state: State, server: Server) -> State:
    """Return the state with this server."""
    return replace(state, servers=bounded({**state.servers, server.pid: server}, _MOST_SERVERS))


def held_up(state: State, uid: int, seconds: float) -> State:
    """Charge a user for the seconds in which its client has held up new clients, if there are other users."""
    users = (*(one.uid for one in state.clients.values()), *state.held.users())
    if seconds <= 0 or all(one == uid for one in users):
        return state
    known = state.held_up
    return replace(state, held_up=bounded({**without(known, uid), uid: known.get(uid, 0.0) + seconds}, _MOST_HELD_UP))


def server_ended(state: State, pid: int, at: float, status: int | None, out: Out) -> State:
    """The server is gone; its clients' processes may live on."""
    known = state.servers.get(pid)
    ended = bounded({**state.ended, pid: at}, _KEPT_ENDED)
    if known is None:
        return replace(state, ended=ended)
    if known.fault_since is not None:
        out.append(tr.FaultOver(at, pid, max(0.0, at - known.fault_since), False))
    out.append(tr.ServerEnded(at, pid, known.uid, status))
    clients = dict(state.clients)
    for client in state.clients.values():
        if client.detached is None and (client.server == pid or client.pid in known.attached):
            clients[client.pid] = lost(client, at)
    return replace(state, servers=without(state.servers, pid), ended=ended, clients=clients)


def back(client: Client) -> Client:
    """It is at work after all, or again."""
    outcome = Outcome.OK if client.outcome is Outcome.LOST else client.outcome
    return replace(client, said_left=None, detached=None, outcome=outcome)


def more(left: Mapping[int, int] | None, right: Mapping[int, int] | None) -> Mapping[int, int] | None:
    """Return the larger memory limit on each device, none if one of the two has none; None if one is not known."""
    if left is None or right is None:
        return None
    return {device: max(size, right[device]) for device, size in left.items() if device in right}


def known_again(client: Client, event: inp.GateSaid[link.Known]) -> Client:
    """One that passed more often than we know did so while the link was down. Whether that was before or after its
    server was lost is not known, so MPS is asked before it counts as one that has left."""
    said = event.what
    if said.counts is not client.counts:
        client = replace(client, counts=said.counts, counted=event.at if said.counts else client.counted)
    more_often = said.connections > (client.connections if client.at_gate is None else client.at_gate)
    limits = client.limits if said.limits is None else said.limits
    most = client.most_memory
    if said.most is not None or more_often:
        most = more(most, None if said.most is None else said.most.memory)
    client = replace(
        client, connections=max(client.connections, said.connections), at_gate=said.connections, limits=limits,
        most_memory=most, fail_safe=said.fail_safe or (client.fail_safe and limits == client.limits),
    )  # fmt: skip
    if not more_often or client.detached is None:
        return client
    return replace(client, detached=None, said_left=event.at)


def lost(client: Client, at: float, *, confirmed: bool = False) -> Client:
    """Its server ended under it."""
    outcome = Outcome.LOST if client.outcome is Outcome.OK else client.outcome
    said = at if client.said_left is None else client.said_left
    return replace(client, outcome=outcome, said_left=said, detached=said if confirmed else None)


def recovered(server: Server, at: float, out: Out) -> Server:
    status = Status.ACTIVE if server.stopping_since is None else Status.SHUTTING_DOWN
    out.append(tr.FaultOver(at, server.pid, max(0.0, at - (server.fault_since or at)), True))
    return replace(
        server, status=status, sticky=(), devices_faulted=(), fault_since=None, fault_confirmed=False, mended=at
    )  # fmt: skip
