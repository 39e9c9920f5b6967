"""A connection to the control daemon on which a client is announced, and what the daemon answers.

From the moment when the daemon may have heard of a client until that client has met its server, the gate may not hang
up: a server whose client goes away in between is stuck for ever, and MPS with it (measured on an H100 with driver 580,
answer 5). So the connection lies in the descriptor store before a word is said, and its mark says how far it is. The
answer, with the way to the server, stays in the socket until that has been asked whether it has met its client. A gate
that is killed at any point leaves enough behind for the next one to go on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from mpsagent.gate.store import DaemonName, DescriptorStore
from mpsagent.linux.channel import as_user, take
from mpsagent.linux.descriptors import close_all
from mpsagent.linux.peers import Credentials
from mpsagent.mps.rendezvous import CREDENTIALS, Kind, kind_bytes

LONGEST = 64
MOST_DESCRIPTORS = 4
_KIND = kind_bytes(Kind.CLIENT)


class Told(IntEnum):
    """What the daemon has heard; kept as the socket's priority (handshake.Mark), set before the next word is sent."""

    NOTHING = 0
    """At most the credentials: hanging up harms nothing, the daemon says "Unable to read" and goes on."""
    KIND = 1
    """The last word is on its way or not."""
    ALL = 2
    ABANDONED = 3
    """The client is not to have what comes: it has gone, or waits for another attempt."""
    ACKNOWLEDGED = 4
    """The client says that it has met its server; the daemon may have been told so."""


Answer = tuple[bytes, list[int]]


class Announcement:
    """The socket is its own. ``name`` is its place in the store until :meth:`close`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, store: DescriptorStore, sock: socket.socket, name: DaemonName
    ) -> None:
        self.sock = sock
        self.name = name
        self.open = True
        self._loop = loop
        self._store = store
        self._listening = False
        sock.setblocking(False)
        store.keep(str(name), sock.fileno())

    @property
    def who(self) -> Credentials:
        """In whose name things are said here. The pid is of no importance."""
        return Credentials(0, self.name.uid, self.name.gid)

    @property
    def told(self) -> Told:
        try:
            return Told(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
        except (OSError, ValueError):
            return Told.NOTHING

    @told.setter
    def told(self, told: Told) -> None:
        with suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, int(told))

    def announce(self) -> None:
        """Says that a client wants a server. Raises OSError: nothing was announced."""
        self.sock.sendmsg([CREDENTIALS], as_user(self.who))
        self.told = Told.KIND
        self.sock.sendmsg([_KIND], as_user(self.who))
        self.told = Told.ALL

    def make_sure(self) -> None:
        """The gate before was killed while it announced. A word too many is taken for an early acknowledgement; one too
        few and the daemon waits for it for ever."""
        if self.told is Told.KIND:
            answer = self.answer()
            if answer is not None:
                close_all(answer[1])
            else:
                with suppress(OSError):
                    self.sock.sendmsg([_KIND], as_user(self.who))
            self.told = Told.ALL

    def greeting(self, heard: Callable[[bytes], None], closed: Callable[[], None]) -> None:
        """Waits for the daemon's first word."""
        self._await(lambda: (take(self.sock, LONGEST)[0], []), lambda data, _: heard(data), closed)

    def await_answer(self, answered: Callable[[bytes, list[int]], None], closed: Callable[[], None]) -> None:
        """Waits for the answer, which stays in the socket. The descriptors are copies, and the hearer's."""
        self._await(self._peek, answered, closed)

    def _await(
        self, look: Callable[[], Answer], heard: Callable[[bytes, list[int]], None], closed: Callable[[], None]
    ) -> None:
        def read() -> None:
            try:
                answer = look()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                answer = (b"", [])
            self.deafen()
            heard(*answer) if answer[0] else closed()

        self.deafen()
        if self.open:
            self._listening = True
            self._loop.add_reader(self.sock.fileno(), read)

    def answer(self) -> Answer | None:
        """What lies in the socket; None: nothing, or the daemon has hung up."""
        try:
            answer = self._peek()
        except OSError:
            return None
        return answer if answer[0] else None

    def _peek(self) -> Answer:
        try:
            data, _, descriptors = take(self.sock, LONGEST, MOST_DESCRIPTORS, peek=True)
        except ConnectionResetError:  # said once, ahead of the answer: the daemon has left something unread
            data, _, descriptors = take(self.sock, LONGEST, MOST_DESCRIPTORS, peek=True)
        return data, descriptors

    def deafen(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.remove_reader(self.sock.fileno())

    def acknowledge(self, data: bytes) -> None:
        """Tells the daemon what the client has said last, and that no more comes. The answer stays until :meth:`close`,
        for a gate that comes before the server has been asked whether that is so."""
        if self.open:
            self.told = Told.ACKNOWLEDGED
            with suppress(OSError):  # the daemon has gone
                self.sock.sendmsg([data], as_user(self.who))
                self.sock.shutdown(socket.SHUT_RDWR)  # clients hang up then: MPS sees the same

    def close(self) -> None:
        if self.open:
            self.deafen()
            self.open = False
            with suppress(OSError):
                # hung up with something unread, the daemon would find a reset in the place of the acknowledgement
                _, _, descriptors = take(self.sock, LONGEST, MOST_DESCRIPTORS)
                close_all(descriptors)
            self._store.drop(str(self.name))
            self.sock.close()
