"""Who may connect, and for how long a connection may do nothing useful.

A :class:`Door` stands before aiohttp's own protocol on each connection of the socket. It knows the peer from the
kernel, counts connections, bounds header and body, and drops a peer that does not read what it asked for. No peer is
ever waited for: each of these is a timer and an abort.

The door also sees to it that aiohttp has one request of a connection at a time, and that one user's requests come no
faster than ``rate``. aiohttp parses whatever has come at once, and a buffer full of small requests would hold up the
loop for longer than there is time to set a waiting user's limits (55 ms; recording 04, T1).
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from mpsagent.interfaces.backend import Problem

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,19})[ \t]*\r\n")
_LINGERING = 32
"""Refused connections at a time that are left open until their peers have read why."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one peer may use. Sizes in bytes, spans in seconds. ``connections_root`` are kept beside the others, so
    that users cannot lock out the person on call. ``rate``: requests a second of one user after the first ``burst``;
    more are not refused but wait. Root's do not."""

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
    rate: float = 50.0
    burst: int = 100


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
        self.unheard = 0
        """Connections that were let in and have not asked anything so far."""
        self.turned_away = 0
        self.dropped = 0
        self.lingering = 0
        self._due: dict[int, float] = {}

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

    def wait(self, uid: int, now: float) -> float:
        """Count a request of ``uid``; how many seconds it has to wait."""
        if uid == 0:
            return 0.0
        if len(self._due) > 4096:
            self._due = {one: due for one, due in self._due.items() if due > now}
        due = self._due[uid] = max(self._due.get(uid, now), now) + 1 / self.bounds.rate
        return max(0.0, due - now - self.bounds.burst / self.bounds.rate)

    def leave(self, uid: int) -> None:
        self.by_uid[uid] -= 1
        if self.by_uid[uid] <= 0:
            del self.by_uid[uid]


class Door(asyncio.Protocol):
    """One connection. Passes requests on to aiohttp's protocol, one at a time, once the peer is let in."""

    def __init__(self, porter: Porter) -> None:
        self._porter = porter
        self._bounds = porter.bounds
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._coming = bytearray()
        self._in_header, self._answered, self._body_left = True, True, 0
        self._refused = self._lingers = self._held = self._unheard = False
        self.peer: Peer | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- called by the API

    def request_begins(self) -> None:
        """aiohttp has understood the header; from here on the handler has its own deadlines."""
        self._timed(None)

    def request_ends(self) -> None:
        """The answer is on its way; the peer has a while to read it and to ask again."""
        self._timed(self._bounds.idle_time)
        self._answered = True
        self._advance()

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
        self._unheard = True
        self._porter.unheard += 1
        self._timed(self._bounds.header_time)
        self._inner = self._porter.inner()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._inner is None or self._refused:
            return
        self._coming += data
        self._advance()
        if not self._in_header and len(self._coming) > self._bounds.header_size + self._bounds.body_size:
            self._drop()  # it goes on sending while it has not even got its answer

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
        self._heard()
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

    # --- one request at a time

    def _advance(self) -> None:
        """Pass on what belongs to the present request, and begin the next one when that has been answered."""
        if self._inner is None or self._refused:
            return
        if not self._in_header:
            self._pass_body()
            self._in_header = self._answered and not self._body_left
        if self._in_header:
            self._begin()

    def _begin(self) -> None:
        end = self._coming.find(b"\r\n\r\n") + 4
        whole = end >= 4
        if (end if whole else len(self._coming)) > self._bounds.header_size:
            most = f"at most {self._bounds.header_size} bytes"
            self._refuse(Problem(431, "the request's header is too long", hint=most))
            return
        if not whole:
            return
        self._heard()
        header = bytes(self._coming[:end])
        del self._coming[:end]
        length = _body_length(header)
        if length is None:
            self._refuse(Problem(411, "the body's length is not given", "Content-Length", "do not send it in chunks"))
        elif length > self._bounds.body_size:
            self._refuse(Problem(413, "the body is too long", hint=f"at most {self._bounds.body_size} bytes"))
        else:
            self._in_header, self._answered, self._body_left = False, False, length
            loop = asyncio.get_running_loop()
            wait = self._porter.wait(self.peer.uid if self.peer else -1, loop.time())
            self._timed(wait + self._bounds.header_time)
            if wait:
                self._held = True
                loop.call_later(wait, self._pass_header, header)
            else:
                self._pass_header(header)

    def _heard(self) -> None:
        if self._unheard:
            self._unheard = False
            self._porter.unheard -= 1

    def _pass_header(self, header: bytes) -> None:
        self._held = False
        if self._inner is not None and not self.lost.done():
            self._inner.data_received(header)
            self._pass_body()

    def _pass_body(self) -> None:
        part = bytes(self._coming[: self._body_left])
        if part and not self._held and self._inner is not None:
            del self._coming[: len(part)]
            self._body_left -= len(part)
            self._inner.data_received(part)

    # --- ends

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
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._refused = True
        self._coming.clear()
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


def _body_length(header: bytes) -> int | None:
    """What a header announces; None for a body in chunks. Nonsense is left for aiohttp to refuse."""
    lower = header.lower()
    if b"\r\ntransfer-encoding:" in lower:
        return None
    found = _LENGTH.search(lower)
    return int(found[1]) if found else 0
