"""The state of one instance: its control daemon, servers, clients and queue. Frozen; only ``reduce`` builds it.

What each part rests on: clients and the queue on the gate (kernel identity, pidfd); the end of a process on its pidfd;
servers and their status on the logs of the hidden directory. What a log says about a client or against a server is a
hint: nothing that hits a process or moves a turn is done before MPS's own answer or the kernel has confirmed it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import NamedTuple

from mpsagent.core.inputs import Lifts, Peer, Seen, Worked
from mpsagent.core.queue import Held as Held
from mpsagent.core.queue import Queue
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.policy.shares import Lease

CLIENTS_PER_SERVER = 48
"""Volta and later (driver 580, H200: the 49th is refused; recording 02)."""

NAMED_FOR = 2.0
"""Seconds within which a server has named a client that was handed over to it; its line comes in the same moment."""

ENDED_FOR = 2.0
"""Seconds within which MPS takes a client whose process has ended off its list; it takes 15 to 30 ms."""

PROPERLY = 0.012
"""Seconds at least from the end of the contexts of a program to the end of its process; measured were 24 and more. A
process that is killed has both at once."""
FAULT_WITHIN, DOUBT_MOST = 0.7, 3.0
"""Seconds after the exit of a client with work on the GPU in which a fault follows (150 to 650 ms, measured), and for
which new clients are held at most when clients die one after the other."""

LOGS_EARLY = 1.0
"""Seconds by which the time in a log may be earlier than the gate's for the same thing."""

SEEN_EVERY = 1.0
"""Seconds between two looks at which processes are stopped."""


Key = int | None
"""Of a control daemon: the user whose own it is, None for that of all users."""


class Status(StrEnum):
    """A server's status, in MPS's own words where it has them."""

    INITIALIZING = "INITIALIZING"
    ACTIVE = "ACTIVE"
    FAULT = "FAULT"
    SHUTTING_DOWN = "SHUTTING_DOWN"


