"""The other end of the sockets: the api's, with one request and one answer or a stream of lines, and the agent's.

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
from typing import Any

DEFAULT_SOCKET = "/run/mpsagent/mpsagent.sock"
_LONGEST = 64 * 1024 * 1024
_LONGEST_LINE = 1024 * 1024
_LONGEST_ANSWER = 256 * 1024


class Unreachable(Exception):
    """There is no answer on the socket."""


class RequestRefused(Exception):
    """The agent answered with an error. ``status`` is HTTP's; ``error`` has ``detail``, ``where`` and ``hint``."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(error.get("detail", f"status {status}"))
        self.status, self.error = status, error


def request(path: str, target: str, timeout: float = 10.0) -> tuple[int, bytes]:
    """One request; its status and body. ``timeout``: seconds for all of it. Raises Unreachable."""
    end = time.monotonic() + timeout
    with _connected(path, timeout) as sock:
        try:
            sock.settimeout(_left(end))
            _send(sock, _head(target))
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


def ask(path: str, target: str, timeout: float = 10.0) -> tuple[Any, bytes]:
    """One request; its JSON, and the same as bytes. Raises Unreachable, Refused (503 of /healthz and the like too)."""
    status, raw = request(path, target, timeout)
    try:
        answer = json.loads(raw)
    except ValueError:
        raise Unreachable(f"{path}: the answer is not JSON; is this mpsagent's socket?") from None
    if status >= 400:
        raise RequestRefused(status, answer if isinstance(answer, dict) else {})
    return answer, raw


def lines(path: str, target: str, silence: float = 60.0) -> Iterator[bytes]:
    """The lines of a stream until it ends. Raises Unreachable also when nothing, not even a heartbeat, comes for
    ``silence`` seconds; Refused."""
    with _connected(path, silence) as sock:
        try:
            _send(sock, _head(target))
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
        raise RequestRefused(status, answer if isinstance(answer, dict) else {})


def order(path: str, name: str, body: Any = None, timeout: float = 10.0) -> tuple[Any, bytes]:
    """One order to the agent itself, on its socket beside ``path``; the answer's JSON, and the same as bytes. Raises
    Unreachable, Refused."""
    (stem, suffix), message = os.path.splitext(path), json.dumps({**(body or {}), "order": name}).encode()  # noqa: PTH122 - pathlib takes long to import
    places = [f"{stem}{of}{suffix}" for of in ("-admin", "-orders")]
    sock = None
    for place in places if os.access(places[0], os.W_OK, effective_ids=True) else places[1:]:
        try:
            sock = _connect(place, timeout, socket.SOCK_SEQPACKET)
            break
        except OSError as error:
            failure = _why(error, timeout)
    if sock is None:
        raise Unreachable(f"cannot reach mpsagent on {places[1]}: {failure}")
    with sock:
        try:
            _send(sock, message)
            try:
                received = sock.recv(_LONGEST_ANSWER)
            except ConnectionResetError:  # it was refused unread: that is said next
                received = sock.recv(_LONGEST_ANSWER)
        except TimeoutError:
            raise Unreachable(f"{path}: no answer within {timeout:g} s (journalctl -u mpsagent)") from None
        except OSError as error:
            raise Unreachable(f"{path}: {error.strerror or error}") from None
    try:
        answer = json.loads(received)
        status, found = int(answer["status"]), answer["answer"]
    except (ValueError, KeyError, TypeError):
        raise Unreachable(f"{path}: no answer to the order; was mpsagent just stopped?") from None
    if status >= 400:
        raise RequestRefused(status, found if isinstance(found, dict) else {})
    return found, json.dumps(found).encode()


def _connected(path: str, timeout: float) -> socket.socket:
    try:
        return _connect(path, timeout)
    except OSError as error:
        raise Unreachable(f"cannot reach mpsagent on {path}: {_why(error, timeout)}") from None


def _why(error: OSError, timeout: float) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket (--socket, MPSAGENT_SOCKET), or it is not running"
    if isinstance(error, ConnectionRefusedError):
        return "it is not running"
    if isinstance(error, BlockingIOError):
        return f"it has not accepted a connection for {timeout:g} s"
    return error.strerror or str(error)


def _left(end: float) -> float:
    """Seconds until ``end``; never none at all, which would mean without blocking or without end."""
    return max(0.001, end - time.monotonic())


def _connect(path: str, timeout: float, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Waits for its turn when the socket's backlog is full: without blocking it would be refused at once."""
    sock = socket.socket(socket.AF_UNIX, kind)
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


def _head(target: str) -> bytes:
    agent = f"mpsagent-cli/{os.getpid()}"
    return f"GET {target} HTTP/1.0\r\nHost: mpsagent\r\nUser-Agent: {agent}\r\n\r\n".encode()


def _status(path: str, head: bytes) -> int:
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1][:3].isdigit():
        raise Unreachable(f"{path}: the answer is not HTTP; was mpsagent just stopped?")
    return int(words[1][:3])
