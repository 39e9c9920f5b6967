"""What is so: the control daemon, its servers, their clients and who waits. Frozen; only ``reduce`` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from mpsagent.mps.limits import Limits

CLIENTS_PER_SERVER = 48
"""Volta and later (driver 580, H200: the 49th is refused; recording 02)."""


class Status(StrEnum):
    """A server's status, in MPS's own words where it has them."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    SHUTTING_DOWN = "SHUTTING_DOWN"


@dataclass(frozen=True, slots=True)
class Control:
    """The control daemon. ``quitting``: when a ``quit`` was accepted, ``quit_by``: when it should be over (None: when
    the last client has gone); ``exited``: when it ended."""

    pid: int
    started: float
    socket: str
    version: int | None = None
    quitting: float | None = None
    quit_by: float | None = None
    exited: float | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """A server process. ``limits`` are those that the server itself reported; ``devices_faulted`` and ``sticky`` are
    empty unless it is in FAULT. ``idle_since``: when its last client left (or it became Ready without one)."""

    pid: int
    uid: int | None
    status: Status
    started: float
    ready: float | None = None
    limits: Limits = field(default_factory=Limits)
    sticky: tuple[int, ...] = ()
    devices_faulted: tuple[int, ...] = ()
    fault_since: float | None = None
    reported: bool = False
    """True once the server has said all the limits it starts with."""
    forced: bool = False
    stop_tried: float | None = None
    """When the control daemon asked it to shut down and has not heard back since."""
    stopping_since: float | None = None
    stuck_since: float | None = None
    """When it began to wait for a client that died in the pending list: it serves nobody any more."""
    idle_since: float | None = None
    max_clients: int = CLIENTS_PER_SERVER
    last_context: int = 0
    """pid of the client whose context connected last: the owner of the next ``is associated`` line."""


@dataclass(frozen=True, slots=True)
class Client:
    """A process that a server listed as its client. ``uid`` is None until control.log has named it."""

    pid: int
    uid: int | None
    server: int
    since: float
    queued: float | None = None
    contexts: frozenset[int] = frozenset()
    devices: frozenset[str] = frozenset()
    terminated: bool = False
    """``terminate_client`` has been asked for it. Asked again, the daemon answers nothing until the process exits
    (conformance scenario X8)."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A client in the pending list of the control daemon, in order of arrival. ``gone``: its process has ended, which
    MPS does not notice: it starts a server for it all the same and hangs on that (conformance scenario X1)."""

    pid: int
    uid: int
    since: float
    gone: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """Everything the agent believes about one instance of MPS."""

    control: Control | None = None
    servers: Mapping[int, Server] = field(default_factory=dict)
    clients: Mapping[int, Client] = field(default_factory=dict)
    waiting: tuple[Waiting, ...] = ()
    uids: Mapping[int, int] = field(default_factory=dict)
    """uid by client pid, from control.log, until the client has gone."""
    ended: Mapping[int, float] = field(default_factory=dict)
    """server pid -> when it ended, so that a late line of server.log does not bring it back (bounded)."""
    unknown_lines: int = 0

    def server_of(self, uid: int) -> Server | None:
        """The live server of a user, if any."""
        return next((s for s in self.servers.values() if s.uid == uid), None)

    def holder(self) -> Server | None:
        """The server that exists now; MPS runs one at a time without --multiuser-server (the newest, while one is
        leaving)."""
        return max(self.servers.values(), key=lambda s: s.started, default=None)

    def clients_of(self, server: int) -> tuple[Client, ...]:
        return tuple(c for c in self.clients.values() if c.server == server)

    def next_users(self) -> tuple[int, ...]:
        """Waiting users in the order in which MPS serves them: by their first client's arrival."""
        return tuple(dict.fromkeys(w.uid for w in self.waiting))
