"""What agent and gate say to each other. Pure.

Times are seconds of CLOCK_MONOTONIC, which cannot be set, sizes bytes, percentages with one decimal. ``instance`` is
the name of the instance that a message is about; empty: the one that the gate was started for. A pidfd may come along
with ``Knock`` and ``Known`` (SCM_RIGHTS)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from mpsagent.mps.limits import Limits, Total
from mpsagent.wire.codec import decoder
from mpsagent.wire.value import OfKind, Value

VERSION = 11
"""Another one for each change of what is said here: a peer passes over what it does not know, and would do half."""


class FromGate(OfKind):
    """A message of the gate to the agent."""


class FromAgent(OfKind):
    """A message of the agent to the gate."""


# --- gate to agent ---------------------------------------------------------------------------------------------------


class Hello(FromGate, kind="hello"):
    """The first message; every held connection, every known process and ``Synced`` follow."""

    gate: int
    started: float
    version: int = VERSION


class Knock(FromGate, kind="knock"):
    """A CUDA connection is held. A pidfd comes along unless the process has gone already. ``instance`` None: the tables
    name its user nowhere, and the agent says where it belongs by naming it in one. ``asked``: the instance that alone
    may serve it: it came in that one's own directory (``placement = "by-directory"``), or its process has passed there;
    None: each instance may. ``never``: ``debugged`` or ``unknown``, by its process's own greeting. It is held and never
    handed over: MPS would not serve it, and if it is closed, the program runs without MPS."""

    connection: int
    pid: int
    uid: int
    gid: int
    start: int
    """Start time of the process, field 22 of /proc/PID/stat; 0 when it could not be read any more."""
    since: float
    cgroup: str | None = None
    pid_namespace: int | None = None
    command: str = ""
    instance: str | None = ""
    asked: str | None = None
    never: str = ""


class Known(FromGate, kind="known"):
    """A process that was handed over and lives. ``limits``: those of its last hand-over, ``most``: the most that any of
    its hand-overs gave it, each None where the gate does not know it; ``fail_safe``: the fallback limits were taken;
    ``connections``: how often it passed this gate, 0: it came through another process (:class:`Found`); ``counts``
    False: see :class:`NoContext`."""

    pid: int
    uid: int
    gid: int
    start: int
    since: float
    limits: Limits | None = None
    cgroup: str | None = None
    connections: int = 1
    instance: str = ""
    most: Limits | None = None
    fail_safe: bool = False
    counts: bool = True


class NoContext(FromGate, kind="no_context"):
    """A process that has passed has made no context for a while. It takes no place and no share of a total until a
    context of it has passed, which waits for room like a new process."""

    pid: int
    start: int
    instance: str = ""


class Synced(FromGate, kind="synced"):
    """Every connection and process that the gate has was reported."""


class Left(FromGate, kind="left"):
    """A held connection was closed: by its client, or because the agent said :class:`Refuse`."""

    connection: int


class Handing(FromGate, kind="handing"):
    """A hand-over has begun."""

    connection: int
    pid: int
    uid: int
    at: float
    instance: str = ""


class Passed(FromGate, kind="passed"):
    """The client has the descriptor. ``acknowledged`` False: it has not confirmed in time, or before it hung up, that
    it has met its server, and lives; its connection was used up for it, and it counts until it ends. ``status``: its
    report of that meeting, 0 for success or a CUDA error; 807 in FAULT (measured on an H100, answer 8). ``limits``
    None: an earlier gate began the hand-over, and its limits are not known."""

    connection: int
    pid: int
    uid: int
    start: int
    limits: Limits | None
    seconds: float
    at: float
    fail_safe: bool = False
    acknowledged: bool = True
    status: int = 0
    instance: str = ""


class Failed(FromGate, kind="failed"):
    """A hand-over failed at ``stage`` (limits, connect, greeting, answer, acknowledgement). ``lost``: the client has
    gone from us and cannot be served again; otherwise it is held on and tried again. After an unacknowledged ``Passed``
    it says why."""

    connection: int
    pid: int
    uid: int
    why: str
    stage: str
    lost: bool = False
    instance: str = ""


class Unconfirmed(FromGate, kind="unconfirmed"):
    """MPS does not confirm these limits; the fail-safe limits are taken instead."""

    uid: int
    wanted: Limits
    why: str
    instance: str = ""


class Slowed(FromGate, kind="slowed"):
    """None of this user's is handed over there before ``until``, because earlier ones took MPS up for long."""

    uid: int
    until: float
    instance: str = ""


