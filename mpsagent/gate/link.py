"""What agent and gate say to each other: one JSON object a packet, encoded and checked here for both ends. Pure.

Times are seconds of CLOCK_MONOTONIC, which nobody sets, sizes bytes, percentages with one decimal. ``instance`` is the
name of the instance that a message is about; empty: the one that the gate was started for. A pidfd may come along with
``Knock`` and ``Known`` (SCM_RIGHTS). A long one is compressed (zlib). A peer that says anything else is broken or
hostile: :class:`LinkError`.
"""

from __future__ import annotations

import json
import re
import types
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from mpsagent.mps.limits import Limits, Total

VERSION = 2
"""Another one for each change of what is said here: a peer passes over what it does not know, and would do half."""
LONGEST_PACKET, LONGEST_CONTENT = 128 * 1024, 1024 * 1024
"""Bytes, as sent and as read. A packet still fits into a socket's default send buffer; a table for 128 users, as many
processes and 16 devices has 150 KB."""
LONGEST_TEXT = 1024
MOST_DEVICES = 64
MOST_USERS = 4096
MOST_INSTANCES = 256
MOST_PROCESSES = 4096


class LinkError(ValueError):
    """A packet that is not one of the messages here."""


# --- gate to agent ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message; every held connection, every known process and ``Synced`` follow."""

    kind: ClassVar[str] = "hello"
    gate: int
    started: float
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Knock:
    """A CUDA connection is held. A pidfd comes along unless the process has gone already. ``instance`` None: the tables
    name its user nowhere, and the agent says where it belongs by naming it in one. ``asked``: the instance in whose own
    directory it came (``placement = "own"``), which alone may serve it; None: each instance may."""

    kind: ClassVar[str] = "knock"
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


@dataclass(frozen=True, slots=True)
class Known:
    """A process that was handed over and lives. ``limits`` None: handed over by an earlier gate that could not say;
    ``connections`` 0: it came through another process (:class:`Found`)."""

    kind: ClassVar[str] = "known"
    pid: int
    uid: int
    gid: int
    start: int
    since: float
    limits: Limits | None = None
    cgroup: str | None = None
    connections: int = 1
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Synced:
    kind: ClassVar[str] = "synced"


@dataclass(frozen=True, slots=True)
class Left:
    """A held connection was closed by its client."""

    kind: ClassVar[str] = "left"
    connection: int


@dataclass(frozen=True, slots=True)
class Handing:
    """A hand-over has begun."""

    kind: ClassVar[str] = "handing"
    connection: int
    pid: int
    uid: int
    at: float
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Passed:
    """The client has the descriptor. ``acknowledged`` False: it has not confirmed in time, or before it hung up, that
    it has met its server, and lives; its connection was used up for it, and it counts until it ends. ``status``: what
    it says of that meeting, 0 for well or a CUDA error; 807 in FAULT (measured on an H100, answer 8)."""

    kind: ClassVar[str] = "passed"
    connection: int
    pid: int
    uid: int
    start: int
    limits: Limits
    seconds: float
    at: float
    fail_safe: bool = False
    acknowledged: bool = True
    status: int = 0
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A hand-over failed at ``stage`` (limits, connect, greeting, answer, acknowledgement). ``lost``: the client has
    gone from us and cannot be served again; otherwise it is held on and tried again. After an unacknowledged ``Passed``
    it says why."""

    kind: ClassVar[str] = "failed"
    connection: int
    pid: int
    uid: int
    why: str
    stage: str
    lost: bool = False
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """MPS does not confirm these limits; the fail-safe limits are taken instead."""

    kind: ClassVar[str] = "unconfirmed"
    uid: int
    wanted: Limits
    why: str
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Applied:
    """The admissions of this number are in force, and no hand-over is under way that they do not allow: an agent that
    sees it has seen every ``Passed`` of the users whom they shut out."""

    kind: ClassVar[str] = "applied"
    number: int
    instance: str = ""


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """A front-end's command that changes something. ``refused``: the gate has not passed it on."""

    kind: ClassVar[str] = "front_end"
    pid: int
    uid: int
    command: str
    at: float
    refused: bool = False
    instance: str = ""


@dataclass(frozen=True, slots=True)
class HandshakeSeen:
    """How the daemon greets (hex). ``known`` False: every connection is relayed untouched. ``daemon``: its pid."""

    kind: ClassVar[str] = "handshake"
    known: bool
    greeting: str
    daemon: int | None = None
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """The gate closed a connection itself, because of a bound or of what the peer sent."""

    kind: ClassVar[str] = "refused"
    connection: int
    pid: int
    uid: int
    why: str


