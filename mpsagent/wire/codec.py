"""Messages as packets: one JSON object each, whose fields are those that the class declares. Pure.

What a peer sends is hostile until it has been read here: every size, count and type is checked, and an error names the
field. A long packet is compressed (zlib).
"""

from __future__ import annotations

import functools
import json
import re
import types
import typing
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from mpsagent.mps.limits import Limits, Total
from mpsagent.wire.value import OfKind

LONGEST_PACKET, LONGEST_CONTENT = 128 * 1024, 1024 * 1024
"""Bytes, as sent and as read. A packet still fits into a socket's default send buffer; a table for 128 users, as many
processes and 16 devices has 150 KB."""
LONGEST_TEXT = 1024
MOST_DEVICES = 64
MOST_INSTANCES = 256
MOST_ENTRIES = 4096
"""Users, or processes, in a table."""

M = typing.TypeVar("M", bound=OfKind)
Read = Callable[[Any, str], Any]
"""Takes a value of a field of this name. Raises LinkError."""


class LinkError(ValueError):
    """A packet that is not one of the messages that are expected."""


def encode(message: OfKind) -> bytes:
    """One packet. Texts are cut to ``LONGEST_TEXT``. Raises LinkError when the packet would be too long."""
    content = {"kind": message.kind, **{name: _plain(value) for name, value in vars(message).items()}}
    data = json.dumps(content, separators=(",", ":")).encode()
    packet = data if len(data) <= LONGEST_PACKET else zlib.compress(data, 1)
    if len(packet) > LONGEST_PACKET or len(data) > LONGEST_CONTENT:
        raise LinkError(f'a message "{message.kind}" of {len(data)} bytes is longer than may be')
    return packet


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if value is None or isinstance(value, (int, float, tuple)):  # most values of a table for 128 users
        return value
    if isinstance(value, (Limits, Total)):
        return value.as_json()
    if isinstance(value, dict):
        return [_plain(one) for one in value.values()]
    return {name: _plain(one) for name, one in vars(value).items() if one is not None and one is not False}


def decoder(base: type[M]) -> Callable[[bytes], M]:
    """Return a function that reads a packet with a message of a subclass of this one, and raises LinkError."""
    kinds: dict[str, Callable[[Any, str], M]] = {cls.kind: _object(cls) for cls in base.__subclasses__()}

    def decode(packet: bytes) -> M:
        if len(packet) > LONGEST_PACKET:
            raise LinkError(f"a packet of more than {LONGEST_PACKET} bytes")
        try:
            content = json.loads(_whole(packet))
        except (ValueError, RecursionError) as error:
            raise LinkError(f"not JSON: {error}") from None
        if not isinstance(content, dict):
            raise LinkError("not a JSON object")
        kind = content.get("kind")
        read = kinds.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise LinkError(f'unknown kind "{str(kind)[:40]}"')
        return read(content, str(kind))

    return decode


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


# --- a value of each type ---------------------------------------------------------------------------------------------


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
    if name in ("instance", "asked") and value and not instance_name(value):
        raise LinkError(f'"{name}" is "{value[:40]}", which is no name of an instance')
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


def _names(value: Any, name: str) -> tuple[str, ...]:
    if not all(map(instance_name, _list(value, name, MOST_INSTANCES))):
        raise LinkError(f'"{name}" has what is no name of an instance')
    return tuple(value)


def _limits(value: Any, name: str) -> Limits:
    limits: Limits = _READ_LIMITS(value, name)
    if "threads" not in value or not 0 < limits.threads <= 100:
        raise LinkError(f'"{name}" does not say a percentage of the threads')
    return limits


def _reader(hint: Any) -> Read:
    if (read := _READERS.get(hint)) is not None:
        return read
    if is_dataclass(hint):
        return _object(hint)
    if typing.get_origin(hint) is typing.Literal:
        return functools.partial(_one_of, words=typing.get_args(hint))
    return functools.partial(_table, row=_object(typing.get_args(hint)[1]))


def _one_of(value: Any, name: str, words: tuple[str, ...]) -> str:
    if value not in words:
        raise LinkError(f'"{name}" is none of {", ".join(words)}')
    return str(value)


def _table(value: Any, name: str, row: Read) -> dict[Any, Any]:
    return {one.key: one for one in (row(each, name) for each in _list(value, name, MOST_ENTRIES))}


def _object(cls: Any) -> Read:
    """Each field by its type; a missing one has its default. Unknown keys are passed over, so that a newer peer may say
    more."""
    hints = typing.get_type_hints(cls)
    readers: list[tuple[str, Read, bool]] = []
    for one in fields(cls):
        hint = hints[one.name]
        optional = isinstance(hint, types.UnionType)
        if optional:
            hint = next(part for part in typing.get_args(hint) if part is not type(None))
        readers.append((one.name, _reader(hint), optional))

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


_READERS: dict[Any, Read] = {
    int: _integer,
    float: _number,
    str: _text,
    bool: _truth,
    Mapping[int, int]: _memory,
    tuple[int, ...]: lambda value, name: tuple(_integer(one, name) for one in _list(value, name, MOST_DEVICES)),
    tuple[str, ...]: _names,
    Limits: _limits,
}
_READ_LIMITS = _object(Limits)