class Outcome(StrEnum):
    """How a client ended. ``lost``: its server ended under it; ``ended``: by the agent (its action is on record)."""

    OK = "ok"
    FAULTED = "faulted"
    ENDED = "ended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Control:
    """The control daemon. ``quitting``: when a ``quit`` was accepted, ``quit_by``: when it should be over (None: when
    the last client has gone)."""

    pid: int
    started: float
    socket: str
    version: int | None = None
    proven: bool = False
    """The kernel confirmed it; before that only its own first log line speaks for it."""
    multiuser: bool = False
    """It was started with one server for all users."""
    asked_multiuser: bool = False
    """That was what the policy wanted then: a driver before 580 cannot do it."""
    quitting: float | None = None
    quit_by: float | None = None


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a server's log says of one pid: the contexts it has (0 is its channel), on which devices. No identity: who
    that is the gate tells."""

    since: float
    contexts: frozenset[int] = frozenset()
    devices: frozenset[str] = frozenset()
    ended: tuple[float, int] | None = None
    """When a client's process has ended, and its user: if MPS lists it still, another process, which it has forked or
    given its descriptors, keeps its place and its memory (measured on an H200, 2026-11-23)."""
    seen: Seen | None = None
    """Of one that is no client: the process that has its pid, if MPS can mean that one, since MPS listed it last."""
    confirmed: bool = False
    """MPS listed it once more after it was seen, and the same process was there."""
    lost: frozenset[int] = frozenset()
    """Those of its contexts that its client has closed. The server still counts them: it is busy with a hand-over."""
    closed: float | None = None
    """When its client closed the last one."""

    @property
    def places(self) -> int:
        """Of its server, on each device: its contexts, or one while it has none."""
        return max(1, -(-(len(self.contexts) - (0 in self.contexts)) // max(1, len(self.devices))))


class Doubt(NamedTuple):
    """A doubt about a server ``until`` then: a client has died at work, perhaps of a fatal fault. ``since``: the first
    of the clients that died one after the other."""

    since: float
    until: float


@dataclass(frozen=True, slots=True)
class Server:
    """A server process. ``limits``: what it said it started with; ``idle_since``: when the last pid of ``attached``
    left."""

    pid: int
    uid: int | None
    status: Status
    started: float
    ready: float | None = None
    limits: Limits = field(default_factory=Limits)
    reported: bool = False
    """True once the server has said all the limits it starts with."""
    sticky: tuple[int, ...] = ()
    devices_faulted: tuple[int, ...] = ()
    fault_since: float | None = None
    fault_confirmed: bool = False
    """MPS said FAULT itself (``get_server_status``), not only its log."""
    mended: float | None = None
    """When its log said that a fault is over, until MPS says so, too: who is handed over in a fault is refused."""
    forced: bool = False
    stop_tried: float | None = None
    """When the control daemon asked it to shut down and has not heard back since."""
    stopping_since: float | None = None
    stuck_since: float | None = None
    """When it began to wait for a client that died while its server started: it serves no client any more (X1)."""
    attached: Mapping[int, Attachment] = field(default_factory=dict)
    idle_since: float | None = None
    max_clients: int = CLIENTS_PER_SERVER
    confirmed: bool = False
    """MPS listed it, not only its log."""
    unnamed: bool = False
    """Its log does not say which client a line is about (drivers before 580)."""
    doubt: Doubt | None = None
    last_context: int = 0
    """pid of the client whose context connected last: the owner of the next ``is associated`` line."""
    turned_away: int = 0
    """pid of the client that it has just refused a context because it is full. Its log says then that this process has
    disconnected, which it has not (an H200)."""
    listed_at: float | None = None
    listed: frozenset[int] = frozenset()
    """What ``get_client_list`` answered last, and when: the pids with a context."""


class Use(NamedTuple):
    """What a client has used, see :mod:`mpsagent.core.use`. ``utilization``: at the last look, from 0 to 1, None: not
    known; ``idle_since``: since when it has been 0. Not on record yet: ``busy`` of ``seconds``, ``energy`` in joules.
    ``shared``: the utilisation is that of several users. ``told``: how often it was put on record."""

    utilization: float | None = None
    idle_since: float | None = None
    seconds: float = 0.0
    busy: float = 0.0
    energy: float = 0.0
    shared: bool = False
    told: int = 0


@dataclass(frozen=True, slots=True)
class Client:
    """A process that passed the gate, or came through another one that did (``unseen``), and lives. ``since``: its
    first hand-over; ``waited``: seconds at the gate before that; ``connections``: how often it passed, once for its
    channel and once for each context."""

    peer: Peer
    since: float
    waited: float = 0.0
    limits: Limits | None = None
    """The limits of its last hand-over; None: unknown. A limit that is not known is never the reason for an end."""
    most_memory: Mapping[int, int] | None = None
    """Bytes by device: the most that any of its hand-overs gave it; None: unknown."""
    fail_safe: bool = False
    connections: int = 1
    at_gate: int | None = None
    """Number of times that it passed the present gate, as reported by the gate; None: the gate has not reported it."""
    server: int | None = None
    """The server whose log named it last, also when that log says that it has left."""
    said_left: float | None = None
    """When a log said that it left its server. Only a hint."""
    detached: float | None = None
    """When it had left its server, while the process lives on: confirmed by MPS's own lists, or by the end of the
    control daemon."""
    terminated: float | None = None
    """When ``terminate_client`` was answered for it. Asked again, the daemon answers nothing until it exits (X8)."""
    unanswered: float | None = None
    """When mpsagent gave up waiting for the answer to its ``terminate_client``: the daemon answers nobody until its
    process exits."""
    held: bool = False
    """True if its files of the GPU are held, so that its exit harms no other client."""
    outcome: Outcome = Outcome.OK
    """What is known so far of how it will have ended."""
    lease: int | None = None
    """The number of the lease with which it was let in."""
    job: str | None = None
    """That lease's name."""
    daemon: Key = None
    frozen: float | None = None
    """Since when it is frozen, because its user is paused; also where its owner had stopped it before."""
    counts: bool = True
    """True if it takes a place, and a share of the totals of its user and its job. False: the gate reports that it has
    made no context for a while."""
    counted: float | None = None
    """When it came to count again, because its first context was handed over."""
    use: Use = field(default_factory=Use)

    @property
    def pid(self) -> int:
        return self.peer.pid

    @property
    def uid(self) -> int:
        return self.peer.uid

    @property
    def unseen(self) -> bool:
        """The gate has not seen it: it came through another process (a relay, a sandbox; recording 12, H1)."""
        return self.connections == 0


class Parted(NamedTuple):
    """A client that has ended, and when. What it used since the last look is still to be counted."""

    client: Client
    at: float


@dataclass(frozen=True, slots=True)
class Gate:
    """What is known of the gate. ``synced``: it has told all that it holds."""

    pid: int
    since: float
    synced: bool = False


