"""Who may connect, and for how long a connection may do nothing useful.

A :class:`Connection` stands before aiohttp's own protocol on each connection of the socket. It knows the peer from the
kernel, bounds header and body, and drops a peer that does not read what it asked for. No peer is ever waited for: each
of these is a timer and an abort.

It also sees to it that aiohttp has one request of a user at a time, streams apart, that this one's answer has been
taken before the next, and that a user's requests come no faster than the user's allowance. aiohttp parses whatever has
come at once, and a buffer full of small requests would hold up the loop for longer than a client at the gate should
wait; and the answers of 320 connections that do not read took 833 MiB.

:class:`Peers` counts. Each user has a bound of its own, and when all places are taken, the user who has the most gives
one up for a user who has fewer: no user is locked out by others, however many they are. Root, and whoever comes by the
administrators' socket, have places apart.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import Any, NamedTuple

from mpsagent.gate.linger import accept_descriptors
from mpsagent.interfaces.accept import Listener, Tasks
from mpsagent.interfaces.allowance import Allowances, Rates
from mpsagent.interfaces.backend import Problem

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,19})[ \t]*\r\n")
_LINGERING = 32
"""Refused connections at a time that are left open until their peers have read why."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one peer may use. Sizes in bytes, spans in seconds. ``connections``: places of all users together;
    ``connections_reserve``: those of root and of the administrators' socket; ``connections_per_uid``: in each."""

    connections: int = 256
    connections_reserve: int = 48
    connections_per_uid: int = 16
    header_size: int = 16 * 1024
    body_size: int = 16 * 1024
    header_time: float = 5.0
    body_time: float = 5.0
    idle_time: float = 15.0
    write_time: float = 10.0
    write_buffer: int = 8 * 1024
    heartbeat: float = 15.0
    rates: Rates = field(default_factory=Rates)


class Peer(NamedTuple):
    """The process at the other end, as the kernel says (SO_PEERCRED: at the time it connected)."""

    pid: int
    uid: int
    gid: int


class Share(Enum):
    """Whose places a connection takes."""

    USERS = "users"
    RESERVE = "reserve"


def peer_of(sock: Any) -> Peer:
    """Raises OSError."""
    pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Peer(pid, uid, gid)


class Places:
    """The connections of one share, by uid and in the order in which they came."""

    def __init__(self, most: int, per_uid: int) -> None:
        self._most = most
        self._per_uid = per_uid
        self._total = 0
        self.by_uid: dict[int, dict[Connection, None]] = {}

    def take(self, uid: int, one: Connection) -> Problem | None:
        """A place for one more connection of ``uid``, or why there is none."""
        mine = len(self.by_uid.get(uid, ()))
        if mine >= self._per_uid:
            return self._refusal(429, f"uid {uid} has {mine} of {self._per_uid}")
        if self._total >= self._most:
            most = max(self.by_uid, key=lambda other: len(self.by_uid[other]))
            if len(self.by_uid[most]) <= mine + 1:
                return self._refusal(503, f"uid {uid} has {mine}, all users {self._total} of {self._most}")
            next(iter(self.by_uid[most])).displace()
        self.by_uid.setdefault(uid, {})[one] = None
        self._total += 1
        return None

    def leave(self, uid: int, one: Connection) -> None:
        held = self.by_uid.get(uid, {})
        if one in held:
            del held[one]
            self._total -= 1
            if not held:
                del self.by_uid[uid]

    @staticmethod
    def _refusal(status: int, where: str) -> Problem:
        return Problem(
            status, "too many connections to mpsagent", where, "close some; one `events -f` per user is enough"
        )


