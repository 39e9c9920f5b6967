"""A daemon whose greeting is not known: everything is passed on untouched, messages, descriptors and credentials."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from mpsagent.gate.channel import Ancillary, Channel, as_user, with_descriptors
from mpsagent.gate.connection import Connection
from mpsagent.mps.rendezvous import Credentials

LONGEST = 65536
MOST_DESCRIPTORS = 32


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
            loop, connection.sock, self._from_client, self._end, longest=LONGEST, descriptors=MOST_DESCRIPTORS
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
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        if error is not None or to.busy:
            self._end()

    def _end(self) -> None:
        self._client.close()
        self._daemon.close()
        done, self._done = self._done, _nothing
        done()


def _nothing() -> None:
    pass
