"""What the engine is told, beside the log lines (:mod:`mpsagent.mps.events`): by the gate, the kernel and people.

Identity comes from the gate alone: a process is a client because it passed the gate, with the pid, user and start time
that the kernel gave there. ``at`` is seconds since the epoch on a clock that does not jump.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from mpsagent.mps.events import Line
from mpsagent.mps.limits import Device, Limits
from mpsagent.mps.work import Work
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.policy.shares import Lease
from mpsagent.wire import link


class Peer(NamedTuple):
    """Who is at the other end of a connection to the gate, as the kernel says. ``start``: field 22 of
    /proc/PID/stat; ``cgroup`` and ``namespace`` (inode of the pid namespace) are None where they could not be read."""

    pid: int
    uid: int
    gid: int
    start: int
    cgroup: str | None = None
    namespace: int | None = None
    command: str = ""
    lineage: tuple[tuple[int, int], ...] = ()
    """Itself and the processes that it descends from, as (pid, start); read when there is a lease that names one."""


# --- from the gate ----------------------------------------------------------------------------------------------------

Message = TypeVar("Message", bound=link.FromGate)


class Remembered(NamedTuple):
    """A client as an earlier agent knew it, in the engine's clock; the fields are those of
    :class:`mpsagent.core.model.Client`."""

    since: float
    waited: float = 0.0
    limits: Limits | None = None
    most_memory: Mapping[int, int] | None = None
    fail_safe: bool = False
    connections: int = 1
    terminated: float | None = None
    outcome: str = "ok"
    lease: int | None = None
    job: str | None = None
    counts: bool = True
    counted: float | None = None


class GateSaid(NamedTuple, Generic[Message]):
    """A message of the gate, its times in the engine's clock. The agent adds information that the gate does not have:
    of a process that passed earlier the ``command``, and ``earlier``, the knowledge of an earlier agent; of each its
    ``lineage``, see :class:`Peer`."""

    at: float
    what: Message
    command: str = ""
    lineage: tuple[tuple[int, int], ...] = ()
    earlier: Remembered | None = None

    @property
    def peer(self) -> Peer:
        """Of whom a ``Knock``, ``Known`` or ``Passed`` speaks."""
        match self.what:
            case link.Knock() as one:
                of_place = one.cgroup, one.pid_namespace, one.command, self.lineage
                return Peer(one.pid, one.uid, one.gid, one.start, *of_place)
            case link.Known() as one:
                return Peer(one.pid, one.uid, one.gid, one.start, one.cgroup, None, self.command, self.lineage)
            case link.Passed() as one:
                return Peer(one.pid, one.uid, 0, one.start)
        raise TypeError(f"{type(self.what).__name__} speaks of no process")


class LinkLost(NamedTuple):
    at: float


class ClientRemembered(NamedTuple):
    """A client of an earlier agent whose process lives, and which the gate has not named: the gate's descriptor store
    was lost, too."""

    at: float
    peer: Peer
    earlier: Remembered


# --- from the kernel --------------------------------------------------------------------------------------------------


class ProcessEnded(NamedTuple):
    """A pidfd says that this process has ended. ``start`` None: whichever has that pid. ``lives``: the process is
    no longer a client, and may become one again."""

    at: float
    pid: int
    start: int | None = None
    lives: bool = False


class ControlRuns(NamedTuple):
    """A control daemon of ours runs: it was started or found, and proved to be ours. ``multiuser``: it has one server
    for all users; None: as the policy says. ``asked``: that was wanted when it was started; None: as it is."""

    at: float
    pid: int
    started: float
    socket: str
    multiuser: bool | None = None
    asked: bool | None = None


class ControlGone(NamedTuple):
    """The control daemon's process has ended, whatever its log says."""

    at: float
    pid: int


class Lifts(NamedTuple):
    """Which limits the environment takes away that a process (``start``) was started with. ``threads``: by partitioning
    by context; ``memory``: its CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, where MPS forgets the limit over that; else None."""

    start: int = 0
    threads: bool = False
    memory: str | None = None


class ProcessesSeen(NamedTuple):
    """A look at the processes that matter: which are stopped, for how many seconds clients had used no CPU time when
    that was read last, and which processes, clients or held, would lift their limits."""

    at: float
    stopped: frozenset[int]
    cpu_idle: Mapping[int, float]
    lifts: Mapping[int, Lifts] = {}


class MemorySeen(NamedTuple):
    """What NVML says of device memory: bytes by pid and the device's UUID; who is not in it is not known."""

    at: float
    memory: Mapping[int, Mapping[str, int]]


