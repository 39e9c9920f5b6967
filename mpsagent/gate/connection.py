"""A connection at the public socket: its socket, who it is from the kernel, and its mark in the kernel."""

from __future__ import annotations

import array
import fcntl
import socket
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mpsagent.gate.handshake import Handshake, Mark
from mpsagent.gate.queue import Held, Process
from mpsagent.gate.store import ConnectionName
from mpsagent.linux import peers, proc
from mpsagent.linux.peers import Credentials
from mpsagent.linux.sent_descriptors import let_go
from mpsagent.mps.rendezvous import Kind
from mpsagent.wire.link import Knock

SIOCOUTQ = termios.TIOCOUTQ
NEVER = {Kind.DEBUGGER: "debugged", Kind.UNKNOWN: "unknown"}
"""Kinds of peers that are held and never handed over, in the words of :class:`mpsagent.wire.link.Knock`."""


@dataclass(slots=True, eq=False)
class Connection:
    """``number`` is the time of its arrival in microseconds of CLOCK_MONOTONIC, made unique: it orders connections
    across restarts of the gate, and tells ``since``."""

    number: int
    sock: socket.socket
    peer: Credentials
    start: int
    privileged: bool
    handshake: Handshake
    stored: bool = False
    attempt: int = 0
    """How often it was announced to a daemon."""
    knock: Knock | None = None
    """What the agent was told of it."""
    never: str = ""
    """The reason for which it is never handed over, see :data:`NEVER`; empty: it is a client's."""
    extra: int = 0
    """Messages that it has sent although it is never handed over."""

    @property
    def since(self) -> float:
        return self.number / 1e6

    @property
    def process(self) -> Process:
        return self.peer.pid, self.start

    @property
    def name(self) -> str:
        """Its name in the descriptor store. Where the kernel tells the process by the socket, the start time need not
        be there, and a connection is in the store all the sooner."""
        start = 0 if peers.peers_have_pidfds() else self.start
        return str(ConnectionName(self.number, start, self.privileged))

    @property
    def mark(self) -> Mark:
        """Kept as the socket's priority, which means nothing for Unix sockets and lives as long as the socket."""
        return mark_of(self.sock)

    @mark.setter
    def mark(self, mark: Mark) -> None:
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, int(mark))

    def held(self) -> Held:
        who = self.number, self.peer.pid, self.peer.uid, self.peer.gid, self.start, self.since
        return Held(*who, never=bool(self.never))

    def unread_by_us(self) -> bool:
        return self._queued(termios.FIONREAD)

    def unread_by_peer(self) -> bool:
        return self._queued(SIOCOUTQ)

    def _queued(self, what: int) -> bool:
        amount = array.array("i", [0])
        try:
            fcntl.ioctl(self.sock.fileno(), what, amount)
        except OSError:
            return False
        return amount[0] > 0


def mark_of(sock: socket.socket) -> Mark:
    try:
        return Mark(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
    except (OSError, ValueError):
        return Mark.NEW


class Numbers:
    """Connection numbers: microseconds of CLOCK_MONOTONIC, which cannot be set and which a later gate has, too; each is
    greater than the one before."""

    def __init__(self) -> None:
        self._last = 0

    def new(self) -> int:
        self._last = max(self._last + 1, time.monotonic_ns() // 1000)
        return self._last

    def seen(self, number: int) -> None:
        """A number of an earlier gate. One from a clock that was far ahead is not followed for ever."""
        if number < time.monotonic_ns() // 1000 + 3_600_000_000:
            self._last = max(self._last, number)


def accepted(sock: socket.socket, number: int, keep: Callable[[Connection], None], *, privileged: bool) -> Connection:
    """A connection that was accepted just now; ``keep`` puts it into the store, as early as can be. Raises OSError. A
    process may have connected and ended before that, and left the connection to another: the process that has its pid
    by now is not the one that connected."""
    who = peers.peer(sock)
    early = peers.peers_have_pidfds()
    start = 0 if early else proc.start_of_users(who.pid, who.uid)
    connection = Connection(number, sock, who, start, privileged, Handshake(who))
    keep(connection)
    sock.setblocking(False)
    if early:
        connection.start = peers.start_of_peer(sock, who.pid, 0)
    return connection


def restored(sock: socket.socket, name: ConnectionName) -> Connection | None:
    """A connection out of the descriptor store; None when its process has gone or its pid is another's now."""
    try:
        sock.setblocking(False)
        who = peers.peer(sock)
    except OSError:
        let_go(sock)
        return None
    start = peers.start_of_peer(sock, who.pid, name.start)
    if not start:
        let_go(sock)
        return None
    handshake = Handshake(who, restored=True)
    kind = {Mark.DEBUGGED: Kind.DEBUGGER, Mark.UNKNOWN: Kind.UNKNOWN}.get(mark_of(sock))
    never = "" if kind is None else NEVER[kind]
    return Connection(name.number, sock, who, start, name.privileged, handshake, stored=True, never=never)
