"""Server processes as the control daemon sees them, and who is at the other end of a socket."""

import _socket
import fcntl
import os
import select
import struct

from mpsagent.sim import wire


def peer(connection: _socket.socket) -> tuple[int, int, int]:
    """pid, uid, gid of the other end, as the kernel recorded them."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
    return pid, uid, gid


class Server:
    """A server process as the daemon sees it."""

    def __init__(self, pid: int, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        # out of the way: what is free below is for connections, as in the real daemon (X28)
        self.pidfd = fcntl.fcntl(fd := os.pidfd_open(pid), fcntl.F_DUPFD_CLOEXEC, 64)
        os.close(fd)
        self.ready = False
        self.lines: wire.Lines | None = None
        self.dismissed = False
        self.gone_at: float | None = None

    def ask(self, question: str) -> str | None:
        """One question and its answer, however long that takes; None when the server died over it."""
        if self.lines is None or not wire.send(self.lines.connection, question):
            return None
        while (line := self.lines.wait()) == "ATTACHED":
            pass
        return line

    def take(self, connection: _socket.socket, order: str) -> None:
        """Hand a client over, and wait for the server or for the client's end: a hung server holds the daemon (X15)."""
        if self.lines is None or not wire.send(self.lines.connection, order, connection.fileno()):
            return
        poll = select.poll()
        poll.register(self.lines.connection.fileno(), select.POLLIN)
        poll.register(connection.fileno(), 0)
        while not self.lines.ended:
            ready = {fd for fd, _ in poll.poll()}
            if self.lines.connection.fileno() not in ready:
                return
            self.lines.read()
            if self.lines.pop() == "ATTACHED":
                return
