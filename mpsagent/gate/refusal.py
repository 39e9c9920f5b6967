"""Tells a client in its server's place that there are too many contexts; its other contexts work on.

Not by hanging up, which ends the process at its next call, and not before the client has said all it has to say to a
server (contexts-refused.txt of docs/measured/2026-11-23-H200-580.159.04). The messages are those of :mod:`rescue`.
"""

from __future__ import annotations

import asyncio
import os
import socket

from mpsagent.gate.connection import Connection
from mpsagent.gate.handshake_rescue import READY
from mpsagent.linux.channel import Channel
from mpsagent.linux.descriptors import SO_PASSCRED, with_descriptors
from mpsagent.linux.peers import Credentials
from mpsagent.linux.sent_descriptors import accept_descriptors
from mpsagent.mps.rendezvous import DESCRIPTOR, LONGEST_MESSAGE, TOO_MANY

EXTRA_DESCRIPTORS = 4
SAYINGS = 3
"""What a client says to its server: credentials, which context, on which device."""


class RefusalHandshake:
    """Begins at once; the client's last word comes at ``connection``. Raises OSError: it has been told nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        self.connection = connection
        self._heard = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        accept_descriptors(ours, yes=False)
        self._server = Channel(loop, ours, self._receive, lambda: None, longest=LONGEST_MESSAGE, users=True)
        try:
            with theirs, open(os.devnull, "rb") as spare:
                for sock in (ours, theirs):
                    sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
                for _ in range(EXTRA_DESCRIPTORS):
                    self._server.send(DESCRIPTOR, with_descriptors([spare.fileno()]))
                self._server.send(READY)
                connection.sock.sendmsg([DESCRIPTOR], with_descriptors([theirs.fileno()]))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._server.close()

    def _receive(self, _data: bytes, _who: Credentials | None, _descriptors: list[int]) -> None:
        self._heard += 1
        if self._heard == SAYINGS:
            self._server.pause()
            self._server.send(TOO_MANY)
