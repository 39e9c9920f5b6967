"""What stands at a control socket in the tests: a relay in front of a daemon, and sockets that turn clients away."""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

Credentials = tuple[int, int, int]


def packet(connection: socket.socket) -> tuple[bytes, Credentials | None, list[int]]:
    """One packet: its bytes, its sender's pid, uid and gid, and descriptors."""
    data, ancillary, _, _ = connection.recvmsg(8192, 512)
    who: Credentials | None = None
    descriptors = array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_CREDENTIALS:
            who = struct.unpack("iII", content[:12])
        elif kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
    return data, who, list(descriptors)


def say(connection: socket.socket, data: bytes, who: Credentials | None = None) -> None:
    """One packet, as another user if root says so."""
    content = [] if who is None else [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iII", *who))]
    connection.sendmsg([data], content)


def connect(path: Path) -> socket.socket:
    """A connection that has not read its greeting."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    connection.settimeout(60)
    connection.connect(str(path))
    return connection


def introduced(path: Path, kind: bytes, who: Credentials | None = None) -> socket.socket:
    """A connection that has said who and what it is."""
    connection = connect(path)
    assert packet(connection)[0] == b"OUTBHELL\0"
    say(connection, b"OUTBCRED\0", who or (os.getpid(), os.getuid(), os.getgid()))
    say(connection, kind, who)
    return connection


@contextmanager
def listening(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[None]:
    """A socket at `path` for everybody; each connection is served in a thread of its own and closed after that."""
    path.parent.mkdir(exist_ok=True)
    path.parent.chmod(0o755)

    def guarded(connection: socket.socket) -> None:
        with closing(connection), suppress(OSError):
            serve(connection)

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=guarded, args=(listener.accept()[0],), daemon=True).start()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(64)
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


class Relay:
    """Passes clients on to a daemon, one at a time, each after `before(pid, uid)`; `open` lets them through."""

    def __init__(self, daemon: Path, before: Callable[[int, int], None] = lambda pid, uid: None) -> None:
        self.daemon, self.before = daemon, before
        self.open = threading.Event()
        self.one_at_a_time = threading.Lock()
        self.held: list[Credentials] = []
        self.seen: list[tuple[int, bytes]] = []

    def serve(self, client: socket.socket) -> None:
        say(client, b"OUTBHELL\0")
        first, who, _ = packet(client)
        if first != b"OUTBCRED\0" or who is None:
            self.seen.append((0, first))
            return
        kind, _, _ = packet(client)
        self.seen += [(who[0], first), (who[0], kind)]
        self.held.append(who)
        self.open.wait(60)
        with self.one_at_a_time:
            self.before(who[0], who[1])
            with introduced(self.daemon, kind, who) as daemon:
                answer, _, descriptors = packet(daemon)
                client.sendmsg([answer], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
                for descriptor in descriptors:
                    os.close(descriptor)
                last, _, _ = packet(client)
                self.seen += [(who[0], answer), (who[0], last)]
                self.acknowledged(daemon)
                say(daemon, last, who)

    def acknowledged(self, daemon: socket.socket) -> None:
        """A client has met its server, and the daemon waits to hear of it."""
