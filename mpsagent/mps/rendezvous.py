"""The messages at the control socket: what the daemon, a CUDA client and a front-end say to each other there.

The same bytes in drivers 470 to 580 (recording 08, G1 to G4; watched again with NVIDIA's programs of 470, 535 and 550).
One packet is one message. Nothing here sends anything.

    daemon: HELLO                                   (a probe of a client closes here)
    peer:   CREDENTIALS with SCM_CREDENTIALS, then four bytes that say what it is (Kind)
    client: daemon: DESCRIPTOR with the way to the server; client: four bytes, the acknowledgement
    front-end: for each command its length and its text; daemon: answers; eight zero bytes; daemon: exit status
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

CONTROL, PRIVILEGED = "control", "control_privileged"
"""The control daemon's sockets in its pipe directory."""
HELLO = b"OUTBHELL\0"
CREDENTIALS = b"OUTBCRED\0"
DESCRIPTOR = b"OUTBCUFD\0"
ACKNOWLEDGED = bytes(4)
"""What a client sends when it has met its server. Another word is the CUDA error that it has met instead."""
LONGEST_MESSAGE = 4 + 4096
"""No message at this socket is longer: a front-end reads answers into four and 4,096 bytes."""
LONGEST_COMMAND = 1024
"""A text of more than 4,096 bytes kills the daemon (SIGSEGV, drivers 470 to 550, any user may send it)."""
END = bytes(8)
"""A front-end has no more commands."""

_LENGTH = struct.Struct("<Q")
_WORD = struct.Struct("<I")
TOO_MANY = _WORD.pack(808)
"""A server's last word of the handshake with a client: CUDA_ERROR_MPS_MAX_CLIENTS_REACHED."""


class Kind(IntEnum):
    """What a peer says that it is. The daemon never closes one that says anything else (it leaks a descriptor there),
    so nothing else may be passed on to it."""

    UNKNOWN = 0
    """Any other message; no known driver sends one."""
    SERVER = 1
    CLIENT = 2
    DEBUGGER = 3
    FRONT_END = 4


SERVER_NOT_READY = 807


def acknowledgement_status(message: bytes) -> int:
    """0 when the client was served, else the CUDA error that it has met (807 in FAULT: ``27 03 00 00``, seen on an
    H100). Anything that is no such word counts as served: it is the client's own affair."""
    return int(_WORD.unpack(message)[0]) if len(message) == _WORD.size else 0


def kind_bytes(kind: Kind) -> bytes:
    return _WORD.pack(kind)


def kind_of(message: bytes) -> Kind | None:
    """The kind that a peer's four bytes say; None for anything else."""
    if len(message) != _WORD.size:
        return None
    try:
        return Kind(_WORD.unpack(message)[0])
    except ValueError:
        return None


# --- front-end: the side that asks -----------------------------------------------------------------------------------


def command_messages(text: str) -> tuple[bytes, bytes]:
    """The two messages of one command. Raises ValueError for a text that must not be sent: longer than
    ``LONGEST_COMMAND``, or with control characters (a line break would write lines of its own into control.log)."""
    clean = clean_command(text.encode())
    if clean is None or clean != text:
        raise ValueError(f"{text[:80]!r} is not one command for the control daemon")
    data = text.encode() + b"\n\0"
    return _LENGTH.pack(len(data)), data


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of text, or several; a command has none, one or more of these, and no mark at the end."""

    text: str


@dataclass(frozen=True, slots=True)
class Exit:
    """The session is over; ``status`` is what the front-end ends with."""

    status: int


def decode_answer(message: bytes) -> Answer | Exit | None:
    """What the daemon said in a session; None for what a front-end ignores too."""
    if len(message) < _WORD.size:
        return None
    (what,) = _WORD.unpack_from(message)
    rest = message[_WORD.size :]
    if what == 0:
        return Answer(rest.partition(b"\0")[0].decode("utf-8", "replace"))
    if what == 1:
        return Exit(_WORD.unpack_from(rest)[0] if len(rest) >= _WORD.size else 0)
    return None


# --- front-end: the side that answers --------------------------------------------------------------------------------


def answer_message(text: str) -> bytes:
    """One answer, cut to what a front-end can read."""
    return _WORD.pack(0) + text.encode()[: LONGEST_MESSAGE - _WORD.size]


def exit_message(status: int) -> bytes:
    return _WORD.pack(1) + _WORD.pack(status)


def length_of(message: bytes) -> int | None:
    """The length that a front-end announces; 0 is its end; None when the message is not one."""
    return int(_LENGTH.unpack(message)[0]) if len(message) == _LENGTH.size else None


def clean_command(data: bytes) -> str | None:
    """The command in a front-end's text: its first line without its end; None when it must not reach the daemon."""
    if len(data) > LONGEST_COMMAND + 2:
        return None
    line = data.partition(b"\0")[0].partition(b"\n")[0].rstrip(b"\r")
    try:
        text = line.decode("ascii")
    except UnicodeDecodeError:
        return None
    return (
        text
        if len(text) <= LONGEST_COMMAND and all(" " <= letter <= "~" or letter == "\t" for letter in text)
        else None
    )
