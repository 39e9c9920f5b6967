"""Connections that are passed on untouched, because the daemon greets in a way that is not known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from mpsagent.gate.connection import Connection
from mpsagent.gate.lane import Lane
from mpsagent.gate.linger import accept_descriptors
from mpsagent.gate.question import CONTROL, PRIVILEGED, connect
from mpsagent.gate.relay import Relay
from mpsagent.gate.store import Store

MOST = 1024
AGAIN = 0.1


class Relays:
    """``lane_of`` says where a connection goes. ``greet`` takes a connection back that need not be relayed after
    all."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lane_of: Callable[[Connection], Lane],
        store: Store,
        greet: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._lane_of = lane_of
        self._store = store
        self._greet = greet
        self._open = 0
        self._waiting: dict[Connection, None] = {}

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
