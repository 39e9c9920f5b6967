"""Finishes the handshake of a client, gone or silent, with the server that it was handed to.

A server whose client goes away between its credentials and the end of this handshake is not heard of again, and the
daemon waits for it (X1 and X15; answers 1 and 5 of docs/measured/2026-11-21-H100-580.159.04); so it is with one that
lives and says nothing (recording 12, H2). It would have to be killed, with everybody's work on it. So the gate keeps a
copy of the descriptor, says what the client would have said, and closes a little later: the server sees a client that
connects and exits.

    server: OUTBCUFD and a descriptor, four times, then one zero byte
    client: OUTBCRED with credentials, which context (0: the channel), and its device (ff: none)
    server: four zero bytes, or a CUDA error

The messages are recording 08's, G1. Confirmed on an H100 (stuck-server.txt there): 4 of 4 servers were free again at
once, for channels and contexts, their other clients unharmed; nothing else that was tried frees a server. The same with
13 clients that lived, on an H200; said once more on the copy of a client that had met its server, it harmed none
(docs/measured/2026-11-23-2xH200-580.159.04).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from mpsagent.linux.channel import Channel, as_user
from mpsagent.linux.descriptors import close_all
from mpsagent.linux.peers import Credentials
from mpsagent.mps.rendezvous import CREDENTIALS, DESCRIPTOR, LONGEST_MESSAGE

READY = b"\0"
CHANNEL = bytes(4)
NO_DEVICE = b"\xff\0\0\0"
STATUS = 4
UNSURE = 0.1
"""Seconds in which a server answers a client that had said everything before it went. It is silent when the client had
read everything and said nothing, or when the two had met already."""
PATIENCE = 2.0
SETTLING = 0.1
"""Seconds until the gate hangs up on a server that has answered, for a client that has gone, and until it closes its
own copy of a living client's descriptor. A server whose client hangs up between "is associated" and "is ACTIVE", within
a millisecond of the answer, ends with everybody's work on it: the last lines of all servers that ended while clients
were killed on an H100 (server-deaths.txt there)."""
MOST_DESCRIPTORS = 8


class Rescue:
    """The client's side of the handshake, taken over in the middle. Messages in, messages out; no I/O, no clock.

    ``over``: nothing more is to be sent. ``why``: None when the server has answered or closed, else what is wrong.
    ``acknowledged``: the client lives and says that it has met the server: only an answer to what is said here proves
    that it has not.
    """

    def __init__(self, *, untouched: bool, acknowledged: bool = False) -> None:
        self.over = False
        self.said = False
        self.why: str | None = None
        self._untouched = untouched
        self.acknowledged = acknowledged

    @property
    def patience(self) -> float:
        """Seconds to wait for the server's next message."""
        return PATIENCE if self.said or self._untouched else UNSURE

    def message(self, data: bytes) -> list[bytes]:
        """A message of the server."""
        if self.over or data == DESCRIPTOR:
            return []
        if data == READY and not self.said:  # the client had not read this, so it had not said a word
            return self._say()
        self.over = True  # its last word; or anything else, said to a client that it has met
        if self.acknowledged and not (self.said and len(data) == STATUS):
            self.why = "its server has met it"
        return []

    def closed(self) -> None:
        """The server has closed the connection, or has gone."""
        self.over = True
        if self.acknowledged:
            self.why = "its server has gone"

    def silent(self) -> list[bytes]:
        """Nothing more has come in time. Where the client was is not known: what it had said already is said again, and
        the server, which counts messages, has one too many rather than one too few."""
        if not self.said and not self.over:
            return self._say()
        if not self.over:
            self.over = True
            self.why = f"its server has not answered for {PATIENCE:g} s and may wait for ever"
        return []

    def _say(self) -> list[bytes]:
        self.said = True
        return [CREDENTIALS, CHANNEL, NO_DEVICE]


class Rescuer:
    """Carries it out on ``descriptor``, which is its own from now on, in the name of ``who`` with our own pid.
    ``untouched``: the client never had the descriptor. ``done`` gets :attr:`Rescue.why`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        who: Credentials,
        done: Callable[[str | None], None],
        *,
        untouched: bool,
        acknowledged: bool = False,
    ) -> None:
        self._loop = loop
        self._who = who
        self._done = done
        self._machine = Rescue(untouched=untouched, acknowledged=acknowledged)
        self._timer: asyncio.TimerHandle | None = None
        sock = socket.socket(fileno=descriptor)
        self._channel = Channel(
            loop, sock, self._receive, self._closed, longest=LONGEST_MESSAGE, descriptors=MOST_DESCRIPTORS
        )
        self._wait()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._machine.patience, self._silent)

    def _receive(self, data: bytes, _who: Credentials | None, descriptors: list[int]) -> None:
        close_all(descriptors)
        self._go_on(self._machine.message(data))

    def _silent(self) -> None:
        self._go_on(self._machine.silent())

    def _closed(self) -> None:
        self._machine.closed()
        self._go_on([])

    def _go_on(self, messages: list[bytes]) -> None:
        for message in messages:
            error = self._channel.send(message, as_user(self._who))
            if isinstance(error, PermissionError):
                self._machine.over = True
                self._machine.why = f"its server could not be told: {error.strerror}"
        if self._machine.over:
            self._end()
        else:
            self._wait()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._machine.acknowledged and self._machine.why is not None:
            self._channel.close()  # of a client that works
        elif self._channel.open:
            self._loop.call_later(SETTLING, _hang_up, self._channel.detach())
        self._done(self._machine.why)


def _hang_up(sock: socket.socket) -> None:
    # another process may still hold what the client had: for the server it is over all the same
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