FromGate = (
    Hello | Knock | Known | Synced | Left | Handing | Passed | Failed | Unconfirmed | Applied | FrontEnd | HandshakeSeen
    | Refused
)  # fmt: skip

# --- agent to gate ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class User:
    """``admit``: ``all``, or ``known``: only processes that have passed already. ``max_clients``: processes at a
    time; ``max_contexts``: their contexts on a device, one for a process that has none yet; ``total``: what they may
    use together. All are counted in one instance. ``named``: new processes pass only
    when they are named, with limits of their own."""

    uid: int
    admit: str
    limits: Limits
    max_clients: int | None = None
    total: Total | None = None
    named: bool = False
    max_contexts: int | None = None


@dataclass(frozen=True, slots=True)
class Named:
    """A held process and its limits."""

    pid: int
    start: int
    limits: Limits


@dataclass(frozen=True, slots=True)
class Admissions:
    """Who may pass in an instance, with what. Always the whole; a user who is not named is held, unless ``others`` says
    otherwise. Who is named waits in that instance from then on, wherever it waited before.

    ``open`` False: hold everybody. ``room``: contexts that its server takes on a device. ``set_limits`` False: the
    daemon's limits are not touched. ``devices``: ordinals whose memory limits are set, or taken away where a user has
    none. ``parallel`` is reserved.
    """

    kind: ClassVar[str] = "admissions"
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

    def user(self, uid: int) -> User | None:
        return self.users.get(uid, self.others)


@dataclass(frozen=True, slots=True)
class Refuse:
    """Close this held connection; its client gets CUDA_ERROR_MPS_CONNECTION_FAILED (recording 08, G7)."""

    kind: ClassVar[str] = "refuse"
    connection: int
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """The process has left its server: it is not known any more, and its next connection is a new knock."""

    kind: ClassVar[str] = "release"
    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Found:
    """MPS has this process as a client of the instance, though it never came to the gate: it came through another one.
    From now on it is known, counts for its user, and is told of as :class:`Known`."""

    kind: ClassVar[str] = "found"
    pid: int
    uid: int
    start: int
    limits: Limits
    instance: str = ""


@dataclass(frozen=True, slots=True)
class Instances:
    """The instances that there are: the gate forgets all others, once no process is known there. ``own``: those that
    have a public directory of their own; all others but the first one have none then."""

    kind: ClassVar[str] = "instances"
    names: tuple[str, ...]
    own: tuple[str, ...] = ()


FromAgent = Admissions | Refuse | Release | Found | Instances
Message = FromGate | FromAgent

# --- codec -----------------------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """One packet. Texts are cut to ``LONGEST_TEXT``. Raises LinkError when the packet would be too long."""
    content: dict[str, Any] = {"kind": message.kind}
    for one in fields(message):
        content[one.name] = _plain(getattr(message, one.name))
    data = json.dumps(content, separators=(",", ":")).encode()
    packet = data if len(data) <= LONGEST_PACKET else zlib.compress(data, 1)
    if len(packet) > LONGEST_PACKET or len(data) > LONGEST_CONTENT:
        raise LinkError(f'a message "{message.kind}" of {len(data)} bytes is longer than may be')
    return packet


def _plain(value: Any) -> Any:
    if isinstance(value, Limits):
        return value.as_json()
    if isinstance(value, Total):
        return {"threads": value.threads, "memory": {str(device): size for device, size in value.memory.items()}}
    if isinstance(value, User | Named):
        said = ((one.name, getattr(value, one.name)) for one in fields(value))
        return {name: _plain(one) for name, one in said if one is not None and one is not False}
    if isinstance(value, Mapping):
        return [_plain(one) for one in value.values()]
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    return value


def decode_from_gate(data: bytes) -> FromGate:
    """Raises LinkError."""
    message: FromGate = _decode(data, _FROM_GATE)
    return message


def decode_from_agent(data: bytes) -> FromAgent:
    """Raises LinkError."""
    message: FromAgent = _decode(data, _FROM_AGENT)
    return message


def _decode(data: bytes, kinds: Mapping[str, Callable[[Any, str], Any]]) -> Any:
    if len(data) > LONGEST_PACKET:
        raise LinkError(f"a packet of more than {LONGEST_PACKET} bytes")
    try:
        content = json.loads(_whole(data))
    except (ValueError, RecursionError) as error:
        raise LinkError(f"not JSON: {error}") from None
    if not isinstance(content, dict):
        raise LinkError("not a JSON object")
    kind = content.get("kind")
    read = kinds.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise LinkError(f'unknown kind "{str(kind)[:40]}"')
    message = read(content, str(kind))
    for instance in (getattr(message, "instance", ""), getattr(message, "asked", "")):
        if instance and not instance_name(instance):
            raise LinkError(f'"{instance[:40]}" is no name of an instance')
    return message


