"""A SOCK_SEQPACKET socket in the event loop: whole, bounded messages with credentials and descriptors."""

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
"""Messages that may wait for a peer that does not read. With one more the channel closes."""
AT_A_TIME = 16
"""Messages that are read from one peer before other peers are read."""

Receive = Callable[[bytes, Credentials | None, list[int]], None]
Opened = Callable[[], int | None]


class _Message(NamedTuple):
    """A waiting message. ``opened`` returns a descriptor to send with it, which is closed afterwards. ``of``: only the
    newest message of this name is sent."""

    data: bytes
    ancillary: Ancillary
    opened: Opened | None
    of: str | None


def as_user(who: Credentials) -> Ancillary:
    """Return the ancillary data that sends a message with this user and group, and this process's pid.

    Another pid would need CAP_SYS_ADMIN. It is not needed: a server receives the pid from its client (measured on an
    H100, answer 2).
    """
    return ((socket.SOL_SOCKET, SCM_CREDENTIALS, Credentials(os.getpid(), who.uid, who.gid).pack()),)


def take(
    sock: socket.socket, longest: int, descriptors: int = 0, *, peek: bool = False
) -> tuple[bytes, Credentials | None, list[int]]:
    """Return one message, its sender's credentials, and at most ``descriptors`` descriptors; the kernel drops the rest.

    With ``peek`` the message stays in the socket, and the descriptors are copies. Raises OSError.
    """
    space = socket.CMSG_SPACE(CREDENTIALS_SIZE) + (socket.CMSG_SPACE(4 * descriptors) if descriptors else 0)
    flags = socket.MSG_CMSG_CLOEXEC | (socket.MSG_PEEK if peek else 0)
    data, ancillary, _, _ = sock.recvmsg(longest, space, flags)
    said = (one for level, kind, one in ancillary if (level, kind) == (socket.SOL_SOCKET, SCM_CREDENTIALS))
    who = next((Credentials.unpack(one) for one in said if len(one) >= CREDENTIALS_SIZE), None)
    return data, who, descriptors_in(ancillary)


def hung_up(descriptor: int) -> bool:
    """Return True if the peer of this socket has closed its end, even if unread messages remain."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


class Channel:
    """Messages to and from one peer.

    ``receive`` gets each message. ``after`` is called after each batch of up to ``at_a_time`` messages. ``closed`` is
    called once when the peer closes its end, never after :meth:`close`. ``longest``: bytes of a message. ``users``: the
    peer is a user's process.
    """

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
        """Read nothing until :meth:`resume`. The peer waits when the socket's buffer is full."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self.sock.fileno())

    def resume(self) -> None:
        """Read messages (again)."""
        if self.open and not self._reading:
            self._reading = True
            self._loop.add_reader(self.sock.fileno(), self._read)

    def send(
        self, data: bytes, ancillary: Ancillary = (), *, opened: Opened | None = None, of: str | None = None
    ) -> OSError | None:
        """Send the message, or keep it until the peer reads; return the error, if there is one.

        That the peer has closed its end is reported by ``closed``, after its last messages.
        """
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
        """Return the number of messages that wait for the peer to read."""
        return len(self._waiting)

    def hung_up(self) -> bool:
        """Return True if the peer has closed its end."""
        return hung_up(self.sock.fileno())

    def close(self) -> None:
        """Close the socket. Waiting messages are lost."""
        if self.open:
            sock = self.detach()
            let_go(sock) if self._users else sock.close()

    def detach(self) -> socket.socket:
        """Return the socket, which this channel no longer uses. Waiting messages are lost."""
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
                continue  # reported once, before the peer's last messages: the peer has left a message unread
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
                pass  # reading reports it
            self._waiting.popleft()
        self._loop.remove_writer(self.sock.fileno())