@dataclass(frozen=True, slots=True)
class Drain:
    """Maintenance: nothing new is admitted. ``until`` None: running work may take as long as it wants. ``restart``: it
    ends with the control daemon, and the next one is started. ``by``: the uid that ordered it; None: not known."""

    since: float
    until: float | None
    restart: bool = False
    by: int | None = None


@dataclass(frozen=True, slots=True)
class StartFailure:
    """Servers that did not start, in a row: how many, since when, and MPS's own reason."""

    count: int
    since: float
    last: float
    reason: str = ""


class Over(NamedTuple):
    """A client that has used more memory than it was given. ``now``: it did at the last look, at ``looked``;
    ``seconds``: for how long in sum; ``used`` and ``limit`` in bytes, on the device where the difference was largest.
    """

    device: int
    used: int
    limit: int
    looked: float
    seconds: float = 0.0
    now: bool = True


class Refusal(NamedTuple):
    """A process that was refused, and not by the policy. ``number``: how many there were before it, and itself."""

    number: int
    pid: int
    start: int
    uid: int
    cgroup: str | None
    why: str


@dataclass(frozen=True, slots=True)
class Shared:
    """What is known of an instance of MPS as a whole, and what people ordered: the same for all its control daemons.

    What no rule reads is not compared: a change of it sets off no decision.
    """

    policy: Policy = field(default_factory=Policy)
    devices: tuple[Device, ...] = ()
    identities: Mapping[int, Identity] = field(default_factory=dict)
    gate: Gate | None = None
    before: Mapping[tuple[int, int], Held] = field(default_factory=dict, compare=False)
    """By process: clients that waited when the link to the gate was lost, and that the gate has not named again."""
    never: Mapping[int, Held] = field(default_factory=dict)
    """Connections that the gate holds and never hands over: those of debugged programs. They wait for no turn."""
    turned_away: Mapping[int, Held] = field(default_factory=dict, compare=False)
    """Connections that the gate was asked to refuse (bounded): one that was being handed over just then comes back."""
    stopped: frozenset[int] = frozenset()
    cpu_idle: Mapping[int, float] = field(default_factory=dict)
    """By pid: for how many seconds a client had used no CPU time when that was read last."""
    lifts: Mapping[int, Lifts] = field(default_factory=dict)
    """By pid, of clients and of those who are held: which limits their environment takes away."""
    leases: tuple[Lease, ...] = ()
    """Shares of jobs, in the order in which they were given."""
    unconfirmed: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    """By uid: when MPS did not confirm that user's limits last, and why."""
    extended: Mapping[int, float] = field(default_factory=dict)
    """By uid: until when a turn of this user does not end, by an administrator's order."""
    slowed: Mapping[int, float] = field(default_factory=dict)
    """By uid: until when the gate hands none of that user's over (bounded)."""
    memory: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Device memory of processes as NVML said last: bytes by pid and the device's UUID."""
    over: Mapping[int, Over] = field(default_factory=dict)
    """Clients that have used more memory than they were given, by pid."""
    worked: Worked | None = None
    """The last look at what the GPUs have done."""
    parted: tuple[Parted, ...] = field(default=(), compare=False)
    gone: Mapping[tuple[int, int], None] = field(default_factory=dict, compare=False)
    """Processes (pid and start time) whose end as clients is on record (bounded): the gate may report them later."""
    unknown_lines: int = 0
    foreign_lines: int = 0
    """Log lines about clients that never passed the gate: no decision rests on them."""
    refusals: tuple[Refusal, ...] = ()
    """The last processes that the gate or a server has refused (bounded): each may get a line."""
    unseen: int = field(default=0, compare=False)
    """Clients that the gate has refused because their pid namespace cannot be seen."""


SHARED = tuple(one.name for one in fields(Shared))