def _whole(packet: bytes) -> bytes:
    if not packet.startswith(b"x"):
        return packet
    unpacked = zlib.decompressobj()
    try:
        data = unpacked.decompress(packet, LONGEST_CONTENT)
    except zlib.error as error:
        raise LinkError(f"not JSON, nor compressed: {error}") from None
    if not unpacked.eof or unpacked.unused_data:
        raise LinkError(f"a message of more than {LONGEST_CONTENT} bytes")
    return data


def instance_name(text: Any) -> bool:
    """Whether this may be the name of an instance, which is the name of a directory too."""
    return isinstance(text, str) and re.fullmatch(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,64}", text) is not None


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise LinkError(f'"{name}" is not a whole number that makes sense')
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise LinkError(f'"{name}" is not a number')
    return float(value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise LinkError(f'"{name}" is not a text of at most {LONGEST_TEXT} characters')
    return value


def _truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise LinkError(f'"{name}" is neither true nor false')
    return value


def _memory(value: Any, name: str) -> dict[int, int]:
    if not isinstance(value, dict) or len(value) > MOST_DEVICES:
        raise LinkError(f'"{name}" is no table of at most {MOST_DEVICES} devices')
    for device in value:
        if not (device.isascii() and device.isdecimal() and len(device) <= 4):
            raise LinkError(f'"{name}" names a device "{device[:20]}"')
    return {int(device): _integer(size, name) for device, size in value.items()}


def _list(value: Any, name: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise LinkError(f'"{name}" is not a list of at most {most}')
    return value


def _limits(value: Any, name: str) -> Limits:
    limits: Limits = _READ_LIMITS(value, name)
    if "threads" not in value or not 0 < limits.threads <= 100:
        raise LinkError(f'"{name}" does not say a percentage of the threads')
    return limits


def _user(value: Any, name: str) -> User:
    user: User = _READ_USER(value, name)
    if user.admit not in ("all", "known"):
        raise LinkError(f'"{name}" has an entry that does not say whom it admits')
    return user


def _names(value: Any, name: str) -> tuple[str, ...]:
    if not all(map(instance_name, _list(value, name, MOST_INSTANCES))):
        raise LinkError(f'"{name}" has what is no name of an instance')
    return tuple(value)


def _object(cls: Any) -> Callable[[Any, str], Any]:
    """How one is read: each field by its type; a missing one has its default. Unknown keys are passed over, so that a
    newer peer may say more."""
    hints = typing.get_type_hints(cls)
    readers: list[tuple[str, Callable[[Any, str], Any], bool]] = []
    for one in fields(cls):
        hint = hints[one.name]
        optional = isinstance(hint, types.UnionType)
        if optional:
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        readers.append((one.name, _READERS[hint], optional))

    def read(content: Any, whole: str) -> Any:
        if not isinstance(content, dict):
            raise LinkError(f'"{whole}" is not an object')
        values = {}
        for name, reader, optional in readers:
            if name in content:
                value = content[name]
                values[name] = None if optional and value is None else reader(value, name)
        try:
            return cls(**values)
        except TypeError as error:
            raise LinkError(f'"{whole}" is not complete: {error}') from None

    return read


_READERS: dict[Any, Callable[[Any, str], Any]] = {
    int: _integer,
    float: _number,
    str: _text,
    bool: _truth,
    Mapping[int, int]: _memory,
    tuple[int, ...]: lambda value, name: tuple(_integer(one, name) for one in _list(value, name, MOST_DEVICES)),
    tuple[str, ...]: _names,
    Limits: _limits,
    User: _user,
    Mapping[int, User]: lambda value, name: {
        one.uid: one for one in (_user(each, name) for each in _list(value, name, MOST_USERS))
    },
    Mapping[tuple[int, int], Named]: lambda value, name: {
        (one.pid, one.start): one for one in (_READ_NAMED(each, name) for each in _list(value, name, MOST_PROCESSES))
    },
}
_READ_LIMITS = _object(Limits)
_READERS[Total] = _object(Total)
_READ_USER = _object(User)
_READ_NAMED: Callable[[Any, str], Any] = _object(Named)
_FROM_GATE = {cls.kind: _object(cls) for cls in typing.get_args(FromGate)}
_FROM_AGENT = {cls.kind: _object(cls) for cls in typing.get_args(FromAgent)}