class Worked(NamedTuple):
    """A look at what the GPUs have done, by UUID."""

    at: float
    work: Mapping[str, Work]


# --- from MPS, by its front-end ---------------------------------------------------------------------------------------


class ServerStatusSeen(NamedTuple):
    """``get_server_status`` answered; ``status`` is MPS's own word. ``at``: when it was asked, because on a busy
    machine the answer may be older than what a log has said since."""

    at: float
    server: int
    status: str


class ServersListed(NamedTuple):
    """``get_server_list`` answered: these servers are there (pid to uid, from the kernel), and no others of those that
    were known before the question."""

    at: float
    servers: Mapping[int, int]
    known_before: frozenset[int]


class Seen(NamedTuple):
    """A process as the kernel shows it at ``at``. ``born``: when it started, as a log would have it."""

    at: float
    uid: int
    start: int
    born: float


class ClientsListed(NamedTuple):
    """``get_client_list`` answered: these pids have a context on this server, and no others had when it was asked
    (``at``). A process with nothing but its channel is not in it (conformance scenario X8). ``seen``: those of them
    that are no clients, after the answer."""

    at: float
    server: int
    pids: frozenset[int]
    seen: Mapping[int, Seen] = {}


class DaemonSilent(NamedTuple):
    """A command sent at ``at`` was not answered in time (``silent``), or one was answered after all."""

    at: float
    silent: bool


# --- from people and the machine --------------------------------------------------------------------------------------


class PolicyChanged(NamedTuple):
    at: float
    policy: Policy


class DevicesFound(NamedTuple):
    at: float
    devices: tuple[Device, ...]


class PeopleKnown(NamedTuple):
    at: float
    identities: Mapping[int, Identity]


class EndOrdered(NamedTuple):
    """A person wants a client ended. ``at_once``: without the hook."""

    at: float
    pid: int
    by: int
    at_once: bool


class DrainOrdered(NamedTuple):
    """``until`` None: running work may take as long as it wants. ``since`` is earlier than ``at`` when an earlier agent
    received the order. ``restart``: until the control daemon has ended, and no longer. ``by``: the uid that ordered
    it."""

    at: float
    since: float
    until: float | None
    restart: bool = False
    by: int | None = None


class DrainResumed(NamedTuple):
    at: float


class TurnExtended(NamedTuple):
    """A turn of this user does not end before ``until``."""

    at: float
    uid: int
    until: float


class RestartOrdered(NamedTuple):
    """The control daemon is to be started anew, also where starts have failed."""

    at: float
    by: int


class LeaseOrdered(NamedTuple):
    at: float
    lease: Lease


class LeaseEndOrdered(NamedTuple):
    """``by`` None: its time is over."""

    at: float
    number: int
    by: int | None = None


class Begun(NamedTuple):
    """A client that an earlier agent had begun to end. ``step``: ``hook``, its hook ran; ``terminate``, MPS was to be
    asked next; ``asked``, MPS was asked. ``at``: when that step began."""

    pid: int
    start: int
    uid: int
    reason: str
    rule: str
    step: str
    at: float


class Resumed(NamedTuple):
    """The clients that an earlier agent had begun to end."""

    at: float
    ending: tuple[Begun, ...]


# --- of one of several control daemons --------------------------------------------------------------------------------


class DaemonOpened(NamedTuple):
    """A user has a control daemon of its own: the user's connections wait there from now on."""

    at: float
    uid: int


class DaemonClosed(NamedTuple):
    at: float
    uid: int


class Of(NamedTuple):
    """What is about one control daemon: that of the user ``daemon``, None: that of all users."""

    daemon: int | None
    what: Line | GateSaid[Any] | ClientRemembered | KernelInput | AnswerInput | PersonInput


DaemonInput = DaemonOpened | DaemonClosed | Of
GateInput = GateSaid[Any] | LinkLost | ClientRemembered
KernelInput = ProcessEnded | ControlRuns | ControlGone | ProcessesSeen | MemorySeen | Worked
AnswerInput = ServerStatusSeen | ServersListed | ClientsListed | DaemonSilent
PersonInput = (
    PolicyChanged
    | DevicesFound
    | PeopleKnown
    | EndOrdered
    | DrainOrdered
    | DrainResumed
    | TurnExtended
    | RestartOrdered
    | LeaseOrdered
    | LeaseEndOrdered
    | Resumed
)
Input = Line | GateInput | KernelInput | AnswerInput | PersonInput | DaemonInput