@dataclass(frozen=True, slots=True)
class State(Shared):
    """Everything that is believed about one control daemon, its servers, and the clients and connections of its users.

    ``user``: the user whose own daemon it is, None for the daemon of all users. ``applied``: the number of the gate's
    table in force for it, ``unkept``: why that is not on disk. ``known_handshake`` None: the gate has not greeted the
    daemon yet.
    """

    user: Key = None
    clients: Mapping[int, Client] = field(default_factory=dict)
    held: Queue = field(default_factory=Queue)
    control: Control | None = None
    servers: Mapping[int, Server] = field(default_factory=dict)
    failed_handovers: int = 0
    """Hand-overs in a row that failed at the control daemon, of all users."""
    silent_since: float | None = None
    """When the oldest command was sent that the control daemon has still not answered."""
    start_failure: StartFailure | None = None
    listed_at: float | None = None
    """When ``get_server_list`` was answered last."""
    drain: Drain | None = None
    held_up: Mapping[int, float] = field(default_factory=dict)
    """By user: for how many seconds in sum its clients have held up other users' new clients (bounded)."""
    applied: int = -1
    unkept: str = ""
    known_handshake: bool | None = None
    left: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """pid -> when a log said that it left which server, for pids that the gate has not told of yet (bounded)."""
    ended: Mapping[int, float] = field(default_factory=dict)
    """server pid -> when it ended, so that a late line of server.log does not bring it back (bounded)."""

    def lease(self, peer: Peer) -> Lease | None:
        """What counts for this process: the last lease that fits."""
        fitting = (one for one in reversed(self.leases) if one.fits(peer.uid, peer.cgroup, peer.lineage))
        return next(fitting, None)

    def job(self, peer: Peer) -> tuple[int | None, str | None]:
        """Number and name of the lease that counts for this process."""
        lease = self.lease(peer)
        return (None, None) if lease is None else (lease.number, lease.name)

    def server_of(self, client: int) -> Server | None:
        """The server that lists this pid as its client: the newest, if there are two."""
        found = [s for s in self.servers.values() if client in s.attached]
        return max(found, key=lambda s: s.attached[client].since, default=None)

    def clients_of(self, server: int) -> tuple[Client, ...]:
        """Those of a server's clients who passed the gate."""
        known = self.servers.get(server)
        return () if known is None else tuple(self.clients[pid] for pid in known.attached if pid in self.clients)

    def strangers(self, server: Server) -> tuple[int, ...]:
        """Processes that have a context there by its log or by MPS's own list and are no clients: the gate has told of
        all that passed, and hands none of these over."""
        gate = self.gate
        if gate is None or not gate.synced or self.known_handshake is False:
            return ()
        return tuple(
            pid for pid, one in server.attached.items()
            if one.contexts - {0} and pid not in self.clients
            and all(held.handing is None for held in self.held.of_pid(pid))
        )  # fmt: skip

    def kept_open(self, server: Server) -> dict[int, int]:
        """Clients, with their users, that MPS lists though their processes have ended."""
        at = server.listed_at
        return {
            pid: one.ended[1] for pid, one in server.attached.items()
            if one.ended is not None and at is not None and at >= one.ended[0] + ENDED_FOR and pid in server.listed
        }  # fmt: skip

    def carries(self, client: Client, now: float) -> bool:
        """It passed the gate and no server has named it, while others came past the gate: it may be whom they came
        through, and no client itself."""
        return (
            client.server is None and now >= client.since + NAMED_FOR and self.server_of(client.pid) is None
            and not self.held.of((client.pid, client.peer.start)) and any(one.unseen for one in self.clients.values())
        )  # fmt: skip

    def working_on(self, server: Server) -> tuple[Client, ...]:
        """Clients that may be at work there, whatever the logs say: who passed the gate, lives, has not been confirmed
        to have left, and is of that server's user."""
        return tuple(c for c in self.clients.values() if c.detached is None and self.fits(c, server))

    def fits(self, client: Client, server: Server) -> bool:
        """Whether the control daemon hands this client over to such a server."""
        shared = self.control is not None and self.control.multiuser
        here = client.unseen and client.server == server.pid  # it came through another user's process
        return shared or here or server.uid is None or server.uid == client.uid

    def candidates(self, client: Client) -> tuple[Server, ...]:
        """Servers where this client may have a context."""
        return tuple(server for server in self.servers.values() if self.fits(client, server))

    def waits_for_context(self, client: Client) -> bool:
        """Return whether the gate holds the first context of a client that has made none for a while."""
        return not client.counts and self.held.has((client.pid, client.peer.start))

    def clients_of_user(self, uid: int) -> tuple[Client, ...]:
        return tuple(c for c in self.clients.values() if c.uid == uid)

    def users(self) -> tuple[int, ...]:
        """Users with clients, those at work the longest first."""
        return tuple(dict.fromkeys(c.uid for c in sorted(self.clients.values(), key=lambda c: c.since)))
