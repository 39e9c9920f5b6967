"""The other end of the socket: one request, one answer, or a stream of lines.

HTTP/1.0 by hand, because ``http.client`` takes longer to import than the agent to answer. Each answer ends with the
connection, so there is neither chunking nor keeping alive.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFAULT_SOCKET = "/run/mpsagent/mpsagent.sock"
_LONGEST = 64 * 1024 * 1024
_LONGEST_LINE = 1024 * 1024


class Unreachable(Exception):
    """There is no answer on the socket."""


class Refused(Exception):
    """The agent answered with an error. ``status`` is HTTP's; ``error`` has ``detail``, ``where`` and ``hint``."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(error.get("detail", f"status {status}"))
        self.status, self.error = status, error


def request(path: str, method: str, target: str, body: Any = None, timeout: float = 10.0) -> tuple[int, bytes]:
    """One request; its status and body. ``timeout``: seconds for all of it. Raises Unreachable."""
    end = time.monotonic() + timeout
    with _connected(path, timeout) as sock:
        try:
            sock.settimeout(_left(end))
            _send(sock, _head(method, target, body))
            received = bytearray()
            while data := sock.recv(65536):
                received += data
                if len(received) > _LONGEST:
                    raise Unreachable(f"{path}: an answer of more than {_LONGEST} bytes")
                sock.settimeout(_left(end))
        except ConnectionResetError:
            if b"\r\n\r\n" not in received:  # else it is an answer to what was not even sent: a refusal
                raise Unreachable(f"{path}: mpsagent closed the connection; too many of this user's?") from None
        except TimeoutError:
            raise Unreachable(
                f"{path}: no answer within {timeout:g} s; is mpsagent hanging? (journalctl -u mpsagent)"
            ) from None
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror or error}") from None
    head, _, rest = bytes(received).partition(b"\r\n\r\n")
    return _status(path, head), rest


def ask(path: str, method: str, target: str, body: Any = None, timeout: float = 10.0) -> tuple[Any, bytes]:
    """One request; its JSON, and the same as bytes. Raises Unreachable, Refused (503 of /healthz and the like too)."""
    status, raw = request(path, method, target, body, timeout)
    try:
        answer = json.loads(raw)
    except ValueError:
        raise Unreachable(f"{path}: the answer is not JSON; is this mpsagent's socket?") from None
    if status >= 400:
        raise Refused(status, answer if isinstance(answer, dict) else {})
    return answer, raw


def lines(path: str, target: str, silence: float = 60.0) -> Iterator[bytes]:
    """The lines of a stream until it ends. Raises Unreachable also when nothing, not even a heartbeat, comes for
    ``silence`` seconds; Refused."""
    with _connected(path, silence) as sock:
        try:
            _send(sock, _head("GET", target, None))
            rest, status = b"", 0
            while data := sock.recv(65536):
                rest += data
                if not status and b"\r\n\r\n" in rest:
                    head, _, rest = rest.partition(b"\r\n\r\n")
                    status = _status(path, head)
                if 0 < status < 400:
                    *whole, rest = rest.split(b"\n")
                    yield from whole
                if len(rest) > _LONGEST_LINE:
                    raise Unreachable(f"{path}: a line of more than {_LONGEST_LINE} bytes")
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror or error}") from None
    if status >= 400:
        try:
            answer = json.loads(rest)
        except ValueError:
            answer = None
        raise Refused(status, answer if isinstance(answer, dict) else {})


def _connected(path: str, timeout: float) -> socket.socket:
    """By the administrators' socket where there is one for us, which users cannot fill; else by everybody's."""
    end = time.monotonic() + timeout
    beside = _administrators(path)
    if beside is not None:
        try:
            return _connect(beside, timeout)
        except OSError:
            pass  # an older agent's, or it is just being stopped
    try:
        return _connect(path, _left(end))
    except OSError as error:
        why = "it is not running" if isinstance(error, FileNotFoundError | ConnectionRefusedError) else error.strerror
        if isinstance(error, BlockingIOError):
            why = f"it has not accepted a connection for {timeout:g} s"
        raise Unreachable(f"cannot reach mpsagent on {path}: {why or error}") from None


def _left(end: float) -> float:
    """Seconds until ``end``; never none at all, which would mean without blocking or without end."""
    return max(0.001, end - time.monotonic())


def _administrators(path: str) -> str | None:
    """``mpsagent-admin.sock`` beside ``mpsagent.sock``, if we may connect to it and it is the same owner's."""
    public = Path(path)
    try:
        beside = public.with_name(f"{public.stem}-admin{public.suffix}")
        if beside.stat().st_uid == public.stat().st_uid and os.access(beside, os.W_OK, effective_ids=True):
            return str(beside)
    except (OSError, ValueError, NotImplementedError):
        pass  # there is none, no file has that name, or this system cannot ask for effective ids: then by everybody's
    return None


def _connect(path: str, timeout: float) -> socket.socket:
    """Waits for its turn when the socket's backlog is full: without blocking it would be refused at once."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        span = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)
        sock.connect(path)
        sock.settimeout(timeout)
    except OSError:
        sock.close()
        raise
    return sock


def _send(sock: socket.socket, data: bytes) -> None:
    """A refusal may be there before we have asked; then the socket is closed for writing, but it can be read."""
    try:
        sock.sendall(data)
    except BrokenPipeError:
        return


def _head(method: str, target: str, body: Any) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {target} HTTP/1.0\r\nHost: mpsagent\r\nUser-Agent: mpsagent-cli/{os.getpid()}\r\n"
    if data:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def _status(path: str, head: bytes) -> int:
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1][:3].isdigit():
        raise Unreachable(f"{path}: the answer is not HTTP; was mpsagent just stopped?")
    return int(words[1][:3])
