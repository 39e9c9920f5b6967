"""Events as typed values, each declared once: its kind, its fields and its sentence.

The reducer and the rules return them. The history, the journal, the metrics and the replay are made from them alone.
A sentence is made from a record, which may come from another version, so it expects no optional field.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import ClassVar

from mpsagent.core.words import Described, Words
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import limits_words
from mpsagent.policy import apart
from mpsagent.wire.value import OfKind


class Transition(OfKind, Described):
    """``daemon``: the user whose own control daemon it is about, None: that of all. ``frequent``: each start and exit
    of a program causes one."""

    frequent: ClassVar[bool]
    at: float
    daemon: int | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, kind: str = "", frequent: bool = False) -> None:
        super().__init_subclass__(kind)
        cls.frequent = frequent


class ControlStarted(Transition, kind="control.started"):
    template = "control daemon {pid} runs"
    pid: int


class ControlEnded(Transition, kind="control.ended"):
    template = "control daemon {pid} has ended"
    pid: int


class ControlQuitting(Transition, kind="control.quitting"):
    """The control daemon accepted a ``quit``. ``timeout`` in seconds, None: it waits for the clients."""

    timeout: int | None

    @classmethod
    def sentence(cls, words: Words) -> str:
        until = "when its last client has gone" if words.get("timeout") is None else words("within {timeout} s")
        return f"the control daemon has accepted a quit and ends {until}"


class ServerStarting(Transition, kind="server.starting"):
    template = "server {pid}{uid:of} is starting"
    pid: int
    uid: int


class ServerReady(Transition, kind="server.ready"):
    template = "server {pid}{uid:of} is ready"
    pid: int
    uid: int | None


class ServerEnded(Transition, kind="server.ended"):
    pid: int
    uid: int | None
    status: int | None

    @classmethod
    def sentence(cls, words: Words) -> str:
        return words("server {pid}{uid:of} has ended") + (words(" with status {status}") if words.get("status") else "")


class ServerStartFailed(Transition, kind="server.start_failed"):
    """``count``: failed starts in a row."""

    pid: int
    reason: str
    count: int

    @classmethod
    def sentence(cls, words: Words) -> str:
        count = "" if words["count"] == 1 else words(" ({count} in a row)")
        return words("server {pid} did not start") + f"{count}: {words('{reason:text}') or 'MPS gives no reason'}"


class ServerFull(Transition, kind="server.full"):
    template = "server {server} is full ({limit} clients)"
    server: int
    limit: int


class ClientWaiting(Transition, kind="client.waiting", frequent=True):
    """A process came to the gate and is held."""

    template = "process {pid}{uid:of} waits at the gate"
    pid: int
    uid: int
    connection: int


class ClientHeld(Transition, kind="client.held", frequent=True):
    """A process came to the gate and is held until it exits, because MPS cannot serve it."""

    template = "process {pid}{uid:of} is held until it exits: {why:text}"
    pid: int
    uid: int
    why: str


class ClientLeft(Transition, kind="client.left", frequent=True):
    """A process left while it was held. ``waited`` in seconds. ``lost``: a new gate has started without it."""

    template = (
        "process {pid}{uid:of} {lost:lost its place|left the queue} after {waited:span}"
        "{lost:: the gate was stopped, or the process left|}"  # systemd before 254 refuses clients of a stopped gate
    )
    pid: int
    uid: int
    waited: float
    job: str | None = None
    lost: bool = False


class ClientConnected(Transition, kind="client.connected", frequent=True):
    """A process was handed over to MPS for the first time.

    ``limits``: None if they are not known. ``handover``: duration in seconds, None if the gate has not reported its
    begin. ``lease``, ``job``: number and name of its lease. ``unseen``: it was not handed over and is a client of MPS:
    it came through another process, or started before the gate.
    """

    pid: int
    uid: int
    waited: float
    limits: Limits | None
    fail_safe: bool
    handover: float | None = None
    lease: int | None = None
    job: str | None = None
    unseen: bool | None = None

    @classmethod
    def sentence(cls, words: Words) -> str:
        limits = limits_words(words.get("limits")).replace(" %", " % of threads", 1)
        given = "its limits are not known" if words.get("limits") is None else f"limits: {limits}"
        waited = words(" after {waited:span}") if words["waited"] >= 0.005 else ""
        if words.get("unseen"):
            through = "it did not pass the gate: it came through another process, or started before the gate"
            return words("process {pid}{uid:of} is at work") + f", {given}; {through}"
        strict = " (fallback limits)" if words.get("fail_safe") else ""
        return words("process {pid}{uid:of} was admitted") + f"{waited}, {given}{strict}"


class ClientEnded(Transition, kind="client.ended", frequent=True):
    """A client's process has ended.

    ``outcome``: see :class:`mpsagent.core.model.Outcome`. ``lease``, ``job``: number and name of its lease.
    """

    pid: int
    uid: int
    server: int | None
    outcome: str
    seconds: float
    waited: float
    lease: int | None = None
    job: str | None = None

    @classmethod
    def sentence(cls, words: Words) -> str:
        how = {
            "faulted": ", with a sticky error",
            "ended": ", terminated by mpsagent",
            "lost": ": its server exited first",
        }.get(str(words.get("outcome")), "")
        return words("client {pid}{uid:of} ended after {seconds:span}") + how


class ClientUsed(Transition, kind="client.used", frequent=True):
    """A client's use of the GPU since the previous record of it: ``busy`` of ``seconds``, ``energy`` in joules.

    ``shared``: the use of all clients at work there. ``over``: the client has ended.
    """

    pid: int
    uid: int
    seconds: float
    busy: float
    energy: float
    shared: bool
    over: bool
    job: str | None = None

    @classmethod
    def sentence(cls, words: Words) -> str:
        busy = f" {words['busy'] / words['seconds']:.0%}{words(' of {seconds:span}')}" if words["seconds"] else ""
        whose = " (all clients of that server)" if words["shared"] and busy else ""
        told = words("client {pid}{uid:of}[ of job {job}] used the GPU")
        return f"{told}{busy}{whose}, {words['energy'] / 1000:.3g} kJ"


class ClientRefused(Transition, kind="client.refused", frequent=True):
    template = "process {pid}{uid:of} was refused: {why:text}"
    pid: int
    uid: int
    why: str
    job: str | None = None


class HandoverFailed(Transition, kind="client.handover_failed"):
    template = (
        "process {pid}{uid:of} was not handed over ({stage}: {why}); "
        "{lost:it can no longer be served|it waits and is tried again}"
    )
    pid: int
    uid: int
    stage: str
    why: str
    lost: bool


class FaultBegan(Transition, kind="server.fault"):
    template = (
        "server {server}{uid:of} is in FAULT and takes no new clients: mpsagent recovers it, and waiting users keep "
        "their places"
    )
    server: int
    uid: int | None


class FaultClient(Transition, kind="client.sticky"):
    """A client that is listed with a sticky error. All listed are alike (recording 03, Q3). ``uid`` None: not known."""

    template = "client {pid}{uid:of}, on server {server}, lost its CUDA context in a fault and has to exit"
    server: int
    pid: int
    uid: int | None = None


class FaultOver(Transition, kind="server.fault_over"):
    """``recovered`` False: the server ended."""

    template = (
        "server {server} {recovered:recovered from its fault after|ended} {seconds:span}{recovered:| after its fault}"
    )
    server: int
    seconds: float
    recovered: bool


class TurnBegan(Transition, kind="turn.began", frequent=True):
    """A user has got the GPU. ``gap``: seconds since the end of the turn before, None for the first turn."""

    template = "the GPU goes to {uid:user}[, {gap:span} after the user before]"
    uid: int
    gap: float | None


class TurnEnded(Transition, kind="turn.ended", frequent=True):
    """``forced``: ended by the policy, ``why`` is the key with its file and line. Otherwise the user has left."""

    template = "the turn of {uid:user} {forced:expired|ended} after {seconds:span}[ ({why})]"
    uid: int
    seconds: float
    forced: bool
    why: str | None = None


class UserPaused(Transition, kind="user.paused"):
    """A user's processes are frozen, so that another user can have the GPU. ``clients``: their number."""

    uid: int
    clients: int

    @classmethod
    def sentence(cls, words: Words) -> str:
        if words["clients"] == 1:
            what = "its process is frozen and keeps its memory"
        else:
            what = words("its {clients} processes are frozen and keep their memory")
        return words("{uid:user} is paused: ") + f"{what} until its next turn"


