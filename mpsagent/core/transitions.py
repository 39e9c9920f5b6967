"""What happened, as typed values: history, journal, metrics and replay are fed from these and from nowhere else.

They come out of the reducer and the rules. ``kind`` is the name in the event stream; the other fields are its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

from mpsagent.mps.limits import Limits


@dataclass(frozen=True, slots=True)
class Transition:
    """``lane``: the user in whose lane it was, None: in that of all."""

    kind: ClassVar[str]
    at: float
    lane: int | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class ControlStarted(Transition):
    kind = "control.started"
    pid: int


@dataclass(frozen=True, slots=True)
class ControlEnded(Transition):
    kind = "control.ended"
    pid: int


@dataclass(frozen=True, slots=True)
class ControlQuitting(Transition):
    """A ``quit`` was accepted; ``timeout`` in seconds, None: it waits for the clients."""

    kind = "control.quitting"
    timeout: int | None


@dataclass(frozen=True, slots=True)
class ServerStarting(Transition):
    kind = "server.starting"
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class ServerReady(Transition):
    kind = "server.ready"
    pid: int
    uid: int | None


@dataclass(frozen=True, slots=True)
class ServerEnded(Transition):
    kind = "server.ended"
    pid: int
    uid: int | None
    status: int | None


@dataclass(frozen=True, slots=True)
class ServerStartFailed(Transition):
    """``count`` in a row."""

    kind = "server.start_failed"
    pid: int
    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class ServerFull(Transition):
    kind = "server.full"
    server: int
    limit: int


@dataclass(frozen=True, slots=True)
class ClientWaiting(Transition):
    """A process came to the gate and is held."""

    kind = "client.waiting"
    pid: int
    uid: int
    connection: int


@dataclass(frozen=True, slots=True)
class ClientHeld(Transition):
    """A process came to the gate and is held until it exits, because MPS cannot serve it."""

    kind = "client.held"
    pid: int
    uid: int
    why: str


@dataclass(frozen=True, slots=True)
class ClientLeft(Transition):
    """It went away while it was held. ``waited`` in seconds. ``lost``: the gate began anew, without it."""

    kind = "client.left"
    pid: int
    uid: int
    waited: float
    job: str | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class ClientConnected(Transition):
    """A process was handed over to MPS for the first time, with these limits, None: unknown. ``handover``: seconds that
    it took, None if the gate has not reported its begin. ``lease``, ``job``: number and name of the lease that it came
    with. ``unseen``: it was not handed over and MPS still has it: it came through another process, or worked before
    the gate was there."""

    kind = "client.connected"
    pid: int
    uid: int
    waited: float
    limits: Limits | None
    fail_safe: bool
    handover: float | None = None
    lease: int | None = None
    job: str | None = None
    unseen: bool | None = None


@dataclass(frozen=True, slots=True)
class ClientEnded(Transition):
    """A client's process has ended. ``outcome``: see :class:`mpsagent.core.model.Outcome`. ``lease``, ``job``:
    number and name of the lease with which it was let in."""

    kind = "client.ended"
    pid: int
    uid: int
    server: int | None
    outcome: str
    seconds: float
    waited: float
    lease: int | None = None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class ClientUsed(Transition):
    """What a client has used since this was said last: the GPU was ``busy`` of ``seconds``, ``energy`` in joules.
    ``shared``: that of all at work there. ``over``: it has ended."""

    kind = "client.used"
    pid: int
    uid: int
    seconds: float
    busy: float
    energy: float
    shared: bool
    over: bool
    job: str | None = None


@dataclass(frozen=True, slots=True)
class ClientRefused(Transition):
    kind = "client.refused"
    pid: int
    uid: int
    why: str
    job: str | None = None


@dataclass(frozen=True, slots=True)
class HandoverFailed(Transition):
    kind = "client.handover_failed"
    pid: int
    uid: int
    stage: str
    why: str
    lost: bool


@dataclass(frozen=True, slots=True)
class FaultBegan(Transition):
    kind = "server.fault"
    server: int
    uid: int | None


@dataclass(frozen=True, slots=True)
class FaultClient(Transition):
    """A client that is listed with a sticky error. All listed are alike (recording 03, Q3). ``uid`` None: not known."""

    kind = "client.sticky"
    server: int
    pid: int
    uid: int | None = None


@dataclass(frozen=True, slots=True)
class FaultOver(Transition):
    """``recovered`` False: the server ended."""

    kind = "server.fault_over"
    server: int
    seconds: float
    recovered: bool


@dataclass(frozen=True, slots=True)
class TurnBegan(Transition):
    """A user has got the GPU. ``gap``: seconds since the user before had it, None for the first."""

    kind = "turn.began"
    uid: int
    gap: float | None


@dataclass(frozen=True, slots=True)
class TurnEnded(Transition):
    """``forced``: by the policy, not by the user's own leaving; ``why``: then the key with its file and line."""

    kind = "turn.ended"
    uid: int
    seconds: float
    forced: bool
    why: str | None = None


