"""The connections of CUDA clients that wait: their sockets, what the agent was told of them, their place in the
store."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from mpsagent.gate.connection import Connection
from mpsagent.gate.handshake import Mark
from mpsagent.gate.queue import Queue
from mpsagent.gate.store import DescriptorStore
from mpsagent.linux import peers, proc
from mpsagent.linux.channel import take
from mpsagent.linux.sent_descriptors import let_go, look_first
from mpsagent.mps.rendezvous import CREDENTIALS, Kind, kind_bytes
from mpsagent.wire import link

UNSEEN = (
    "its process is in a pid namespace that cannot be seen from here, so its end would not be noticed; run mpsagent "
    "in the host's pid namespace (hostPID, --pid=host)"
)
MOST_EXTRA = 64
Tell = Callable[[link.FromGate, Callable[[], int | None] | None], None]


@dataclass(eq=False, repr=False)
class Holding:
    """``special`` is offered what happens at a socket first: a message, or nothing for its end; it says True when it
    was meant. ``place`` says for which instance alone a connection asks, or None, and in which one it waits."""

    loop: asyncio.AbstractEventLoop
    queue: Queue
    _store: DescriptorStore
    _tell: Tell
    _special: Callable[[Connection, bytes], bool]
    _place: Callable[[Connection], tuple[str | None, str | None]]
    _changed: Callable[[str | None], None]
    _connections: dict[int, Connection] = field(default_factory=dict, init=False)

    def get(self, number: int) -> Connection | None:
        return self._connections.get(number)

    def connections(self) -> list[Connection]:
        return list(self._connections.values())

    def knocks(self) -> Iterator[tuple[link.Knock, Callable[[], int | None]]]:
        """In order of arrival, each with a way to its pidfd."""
        for number, connection in sorted(self._connections.items()):
            held, knock = self.queue.get(number), connection.knock
            if held is not None and knock is not None:
                yield replace(knock, instance=held.instance, asked=held.asked), self._pidfd_of(connection)

    def hold(self, connection: Connection) -> None:
        """A CUDA client that has said all it has to say."""
        peer = connection.peer
        why = self.queue.full_for(peer.uid) if peer.pid > 0 else UNSEEN
        if why is not None:
            self.refused(connection, why)
            self.close(connection)
            return
        if not connection.stored:
            connection.stored = self._store.keep(connection.name, connection.sock.fileno())
        self._connections[connection.number] = connection
        held = connection.held()
        held.asked, held.instance = self._place(connection)
        passed = self.queue.passed(held.process)
        if passed is not None and not held.may_wait(passed.instance):
            self.refused(connection, f"its process belongs to instance {passed.section}, and asks for {held.asked}")
            self.close(connection)
            return
        self.queue.add(held)
        connection.knock = knock = link.Knock(
            connection.number,
            peer.pid,
            peer.uid,
            peer.gid,
            connection.start,
            connection.since,
            proc.cgroup(peer.pid),
            proc.namespace(peer.pid, "pid"),
            proc.command(peer.pid),
            held.instance,
            held.asked,
            connection.never,
        )
        self.watch(connection)
        self._tell(knock, self._pidfd_of(connection))
        self._changed(held.instance)

    @staticmethod
    def _pidfd_of(connection: Connection) -> Callable[[], int | None]:
        return lambda: peers.peer_pidfd(connection.sock, connection.peer.pid, connection.start)

    def watch(self, connection: Connection) -> None:
        self.loop.add_reader(connection.sock.fileno(), self._read, connection)

    def unwatch(self, connection: Connection) -> None:
        """It has hung up, and that has been told."""
        self.loop.remove_reader(connection.sock.fileno())

    def _read(self, connection: Connection) -> None:
        """A held client has nothing to say."""
        data = first_unread(connection.sock)
        if data is None:
            return
        if not self._special(connection, data):
            if not data:
                self.left(connection)
            elif connection.never:
                self._hear(connection)
            elif data not in _GREETING and connection.mark is Mark.HELD:
                self.refused(connection, "sent something while it was held")
                self.close(connection)
        if data and connection.sock.fileno() >= 0:
            _throw_away(connection.sock)

    def _hear(self, connection: Connection) -> None:
        """Take a message of a connection that is never handed over. What else its kind says is not known, and if it is
        closed, its program runs without MPS."""
        connection.extra += 1
        if connection.extra > MOST_EXTRA:
            self.refused(connection, "sent one message after the other while it was held")
            self.close(connection)

    def look(self, connection: Connection) -> None:
        """At what may have come just now."""
        if connection.sock.fileno() >= 0:
            self._read(connection)

    def left(self, connection: Connection) -> None:
        """Its client, or its process, has gone, or it is to go."""
        self._tell(link.Left(connection.number), None)
        self.close(connection)

    def refused(self, connection: Connection, why: str) -> None:
        pid, uid = connection.peer.pid, connection.peer.uid
        cgroup = proc.cgroup(pid) if pid > 0 else None
        self._tell(link.Refused(connection.number, pid, uid, why, connection.start, cgroup), None)

    def release(self, connection: Connection) -> None:
        """It does not wait any more, but is still ours."""
        self.queue.remove(connection.number)
        self._connections.pop(connection.number, None)

    def close(self, connection: Connection) -> None:
        """It is not ours any more, for whatever reason."""
        self.release(connection)
        if connection.sock.fileno() >= 0:
            self.loop.remove_reader(connection.sock.fileno())
            _throw_away(connection.sock)
        let_go(connection.sock)
        if connection.stored:
            self._store.drop(connection.name)
            connection.stored = False


def first_unread(sock: socket.socket) -> bytes | None:
    """The next message of a client, which stays in the socket: a gate that is killed over it is followed by one that
    has to find it there. Empty at the end of the connection; None when there is nothing yet."""
    for _ in range(2):
        try:
            look_first(sock)
            data, _, _ = take(sock, 64, peek=True)
        except (BlockingIOError, InterruptedError):
            return None
        except ConnectionResetError:  # it has left something unread, which is said once, ahead of its last words
            continue
        except OSError:
            return b""
        return data
    return b""


def _throw_away(sock: socket.socket) -> None:
    """Left unread, it would reset the connection at its end."""
    with suppress(OSError):
        look_first(sock)
        sock.recv(1)


_GREETING = (CREDENTIALS, kind_bytes(Kind.CLIENT))
"""An earlier gate may have left these in the socket."""