class Line:
    """One request of each user at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._of: dict[int, dict[Connection, Callable[[], None]]] = {}

    def enter(self, uid: int, one: Connection, go: Callable[[], None]) -> None:
        line = self._of.setdefault(uid, {})
        line[one] = go
        if len(line) == 1:
            go()

    def leave(self, uid: int, one: Connection) -> None:
        line = self._of.get(uid, {})
        if one not in line:
            return
        first = next(iter(line)) is one
        del line[one]
        if not line:
            del self._of[uid]
        elif first:
            asyncio.get_running_loop().call_soon(next(iter(line.values())))


class Peers:
    """All connections of the API's sockets. ``inner`` makes aiohttp's protocol for one."""

    def __init__(self, bounds: Bounds, inner: Callable[[], asyncio.Protocol]) -> None:
        self.bounds = bounds
        self.inner = inner
        self.allowances = Allowances(bounds.rates)
        self.line = Line()
        per_uid = bounds.connections_per_uid
        self._places = {
            Share.USERS: Places(bounds.connections, per_uid),
            Share.RESERVE: Places(bounds.connections_reserve, per_uid),
        }
        self.unheard = 0
        """Connections that were let in and have not asked anything so far."""
        self.dropped = 0
        self.turned_away = 0
        self.lingering = 0
        self._listeners: list[Listener] = []
        self._tasks = Tasks()

    @property
    def connected(self) -> int:
        return sum(len(held) for places in self._places.values() for held in places.by_uid.values())

    def listen(self, sock: socket.socket, share: Share) -> None:
        accept_descriptors(sock, yes=False)
        self._listeners.append(Listener(sock, lambda taken: self._accepted(taken, share)))

    def close(self) -> None:
        """Accept no more."""
        for listener in self._listeners:
            listener.close()

    def take(self, uid: int, share: Share, one: Connection) -> Problem | None:
        refused = self._places[share].take(uid, one)
        if refused is not None:
            self.turned_away += 1
        return refused

    def leave(self, uid: int, share: Share, one: Connection) -> None:
        self._places[share].leave(uid, one)

    def charge(self, uid: int, tokens: float, share: Share) -> float:
        """Count what a user has used up; how many seconds it has to wait before more."""
        return self.allowances.charge(uid, tokens, time.monotonic(), share is Share.USERS)

    def _accepted(self, sock: socket.socket, share: Share) -> None:
        try:
            peer = peer_of(sock)
        except OSError:
            sock.close()
            return
        if peer.uid == 0:
            share = Share.RESERVE
        # Its own debt alone cuts a user off; that others connect in a loop is not counted against anyone else.
        if self.allowances.charge(peer.uid, 1.0, time.monotonic(), shared=False) > self.bounds.rates.patience:
            self.turned_away += 1
            sock.close()
            return
        loop = asyncio.get_running_loop()
        sock.setblocking(False)
        self._tasks.start(loop.connect_accepted_socket(lambda: Connection(self, peer, share), sock))


class Connection(asyncio.Protocol):
    """One connection. Passes requests on to aiohttp's protocol, one at a time, once it has a place."""

    def __init__(self, peers: Peers, peer: Peer, share: Share) -> None:
        self._peers = peers
        self._bounds = peers.bounds
        self.peer = peer
        self._share = share
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._paying: asyncio.TimerHandle | None = None
        self._coming = bytearray()
        self._in_header, self._answered, self._body_left = True, True, 0
        self._refused = self._lingers = self._held = self._unheard = False
        self.flows = asyncio.Event()
        """The peer has taken most of what was written, or has gone."""
        self.flows.set()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- called by the API

    def request_begins(self) -> None:
        """aiohttp has understood the header; from here on the handler has its own deadlines."""
        self._timed(None)

    def goes_on(self) -> None:
        """The answer is a stream: the user's other requests do not wait for its end."""
        self._peers.line.leave(self.peer.uid, self)

    def request_ends(self) -> None:
        """The answer is on its way; the peer has a while to read it and to ask again."""
        self.goes_on()
        self._timed(self._bounds.idle_time)
        self._answered = True
        self._advance()

    def charge(self, tokens: float) -> float:
        """Count what the answer cost; how many seconds the user has to wait before more."""
        return self._peers.charge(self.peer.uid, tokens, self._share)

    def displace(self) -> None:
        """Give the place up for a user who has fewer."""
        self._peers.leave(self.peer.uid, self._share, self)
        self._drop()

    # --- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=self._bounds.write_buffer)
        refused = self._peers.take(self.peer.uid, self._share, self)
        if refused is not None:
            self._refuse(refused)
            return
        self._unheard = True
        self._peers.unheard += 1
        self._timed(self._bounds.header_time)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._coming += data
        self._advance()
        if not self._in_header and len(self._coming) > self._bounds.header_size + self._body_left:
            self._drop()  # it goes on sending while it has not even got its answer

    def eof_received(self) -> bool | None:
        return None if self._inner is None or self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        """The peer has let ``write_buffer`` bytes pile up: from now on it has ``write_time`` to read most of them."""
        self._stall = asyncio.get_running_loop().call_later(self._bounds.write_time, self._drop)
        self.flows.clear()
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self.flows.set()
        if self._inner is not None:
            self._inner.resume_writing()
        self._advance()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        self._timed(None)
        for pending in (self._stall, self._paying):
            if pending is not None:
                pending.cancel()
        self._over()
        self.flows.set()
        self._peers.line.leave(self.peer.uid, self)
        self._peers.leave(self.peer.uid, self._share, self)
        if self._lingers:
            self._peers.lingering -= 1
        if not self.lost.done():
            self.lost.set_result(None)
        if self._inner is not None:
            self._inner.connection_lost(exc)

    # --- one request at a time

    def _advance(self) -> None:
        """Pass on what belongs to the present request, and begin the next one when that has been answered."""
        if self._refused:
            return
        if not self._in_header:
            self._pass_body()
            self._in_header = self._answered and not self._body_left
        if self._in_header and self.flows.is_set():
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
            self._when_paid(header)

    def _when_paid(self, header: bytes) -> None:
        """Pass the request on when the user's allowance has it; one that would wait for too long is refused, then."""
        loop, patience = asyncio.get_running_loop(), self._bounds.rates.patience
        wait = self.charge(1.0)
        self._timed(min(wait, patience) + self._bounds.header_time)
        self._held = wait > 0
        if wait > patience:
            where = f"uid {self.peer.uid} is {wait:.0f} s ahead of its share"
            problem = Problem(429, "too much was asked of mpsagent", where, "ask less often, or for less at a time")
            self._paying = loop.call_later(patience, self._refuse, problem)
        elif wait:
            self._paying = loop.call_later(wait, self._stand_in_line, header)
        else:
            self._stand_in_line(header)

    def _stand_in_line(self, header: bytes) -> None:
        if self._share is Share.RESERVE:
            self._pass_header(header)
            return
        self._held = True
        self._timed(None)
        self._peers.line.enter(self.peer.uid, self, lambda: self._pass_header(header))

    def _heard(self) -> None:
        if self._unheard:
            self._unheard = False
            self._peers.unheard -= 1

    def _pass_header(self, header: bytes) -> None:
        self._held = False
        transport = self._transport
        if self._refused or transport is None or transport.is_closing():  # aiohttp fails on what comes then
            return
        if self._inner is None:
            self._inner = self._peers.inner()
            self._inner.connection_made(transport)
        self._timed(self._bounds.header_time)
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

    def _over(self) -> None:
        """Nothing more of it is passed on; what has come is not kept until the last timer has let go of it."""
        self._refused = True
        self._coming.clear()

    def _drop(self) -> None:
        self._peers.dropped += 1
        self._over()
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, problem: Problem) -> None:
        """Answer without aiohttp and close. The peer is left a moment to read it: to close on what it is still sending
        would reset the connection under it. That moment is for a few at a time; more are closed at once."""
        body = json.dumps(problem.body()).encode()
        head = (
            f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}\r\n"
            f"Content-Type: application/problem+json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._over()
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(head.encode() + body)
        self._timed(self._bounds.header_time)
        if self._peers.lingering < _LINGERING:
            self._peers.lingering += 1
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