@dataclass(frozen=True, slots=True)
class UserPaused(Transition):
    """A user's processes are frozen, so that another user can have the GPU. ``clients``: how many."""

    kind = "user.paused"
    uid: int
    clients: int


@dataclass(frozen=True, slots=True)
class UserResumed(Transition):
    """They go on, after ``seconds``."""

    kind = "user.resumed"
    uid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ClientResumed(Transition):
    """A frozen client was resumed by another than mpsagent."""

    kind = "client.resumed"
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class UserMoved(Transition):
    """What a user has waiting waits elsewhere."""

    kind = "user.moved"
    uid: int
    before: str
    instance: str


@dataclass(frozen=True, slots=True)
class GateConnected(Transition):
    kind = "gate.connected"
    pid: int


@dataclass(frozen=True, slots=True)
class GateLost(Transition):
    kind = "gate.lost"


@dataclass(frozen=True, slots=True)
class LimitsUnconfirmed(Transition):
    kind = "limits.unconfirmed"
    uid: int
    why: str


@dataclass(frozen=True, slots=True)
class FrontEndUsed(Transition):
    """A person changed something through the public directory; the next hand-over puts it right. ``refused``: wanted
    to, and the gate did not let the command through."""

    kind = "front_end"
    pid: int
    uid: int
    command: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class LeaseGiven(Transition):
    """A job has a share of its own; ``until`` in seconds since the epoch. ``uid``, ``cgroup``, ``pid``: whose it is;
    ``job``: what the batch system calls it."""

    kind = "lease.given"
    number: int
    by: int
    until: float
    uid: int | None = None
    cgroup: str | None = None
    pid: int | None = None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class LeaseEnded(Transition):
    """``by`` None: its time was over."""

    kind = "lease.ended"
    number: int
    by: int | None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class HandshakeUnknown(Transition):
    kind = "gate.handshake_unknown"
    greeting: str


@dataclass(frozen=True, slots=True)
class LineUnknown(Transition):
    kind = "log.unknown"
    source: str
    text: str


START_AND_EXIT = frozenset(
    one.kind
    for one in (
        ClientWaiting,
        ClientHeld,
        ClientLeft,
        ClientConnected,
        ClientEnded,
        ClientUsed,
        ClientRefused,
        TurnBegan,
        TurnEnded,
        FrontEndUsed,
    )
)
"""Kinds of records that a user causes without a bound, by programs that start and exit. The session of each program and
turn keeps what they say."""


def transition_fields(one: Transition) -> dict[str, object]:
    """Its fields but ``at``, ready for JSON."""
    found: dict[str, object] = {}
    for each in fields(one):
        value = getattr(one, each.name)
        if each.name not in ("at", "lane") and value is not None:
            found[each.name] = value.as_json() if isinstance(value, Limits) else value
    return found
