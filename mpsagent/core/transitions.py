"""What happened, as typed values: history, journal, metrics and replay are fed from these and from nowhere else.

They come out of the reducer and the rules. ``kind`` is the name in the event stream; the other fields are its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from mpsagent.mps.limits import Limits


@dataclass(frozen=True, slots=True)
class ControlStarted:
    kind: ClassVar[str] = "control.started"
    at: float
    pid: int


@dataclass(frozen=True, slots=True)
class ControlEnded:
    kind: ClassVar[str] = "control.ended"
    at: float
    pid: int


@dataclass(frozen=True, slots=True)
class ControlQuitting:
    """A ``quit`` was accepted; ``timeout`` in seconds, None: it waits for the clients."""

    kind: ClassVar[str] = "control.quitting"
    at: float
    timeout: int | None


@dataclass(frozen=True, slots=True)
class ServerStarting:
    kind: ClassVar[str] = "server.starting"
    at: float
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class ServerReady:
    kind: ClassVar[str] = "server.ready"
    at: float
    pid: int
    uid: int | None


@dataclass(frozen=True, slots=True)
class ServerEnded:
    kind: ClassVar[str] = "server.ended"
    at: float
    pid: int
    uid: int | None
    status: int | None


@dataclass(frozen=True, slots=True)
class ServerStartFailed:
    """``count`` in a row."""

    kind: ClassVar[str] = "server.start_failed"
    at: float
    pid: int
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class ServerFull:
    kind: ClassVar[str] = "server.full"
    at: float
    server: int
    limit: int


@dataclass(frozen=True, slots=True)
class ClientWaiting:
    """A process came to the gate and is held."""

    kind: ClassVar[str] = "client.waiting"
    at: float
    pid: int
    uid: int
    connection: int


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """It went away while it was held. ``waited`` in seconds. ``lost``: the gate began anew, without it."""

    kind: ClassVar[str] = "client.left"
    at: float
    pid: int
    uid: int
    waited: float
    job: str | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ClientConnected:
    """A process was handed over to MPS for the first time, with these limits. ``handover``: seconds that it took, None
    where the gate has not said when it began. ``lease``, ``job``: number and name of the lease that it came with.
    ``unseen``: it was not, MPS has it all the same: it came through another process."""

    kind: ClassVar[str] = "client.connected"
    at: float
    pid: int
    uid: int
    waited: float
    limits: Limits
    fail_safe: bool
    handover: float | None = None
    lease: int | None = None
    job: str | None = None
    unseen: bool | None = None


@dataclass(frozen=True, slots=True)
class ClientEnded:
    """A client's process has ended. ``outcome``: see :class:`mpsagent.core.model.Outcome`. ``lease``, ``job``:
    number and name of the lease with which it was let in."""

    kind: ClassVar[str] = "client.ended"
    at: float
    pid: int
    uid: int
    server: int | None
    outcome: str
    seconds: float
    waited: float
    lease: int | None = None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class ClientRefused:
    kind: ClassVar[str] = "client.refused"
    at: float
    pid: int
    uid: int
    why: str
    job: str | None = None


@dataclass(frozen=True, slots=True)
class HandoverFailed:
    kind: ClassVar[str] = "client.handover_failed"
    at: float
    pid: int
    uid: int
    stage: str
    why: str
    lost: bool


@dataclass(frozen=True, slots=True)
class FaultBegan:
    kind: ClassVar[str] = "server.fault"
    at: float
    server: int
    uid: int | None


@dataclass(frozen=True, slots=True)
class FaultClient:
    """A client that is listed with a sticky error. All listed are alike (recording 03, Q3)."""

    kind: ClassVar[str] = "client.sticky"
    at: float
    server: int
    pid: int


@dataclass(frozen=True, slots=True)
class FaultOver:
    """``recovered`` False: the server ended."""

    kind: ClassVar[str] = "server.fault_over"
    at: float
    server: int
    seconds: float
    recovered: bool


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """A user has got the GPU. ``gap``: seconds since the user before had it, None for the first."""

    kind: ClassVar[str] = "turn.began"
    at: float
    uid: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """``forced``: by the policy, not by the user's own leaving."""

    kind: ClassVar[str] = "turn.ended"
    at: float
    uid: int
    seconds: float
    forced: bool


@dataclass(frozen=True, slots=True)
class UserPaused:
    """A user's processes stand, so that another user can have the GPU. ``clients``: how many."""

    kind: ClassVar[str] = "user.paused"
    at: float
    uid: int
    clients: int


@dataclass(frozen=True, slots=True)
class UserResumed:
    """They go on, after ``seconds``."""

    kind: ClassVar[str] = "user.resumed"
    at: float
    uid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ClientResumed:
    """A frozen client was resumed by another than mpsagent."""

    kind: ClassVar[str] = "client.resumed"
    at: float
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class GateConnected:
    kind: ClassVar[str] = "gate.connected"
    at: float
    pid: int


@dataclass(frozen=True, slots=True)
class GateLost:
    kind: ClassVar[str] = "gate.lost"
    at: float


@dataclass(frozen=True, slots=True)
class LimitsUnconfirmed:
    kind: ClassVar[str] = "limits.unconfirmed"
    at: float
    uid: int
    why: str


@dataclass(frozen=True, slots=True)
class FrontEndUsed:
    """A person changed something through the public directory; the next hand-over puts it right. ``refused``: wanted
    to, and the gate did not let the command through."""

    kind: ClassVar[str] = "front_end"
    at: float
    pid: int
    uid: int
    command: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class LeaseGiven:
    """A job has a share of its own; ``until`` in seconds since the epoch. ``uid``, ``cgroup``, ``pid``: whose it is;
    ``job``: what the batch system calls it."""

    kind: ClassVar[str] = "lease.given"
    at: float
    number: int
    by: int
    until: float
    uid: int | None = None
    cgroup: str | None = None
    pid: int | None = None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """``by`` None: its time was over."""

    kind: ClassVar[str] = "lease.ended"
    at: float
    number: int
    by: int | None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class HandshakeUnknown:
    kind: ClassVar[str] = "gate.handshake_unknown"
    at: float
    greeting: str


@dataclass(frozen=True, slots=True)
class LineUnknown:
    kind: ClassVar[str] = "log.unknown"
    at: float
    source: str
    text: str


Transition = (
    ControlStarted | ControlEnded | ControlQuitting | ServerStarting | ServerReady | ServerEnded | ServerStartFailed
    | ServerFull | ClientWaiting | ClientLeft | ClientConnected | ClientEnded | ClientRefused | HandoverFailed
    | FaultBegan | FaultClient | FaultOver | TurnBegan | TurnEnded | UserPaused | UserResumed | ClientResumed
    | GateConnected | GateLost | LimitsUnconfirmed
    | FrontEndUsed | LeaseGiven | LeaseEnded | HandshakeUnknown | LineUnknown
)  # fmt: skip


def transition_fields(one: Transition) -> dict[str, object]:
    """Its fields but ``at``, ready for JSON."""
    found: dict[str, object] = {}
    for field in fields(one):
        value = getattr(one, field.name)
        if field.name != "at" and value is not None:
            found[field.name] = value.as_json() if isinstance(value, Limits) else value
    return found