class UserResumed(Transition, kind="user.resumed"):
    """A user's processes continue, after ``seconds``."""

    template = "{uid:user} continues after a pause of {seconds:span}"
    uid: int
    seconds: float


class ClientResumed(Transition, kind="client.resumed"):
    """A frozen client was resumed by a process other than mpsagent."""

    template = "client {pid}{uid:of} was resumed by another while it is paused; it is frozen again"
    pid: int
    uid: int


class UserMoved(Transition, kind="user.moved"):
    """A user's waiting processes wait at another instance."""

    uid: int
    before: str
    instance: str

    @classmethod
    def sentence(cls, words: Words) -> str:
        before, to = str(words["before"]), str(words["instance"])
        if apart.users(before, [to]):
            return words("{uid:user} waits for a control daemon of the user's own, {instance}")
        if apart.users(to, [before]):
            return words("{uid:user} waits at instance {instance}: control daemon {before} has ended")
        return words("{uid:user} waits at instance {instance}, which is idle, no longer at {before}")


class GateConnected(Transition, kind="gate.connected"):
    template = "the gate (process {pid}) is connected"
    pid: int


class GateLost(Transition, kind="gate.lost"):
    template = "the connection to the gate is lost: the gate keeps its last admission list"


class LimitsUnconfirmed(Transition, kind="limits.unconfirmed"):
    template = "MPS did not confirm the limits of {uid:user}: {why}"
    uid: int
    why: str


