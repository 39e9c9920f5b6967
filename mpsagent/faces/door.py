"""Who may connect, and for how long a connection may do nothing useful.

A :class:`Door` stands before aiohttp's own protocol on each connection of the socket. It knows the peer from the
kernel, counts connections, bounds the header in size and time, and drops a peer that does not read what it asked for.
No peer is ever waited for: each of these is a timer and an abort.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpsagent.faces.backend import Problem

_LINGERING = 32
"""Refused connections at a time that are left open until their peers have read why."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one peer may use. Sizes in bytes, spans in seconds. ``connections_root`` are kept beside the others, so
    that users cannot lock out the person on call."""

    connections: int = 64
    connections_per_uid: int = 16
    connections_root: int = 16
    header_size: int = 16 * 1024
    body_size: int = 64 * 1024
    header_time: float = 5.0
    body_time: float = 5.0
    idle_time: float = 15.0
    write_time: float = 10.0
    write_buffer: int = 256 * 1024
    heartbeat: float = 15.0


class Peer(NamedTuple):
    """The process at the other end, as the kernel says (SO_PEERCRED: at the time it connected)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: Any) -> Peer:
    """Raises OSError."""
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))


class Porter:
    """The connections of one socket: makes a Door for each and counts them by uid."""

    def __init__(self, bounds: Bounds, inner: Callable[[], asyncio.Protocol]) -> None:
        self.bounds = bounds
        self.inner = inner
        self.by_uid: Counter[int] = Counter()
        self.turned_away = 0
        self.dropped = 0
        self.lingering = 0

    def __call__(self) -> Door:
        return Door(self)

    def admit(self, uid: int) -> Problem | None:
        """Count one more connection of ``uid``, or say why not."""
        bounds, mine = self.bounds, self.by_uid[uid]
        others = sum(count for one, count in self.by_uid.items() if one != 0)
        full = mine >= bounds.connections_root if uid == 0 else others >= bounds.connections
        if full or (uid != 0 and mine >= bounds.connections_per_uid):
            self.turned_away += 1
            return Problem(
                503 if full else 429,
                "too many connections to mpsagent",
                f"uid {uid} has {mine}, all users {others}",
                "close some; one `events -f` per user is enough",
            )
        self.by_uid[uid] += 1
        return None

    def leave(self, uid: int) -> None:
        self.by_uid[uid] -= 1
        if self.by_uid[uid] <= 0:
            del self.by_uid[uid]


class Door(asyncio.Protocol):
    """One connection. Passes everything on to aiohttp's protocol once the peer is let in."""

    def __init__(self, porter: Porter) -> None:
        self._porter = porter
        self._bounds = porter.bounds
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._in_header, self._header, self._tail = True, 0, b""
        self._refused = self._lingers = False
        self.peer: Peer | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- called by the API

    def request_begins(self) -> None:
        """The header is complete: aiohttp has made a request of it."""
        self._timed(None)

    def request_ends(self) -> None:
        """The answer is written or buffered; the peer has a while to read it and to ask again."""
        self._in_header, self._header, self._tail = True, 0, b""
        self._timed(self._bounds.idle_time)

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=self._bounds.write_buffer)
        try:
            peer = peer_of(transport.get_extra_info("socket"))
        except OSError:
            transport.abort()
            return
        refused = self._porter.admit(peer.uid)
        if refused is not None:
            self._refuse(refused)
            return
        self.peer = peer
        self._timed(self._bounds.header_time)
        self._inner = self._porter.inner()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None or self._refused:
            return
        if self._in_header and not self._header_fits(data):
            self._refuse(
                Problem(431, "the request's header is too long", hint=f"at most {self._bounds.header_size} bytes")
            )
            return
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._inner is None or self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        """The peer has let ``write_buffer`` bytes pile up: from now on it has ``write_time`` to read most of them."""
        self._stall = asyncio.get_running_loop().call_later(self._bounds.write_time, self._drop)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timed(None)
        if self._stall is not None:
            self._stall.cancel()
        if self.peer is not None:
            self._porter.leave(self.peer.uid)
        if self._lingers:
            self._porter.lingering -= 1
        if not self.lost.done():
            self.lost.set_result(None)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    # --- inside

    def _header_fits(self, data: bytes) -> bool:
        text = self._tail + data
        end = text.find(b"\r\n\r\n")
        self._in_header = end < 0
        self._header += len(data) if end < 0 else max(0, end - len(self._tail))
        self._tail = text[-3:]
        return self._header <= self._bounds.header_size

    def _timed(self, span: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = None if span is None else loop.call_later(span, self._drop)

    def _drop(self) -> None:
        self._porter.dropped += 1
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, problem: Problem) -> None:
        """Answer without aiohttp and close. The peer is left a moment to read it: to close on what it is still sending
        would reset the connection under it. That moment is for a few at a time; more are closed at once."""
        body = json.dumps(problem.body()).encode()
        head = (
            f"HTTP/1.1 {problem.status} Refused\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._refused = True
        if self._transport is None:
            return
        self._transport.write(head.encode() + body)
        self._timed(self._bounds.header_time)
        if self._porter.lingering < _LINGERING:
            self._porter.lingering += 1
            self._lingers = True
            self._transport.write_eof()
        else:
            self._transport.close()
