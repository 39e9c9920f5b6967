"""Server processes as the control daemon sees them."""

import _socket
import fcntl
import os

from mpsagent_sim import rendezvous, wire


class Server:
    """A server process as the daemon sees it."""

    def __init__(self, pid: int, uid: int) -> None:
        self.pid = pid
        self.uid = uid
        # out of the way: what is free below is for connections, as in the real daemon (X28)
        self.pidfd = fcntl.fcntl(fd := os.pidfd_open(pid), fcntl.F_DUPFD_CLOEXEC, 64)
        os.close(fd)
        self.ready = False
        self.failed = False  # it has reported that it cannot start
        self.lines: wire.Lines | None = None
        self.dismissed = False
        self.gone_at: float | None = None

    def ask(self, question: str) -> str | None:
        """Return the answer to a question, without a limit of time; None if the server died meanwhile."""
        if self.lines is None or not wire.send(self.lines.connection, question):
            return None
        return self.lines.wait()

    def take(self, client: _socket.socket, pid: int) -> None:
        """Hand a client over: one end of a new pair of sockets to the server, the other one to the client.

        Then wait for the client's word that the two have met, or for its end: a hung server holds up the daemon (X15).
        """
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
        # a server that has died and is not noticed yet cannot take it: the client is turned away
        taken = self.lines is not None and wire.send(self.lines.connection, f"ATTACH {pid}", ours.fileno())
        ours.close()
        told = taken and rendezvous.send(client, rendezvous.DESCRIPTOR, theirs.fileno())
        theirs.close()
        if told:
            rendezvous.receive(client).close()
