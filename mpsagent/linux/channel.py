"""A SOCK_SEQPACKET socket in the event loop: whole messages in and out, bounded, with credentials and descriptors."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mpsagent.linux.descriptors import SCM_CREDENTIALS, Ancillary, close_all, descriptors_in, with_descriptors
from mpsagent.linux.peers import CREDENTIALS_SIZE, Credentials
from mpsagent.linux.sent_descriptors import let_go, look_first

MOST_WAITING = 4096
"""Messages that may wait for a peer that does not read; beyond it the channel closes."""
AT_A_TIME = 16
"""Messages taken from one peer before the others have their turn."""

Receive = Callable[[bytes, Credentials | None, list[int]], None]
Opened = Callable[[], int | None]


class _Message(NamedTuple):
    """``opened``: a descriptor that goes along, opened when the message goes out and closed then. ``of``: of which only
    the newest counts."""

    data: bytes
    ancillary: Ancillary
    opened: Opened | None
    of: str | None


def as_user(who: Credentials) -> Ancillary:
    """Sends a message with this user and group, and our own pid. Another pid would need CAP_SYS_ADMIN, and is not
    missed: a server learns its client's pid from the client itself (measured on an H100, answer 2)."""
    return ((socket.SOL_SOCKET, SCM_CREDENTIALS, Credentials(os.getpid(), who.uid, who.gid).pack()),)


def take(
    sock: socket.socket, longest: int, descriptors: int = 0, *, peek: bool = False
) -> tuple[bytes, Credentials | None, list[int]]:
    """One message; with ``peek`` it stays in the socket too, and the descriptors are copies. Descriptors beyond the
    number expected are never installed. Raises OSError."""
    space = socket.CMSG_SPACE(CREDENTIALS_SIZE) + (socket.CMSG_SPACE(4 * descriptors) if descriptors else 0)
    flags = socket.MSG_CMSG_CLOEXEC | (socket.MSG_PEEK if peek else 0)
    data, ancillary, _, _ = sock.recvmsg(longest, space, flags)
    said = (one for level, kind, one in ancillary if (level, kind) == (socket.SOL_SOCKET, SCM_CREDENTIALS))
    who = next((Credentials.unpack(one) for one in said if len(one) >= CREDENTIALS_SIZE), None)
    return data, who, descriptors_in(ancillary)


def hung_up(descriptor: int) -> bool:
    """Whether the peer of a socket has, also while nothing is read."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


class Channel:
    """``receive`` gets each message; ``after`` comes behind those that lay there together, ``at_a_time`` at most;
    ``closed`` is called once when the peer hangs up, never after :meth:`close`. ``users``: the peer is
    a user's process."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        receive: Receive,
        closed: Callable[[], None],
        *,
        longest: int,
        descriptors: int = 0,
        most_waiting: int = MOST_WAITING,
        at_a_time: int = AT_A_TIME,
        after: Callable[[], None] = lambda: None,
        users: bool = False,
    ) -> None:
        self.sock = sock
        self._loop = loop
        self._receive = receive
        self._closed = closed
        self._longest = longest
        self._descriptors = descriptors
        self._most_waiting, self._at_a_time = most_waiting, at_a_time
        self._after, self._users = after, users
        self._waiting: deque[_Message] = deque()
        self._reading = False
        self.open = True
        sock.setblocking(False)
        self.resume()

    def pause(self) -> None:
        """Nothing is read until :meth:`resume`; the peer waits when the socket's buffer is full."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.sock.fileno())

    def resume(self) -> None:
        if self.open and not self._reading:
            self._reading = True
            self._loop.add_reader(self.sock.fileno(), self._read)

    def send(
        self, data: bytes, ancillary: Ancillary = (), *, opened: Opened | None = None, of: str | None = None
    ) -> OSError | None:
        """Sends or keeps the message; what went wrong. A peer that has hung up is told by ``closed``, after what it
        sent before has been read."""
        if not self.open:
            return OSError("closed")
        message = _Message(data, ancillary, opened, of)
        if self._waiting:
            if of is not None:
                self._waiting = deque(one for one in self._waiting if one.of != of)
            if len(self._waiting) >= self._most_waiting:
                self._end()
                return OSError(f"{self._most_waiting} messages are waiting already")
            self._waiting.append(message)
            return None
        try:
            self._put(message)
        except BlockingIOError:
            self._waiting.append(message)
            self._loop.add_writer(self.sock.fileno(), self._write)
        except OSError as error:
            return error
        return None

    def _put(self, message: _Message) -> None:
        """Raises OSError."""
        descriptor = None if message.opened is None else message.opened()
        descriptors = () if descriptor is None else (descriptor,)
        try:
            self.sock.sendmsg([message.data], (*message.ancillary, *with_descriptors(descriptors)))
        finally:
            close_all(descriptors)

    @property
    def waiting(self) -> int:
        """How many messages wait for the peer to read."""
        return len(self._waiting)

    def hung_up(self) -> bool:
        return hung_up(self.sock.fileno())

    def close(self) -> None:
        if self.open:
            sock = self.detach()
            let_go(sock) if self._users else sock.close()

    def detach(self) -> socket.socket:
        """The channel ends, its socket goes on. What waits to be sent is lost."""
        if self.open:
            self.open = False
            self.pause()
            if self._waiting:
                self._loop.remove_writer(self.sock.fileno())
                self._waiting.clear()
        return self.sock

    def _end(self) -> None:
        if self.open:
            self.close()
            self._closed()

    def _read(self) -> None:
        try:
            self._read_some()
        finally:
            self._after()

    def _read_some(self) -> None:
        for _ in range(self._at_a_time):
            if not self._reading:
                return
            try:
                if self._users and not self._descriptors:
                    look_first(self.sock)
                data, who, descriptors = take(self.sock, self._longest, self._descriptors)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                continue  # said once, before what the peer sent last: it left something of ours unread
            except OSError:
                self._end()
                return
            if not data:
                close_all(descriptors)
                self._end()
                return
            self._receive(data, who, descriptors)

    def _write(self) -> None:
        while self._waiting:
            try:
                self._put(self._waiting[0])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pass  # the reader is told
            self._waiting.popleft()
        self._loop.remove_writer(self.sock.fileno())
