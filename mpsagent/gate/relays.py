"""Connections that are passed on untouched, with all that comes along: the daemon greets in a way that is not known."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from mpsagent.gate.connection import Connection
from mpsagent.gate.lane import Lane
from mpsagent.gate.store import DescriptorStore
from mpsagent.linux.channel import Channel, as_user
from mpsagent.linux.descriptors import Ancillary, close_all, with_descriptors
from mpsagent.linux.dialogue import connect
from mpsagent.linux.peers import Credentials
from mpsagent.linux.sent_descriptors import accept_descriptors
from mpsagent.mps.rendezvous import CONTROL, PRIVILEGED

MOST = 1024
LONGEST = 65536
MOST_DESCRIPTORS = 32
AGAIN = 0.1


class Relay:
    """``greeted`` hears the daemon's first message. Both ends are ours and closed together."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        daemon: socket.socket,
        greeted: Callable[[bytes, socket.socket], None],
        done: Callable[[], None],
    ) -> None:
        self._peer = connection.peer
        self._greeted: Callable[[bytes, socket.socket], None] | None = greeted
        self._done = done
        self._client = Channel(
            loop,
            connection.sock,
            self._from_client,
            self._end,
            longest=LONGEST,
            descriptors=MOST_DESCRIPTORS,
            users=True,
        )
        self._daemon = Channel(
            loop, daemon, self._from_daemon, self._end, longest=LONGEST, descriptors=MOST_DESCRIPTORS
        )

    def _from_client(self, data: bytes, who: Credentials | None, descriptors: list[int]) -> None:
        self._pass(self._daemon, data, as_user(who or self._peer), descriptors)

    def _from_daemon(self, data: bytes, _who: Credentials | None, descriptors: list[int]) -> None:
        if self._greeted is not None:
            self._greeted(data, self._daemon.sock)
            self._greeted = None
        self._pass(self._client, data, (), descriptors)

    def _pass(self, to: Channel, data: bytes, ancillary: Ancillary, descriptors: list[int]) -> None:
        error = to.send(data, (*ancillary, *with_descriptors(descriptors)))
        # a message that is kept for later would have its descriptors closed under it; peers read at once or are closed
        close_all(descriptors)
        if error is not None or to.waiting:
            self._end()

    def _end(self) -> None:
        if self._client.open or self._daemon.open:
            self._client.close()
            self._daemon.close()
            self._done()


@dataclass(eq=False, repr=False)
class Relays:
    """``lane_of`` says where a connection goes. ``greet`` takes a connection back that need not be relayed after
    all."""

    _loop: asyncio.AbstractEventLoop
    _lane_of: Callable[[Connection], Lane]
    _store: DescriptorStore
    _greet: Callable[[Connection], None]
    _open: int = field(default=0, init=False)
    _waiting: dict[Connection, None] = field(default_factory=dict, init=False)

    def offer(self, connection: Connection) -> bool:
        """A new connection, before its greeting; False when the daemon's greeting is known, or not yet heard."""
        lane = self._lane_of(connection)
        if lane.known is not False:
            return False
        daemon = None
        if self._open < MOST:
            with suppress(OSError):
                daemon = connect(lane.directory, PRIVILEGED if connection.privileged else CONTROL)
        if daemon is None:  # it waits without a greeting: closed now, its client would run outside MPS
            if not self._waiting:
                self._loop.call_later(AGAIN, self.again)
            self._waiting[connection] = None
            return True
        if connection.stored:  # a relay ends with the gate
            self._store.drop(connection.name)
            connection.stored = False
        self._open += 1
        accept_descriptors(connection.sock, yes=True)  # they are passed on, too
        Relay(self._loop, connection, daemon, lane.greeted, self._ended)
        return True

    def again(self) -> None:
        """Those that wait, now that there is room, or a daemon, or one that greets as we know it."""
        waiting, self._waiting = list(self._waiting), {}
        for connection in waiting:
            if not self.offer(connection):
                self._greet(connection)

    def _ended(self) -> None:
        self._open -= 1
