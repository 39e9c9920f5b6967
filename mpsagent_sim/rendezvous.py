"""The messages at the control socket, byte for byte as NVIDIA's programs exchange them (recording 08, G1 to G4).

    daemon                              peer
    OUTBHELL\\0
                                        OUTBCRED\\0 with SCM_CREDENTIALS, then four bytes that say what it is
    OUTBCUFD\\0 with one descriptor                     to a client: the descriptor leads to its server
                                        00 00 00 00     the client has met its server; both close. Other numbers are
                                                        the client's CUDA error (27 03 00 00: the server is in FAULT)
The daemon takes pid, user and group from the message: it starts the server of that user, and names that pid in its log,
which may be a relay's own. Over the descriptor the client meets its server, which learns the client's pid from there
(G1; measured on an H100: docs/measured/2026-11-21-H100-580.159.04, answer 2):

    server                              client
    OUTBCUFD\\0 with one descriptor                     four times
    \\0
                                        OUTBCRED\\0 with SCM_CREDENTIALS
                                        00 00 00 00     which context; 0 is the channel
                                        ff 00 00 00     the channel has no device
    00 00 00 00                                         or the CUDA error: 27 03 00 00 in FAULT
SOCK_SEQPACKET with SO_PASSCRED: a client that finds another kind of socket runs outside MPS.
"""

import _socket
import os
import select

GREETING = b"OUTBHELL\0"
CREDENTIALS = b"OUTBCRED\0"
DESCRIPTOR = b"OUTBCUFD\0"
SERVER = b"\1\0\0\0"  # said when the server is ready
CLIENT = b"\2\0\0\0"
DEBUGGER = b"\3\0\0\0"
FRONT_END = b"\4\0\0\0"
FAILED = b"\12\0\0\0"  # sent by a server that could not start
EXTRA_DESCRIPTORS = 4
READY = b"\0"
NO_DEVICE = 0xFF
NOT_READY = 807
SIZE = 64
"""Bytes that are read of each of these messages."""
_ANCILLARY = 512


def word(number: int) -> bytes:
    return number.to_bytes(4, "little")


class Message:
    """A packet: its bytes (none at the end of the connection), its sender's credentials, and its descriptors."""

    __slots__ = ("credentials", "data", "descriptors")

    def __init__(self, data: bytes = b"", credentials: tuple[int, int, int] | None = None) -> None:
        self.data = data
        self.credentials = credentials
        self.descriptors: list[int] = []

    def close(self) -> None:
        """Close the descriptors: nothing is done with them."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


def connect(path: str) -> _socket.socket:
    """A connection to a socket of the pipe directory; OSError when there is none or it may not be written to."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        connection.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _packet(
    connection: _socket.socket, size: int, flags: int
) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
    try:
        return connection.recvmsg(size, _ANCILLARY, flags)
    except ConnectionResetError:  # the peer closed with unread messages; reported once, before its own messages
        return connection.recvmsg(size, _ANCILLARY, flags)


def receive(connection: _socket.socket, size: int = SIZE) -> Message:
    """Wait for the next packet and return it. A reset counts as the end, after all packets that were sent before."""
    return _read(connection, size, 0) or Message()


def arrived(connection: _socket.socket, size: int) -> Message | None:
    """Return the next packet, or None if none has come."""
    return _read(connection, size, _socket.MSG_DONTWAIT)


def _read(connection: _socket.socket, size: int, flags: int) -> Message | None:
    try:
        data, ancillary, _, _ = _packet(connection, size, flags | _socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        return Message()
    message = Message(data)
    message.descriptors += came_along(ancillary, _socket.SCM_RIGHTS)
    if words := came_along(ancillary, _socket.SCM_CREDENTIALS):
        message.credentials = (words[0], words[1], words[2])
    return message


def came_along(ancillary: list[tuple[int, int, bytes]], wanted: int) -> list[int]:
    """Return the descriptors of a message, like mpsagent.linux.descriptors, whose imports take too long here."""
    found = [one for level, kind, one in ancillary if (level, kind) == (_socket.SOL_SOCKET, wanted)]
    return [int.from_bytes(one[at : at + 4], "little") for one in found for at in range(0, len(one) - 3, 4)]


def send(connection: _socket.socket, data: bytes, descriptor: int | None = None) -> bool:
    """Send a packet, with a descriptor if one is given. Return False if the connection is closed."""
    rights = [] if descriptor is None else [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptor.to_bytes(4, "little"))]
    try:
        connection.sendmsg([data], rights)
    except OSError:
        return False
    return True


def send_credentials(connection: _socket.socket, data: bytes) -> bool:
    """Send a packet with this process's pid, user and group. Return False if the connection is closed."""
    own = b"".join(number.to_bytes(4, "little") for number in (os.getpid(), os.getuid(), os.getgid()))
    try:
        connection.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_CREDENTIALS, own)])
    except OSError:
        return False
    return True


def greeted(connection: _socket.socket) -> bool:
    """Wait for the greeting, as long as it takes; False at the end. NVIDIA's programs look at its length only."""
    message = receive(connection)
    message.close()
    return len(message.data) == len(GREETING)


def introduce(connection: _socket.socket, kind: bytes) -> bool:
    """Wait for the greeting, then send the credentials and the kind of peer. Return False without a greeting."""
    if not greeted(connection):
        return False
    send_credentials(connection, CREDENTIALS)
    send(connection, kind)
    return True


def answer(connection: _socket.socket) -> _socket.socket | None:
    """The daemon's answer, as long as it takes: the connection to the server; None when anything else comes (G7)."""
    message = receive(connection)
    if message.data != DESCRIPTOR or len(message.descriptors) != 1:
        message.close()
        return None
    return _socket.socket(fileno=message.descriptors[0])


def meet(connection: _socket.socket, context: int, device: int) -> int | None:
    """The client's part of the handshake with its server: the status that it ends with; None when the server goes."""
    while (message := receive(connection)).data != READY:
        message.close()
        if not message.data:
            return None
    send_credentials(connection, CREDENTIALS)
    send(connection, context.to_bytes(4, "little"))
    send(connection, device.to_bytes(4, "little"))
    status = receive(connection, 4).data
    return int.from_bytes(status, "little") if len(status) == 4 else None


def send_status(connection: _socket.socket, status: int) -> None:
    """0, or a CUDA error: a server's last word of the handshake, and the client's acknowledgement to the daemon."""
    send(connection, word(status))


def hung_up(connection: _socket.socket) -> bool:
    """Return True if the peer has closed the connection, even if unread messages remain."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