class Applied(FromGate, kind="applied"):
    """The admissions of this number are in force, and no hand-over is under way that they do not allow: an agent that
    sees it has seen every ``Passed`` of the users whom they shut out. ``unkept``: why they are not on disk; a gate that
    starts without an agent holds everybody then."""

    number: int
    instance: str = ""
    unkept: str = ""


class FrontEnd(FromGate, kind="front_end"):
    """A front-end's command that changes something. ``refused``: the gate has not passed it on."""

    pid: int
    uid: int
    command: str
    at: float
    refused: bool = False
    instance: str = ""


class HandshakeSeen(FromGate, kind="handshake"):
    """How the daemon greets (hex). ``known`` False: every connection is relayed untouched. ``daemon``: its pid."""

    known: bool
    greeting: str
    daemon: int | None = None
    instance: str = ""


class Refused(FromGate, kind="refused"):
    """The gate closed a connection itself, because of a bound or of what the peer sent. ``start``: of the process, 0 if
    it is not known."""

    connection: int
    pid: int
    uid: int
    why: str
    start: int = 0
    cgroup: str | None = None


# --- agent to gate ---------------------------------------------------------------------------------------------------


class User(Value):
    """``admit``: ``all``, or ``known``: only processes that have passed already. ``max_clients``: processes at a
    time; ``max_contexts``: their contexts on a device, one for a process that has none yet; ``total``: what they may
    use together. All are counted in one instance. ``named``: new processes pass only
    when they are named, with limits of their own."""

    uid: int
    admit: Literal["all", "known"]
    limits: Limits
    max_clients: int | None = None
    total: Total | None = None
    named: bool = False
    max_contexts: int | None = None

    @property
    def key(self) -> int:
        return self.uid


class Job(Value):
    """What the processes of a job may have together, under what their users may: counted as a user's."""

    name: str
    max_clients: int | None = None
    total: Total | None = None

    @property
    def key(self) -> str:
        return self.name


class Named(Value):
    """A held process and its limits; or one of a job that has passed. ``job``: the bounded one that it belongs to."""

    pid: int
    start: int
    limits: Limits
    job: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start


class Admissions(FromAgent, kind="admissions"):
    """Who may pass in an instance, with what. Always the whole; a user who is not named is held, unless ``others`` says
    otherwise. Who is named waits in that instance from then on, wherever it waited before.

    ``open`` False: hold everybody. ``room``: contexts that its server takes on a device. ``set_limits`` False: the
    daemon's limits are not touched. ``devices``: ordinals whose memory limits are set, or taken away where a user has
    none. ``parallel`` False: where there are ``others``, no user passes beside another user's processes.
    """

    number: int = 0
    open: bool = False
    room: int = 48
    fail_safe: Limits = field(default_factory=Limits)
    devices: tuple[int, ...] = ()
    set_limits: bool = True
    users: Mapping[int, User] = field(default_factory=dict)
    others: User | None = None
    parallel: bool = False
    instance: str = ""
    processes: Mapping[tuple[int, int], Named] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)

    def user(self, uid: int) -> User | None:
        return self.users.get(uid, self.others)


class Refuse(FromAgent, kind="refuse"):
    """Close this held connection; its client gets CUDA_ERROR_MPS_CONNECTION_FAILED (recording 08, G7)."""

    connection: int
    why: str


class Release(FromAgent, kind="release"):
    """The process has left its server: it is no longer known, and its next connection is that of a new client, at the
    same instance. Not if it has passed since: ``connections`` is how often it had passed this gate, as far as the gate
    has reported; None: in any case."""

    pid: int
    start: int
    connections: int | None = None


class Found(FromAgent, kind="found"):
    """A process is a client of the instance, and this gate has not reported it: it came through another process, or
    passed an earlier gate that left nothing behind. From now on it is known, counts for its user, and is reported as
    :class:`Known`. ``limits``, ``most``, ``connections``: as there. ``own``: the limits are its own, not its user's."""

    pid: int
    uid: int
    start: int
    limits: Limits | None = None
    instance: str = ""
    most: Limits | None = None
    connections: int = 0
    own: bool = False


class Instances(FromAgent, kind="instances"):
    """The instances that there are: the gate forgets all others, once no process is known there. ``own``: those that
    have a public directory of their own; all others but the first one have none then."""

    names: tuple[str, ...]
    own: tuple[str, ...] = ()


class HeldUp(FromAgent, kind="held_up"):
    """Clients of this user have held other users' clients up for ``seconds``, as a slow hand-over does. The user's next
    hand-overs wait for it as for a slow one."""

    uid: int
    seconds: float


decode_from_gate, decode_from_agent = decoder(FromGate), decoder(FromAgent)