class FrontEndUsed(Transition, kind="front_end", frequent=True):
    """A user sent a command through the public directory. The next hand-over sets the limits again. ``refused``: the
    gate did not pass the command on."""

    template = "{uid:user} (process {pid}) {refused:was not allowed to tell|told} the control daemon: {command}"
    pid: int
    uid: int
    command: str
    refused: bool = False


class LeaseGiven(Transition, kind="lease.given"):
    """A job has its own share. ``until`` in seconds since the epoch. ``uid``, ``cgroup``, ``pid``: the processes that
    have the share. ``job``: its name in the batch system."""

    number: int
    by: int
    until: float
    uid: int | None = None
    cgroup: str | None = None
    pid: int | None = None
    job: str | None = None

    @classmethod
    def sentence(cls, words: Words) -> str:
        job = "a job" if words.get("job") is None else words("job {job}")
        return words("{by:user} gave ") + job + words(" a share of its own (lease {number})")


class LeaseEnded(Transition, kind="lease.ended"):
    """``by`` None: the lease has expired."""

    number: int
    by: int | None
    job: str | None = None

    @classmethod
    def sentence(cls, words: Words) -> str:
        if words.get("by") is None:
            return words("lease {number}[ of job {job}] is over")
        return words("{by:user} ended lease {number}[ of job {job}]")


class HandshakeUnknown(Transition, kind="gate.handshake_unknown"):
    template = "the control daemon's greeting is not known ({greeting}): clients are passed on unchanged"
    greeting: str


class LineUnknown(Transition, kind="log.unknown"):
    template = "mpsagent does not know a line of {source}.log: {text}"
    source: str
    text: str


START_AND_EXIT = frozenset(one.kind for one in Transition.__subclasses__() if one.frequent)
"""Kinds of records that a user causes without a bound, by programs that start and exit. The session of each program and
turn keeps what they say."""


def transition_fields(one: Transition) -> dict[str, object]:
    """Return the event's own fields, ready for JSON."""
    found: dict[str, object] = {}
    for each in fields(one):
        value = getattr(one, each.name)
        if each.name not in ("at", "daemon") and value is not None:
            found[each.name] = value.as_json() if isinstance(value, Limits) else value
    return found
