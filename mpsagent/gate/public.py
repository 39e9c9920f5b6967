"""The public sockets: accepts, greets, and listens to each peer until it is clear what it is. Every peer is hostile."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from mpsagent.gate.connection import NEVER, Connection, Numbers, accepted
from mpsagent.gate.counts import Counts
from mpsagent.gate.handshake import Mark
from mpsagent.gate.pacing import Account, Rates
from mpsagent.gate.store import DescriptorStore
from mpsagent.linux.channel import take
from mpsagent.linux.descriptors import SO_PASSCRED
from mpsagent.linux.sent_descriptors import accept_descriptors, let_go, look_first, no_room
from mpsagent.mps.rendezvous import HELLO, Kind

AT_A_TIME = 32
"""Connections accepted before everything else has its turn."""
MOST_UNFINISHED_OF_A_USER = 1024
MOST_UNFINISHED = 4096
"""Peers that have not said yet what they are. An honest one needs milliseconds, on a busy machine seconds, and a crowd
that starts together is here all at once; who is closed is refused. So none is for its slowness: as many as one user may
have held, and beyond that its oldest goes."""
UNSURE = 0.2
"""Seconds after which a restored connection that has said nothing is taken for one that was never greeted."""
STORED = Rates(rate=100, burst=200, rate_all=400, burst_all=800)
"""Connections a user may bring a second, and at once, that are stored before they have said what they are, and all
users together, because one may come with thousands of uids. Service managers must not be flooded by one user; what is
beyond is stored as soon as it is held."""
SHORTAGE_PAUSE = 0.1

_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


@dataclass(eq=False, repr=False)
class PublicSockets:
    """``client`` gets a connection that is held, ``front_end`` a front-end's; ``relay`` is offered each new one before
    its greeting and says True when it takes it."""

    _loop: asyncio.AbstractEventLoop
    _store: DescriptorStore
    _client: Callable[[Connection], None]
    _front_end: Callable[[Connection], None]
    _relay: Callable[[Connection], bool]
    _refused: Callable[[Connection, str], None]

    def __post_init__(self) -> None:
        self.numbers = Numbers()
        self._unfinished: set[Connection] = set()
        self._of_user: dict[int, dict[Connection, None]] = {}
        self._counts = Counts()
        self._stored = Account(STORED)

    def listen(self, listener: socket.socket, *, privileged: bool) -> None:
        """``listener`` is bound and listens. Raises OSError."""
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)
        accept_descriptors(listener, yes=False)
        self._watch_listener(listener, privileged=privileged)

    def _watch_listener(self, listener: socket.socket, *, privileged: bool) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._accept, listener, privileged)

    # --- new connections ---

    def _accept(self, listener: socket.socket, privileged: bool) -> None:
        for _ in range(AT_A_TIME):
            if self._store.congested:  # what is accepted now would be lost with us; in the backlog it is safe
                self._loop.remove_reader(listener.fileno())
                self._store.when_free(lambda: self._watch_listener(listener, privileged=privileged))
                return
            if not privileged and no_room():  # it stays in the backlog, where its client waits
                self._accept_later(listener, privileged)
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in _SHORTAGE:
                    self._accept_later(listener, privileged)
                    self._drop_oldest()
                return
            try:
                connection = accepted(sock, self.numbers.new(), self._keep, privileged=privileged)
            except OSError:
                let_go(sock)
                continue
            if not self._relay(connection):
                self.greet(connection)

    def _accept_later(self, listener: socket.socket, privileged: bool) -> None:
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(SHORTAGE_PAUSE, lambda: self._watch_listener(listener, privileged=privileged))

    def _keep(self, connection: Connection) -> None:
        """Before the greeting: a gate that dies now is followed by one that knows this client."""
        if self._may_store(connection.peer.uid):
            connection.stored = self._store.keep(connection.name, connection.sock.fileno())

    def greet(self, connection: Connection) -> None:
        try:
            connection.sock.send(HELLO)
        except OSError:  # it has gone already
            self._close(connection)
            return
        connection.mark = Mark.GREETED
        self._watch(connection)

    def restore(self, connection: Connection) -> None:
        """One that an earlier gate had not heard out. Whether it was greeted shows in what lies unread; one that stays
        silent and has nothing to read was not, or has just read it."""
        if connection.mark is Mark.NEW and not connection.unread_by_us() and not connection.unread_by_peer():
            self._loop.call_later(UNSURE, self._greet_late, connection)
        self._watch(connection)

    def _greet_late(self, connection: Connection) -> None:
        if connection in self._unfinished and connection.mark is Mark.NEW and not connection.handshake.heard:
            with suppress(OSError):
                connection.sock.send(HELLO)
            connection.mark = Mark.GREETED

    def _may_store(self, uid: int) -> bool:
        now = self._loop.time()
        allowed = max(self._stored.free_from(uid), self._stored.all_free_from()) <= now
        if allowed:
            self._stored.charge(uid, 1, now)
        return allowed

    # --- until it is clear what they are ---

    def _watch(self, connection: Connection) -> None:
        uid = connection.peer.uid
        line = self._of_user.setdefault(uid, {})
        line[connection] = None
        self._counts.add(uid)
        self._unfinished.add(connection)
        self._loop.add_reader(connection.sock.fileno(), self._read, connection)
        if len(line) > MOST_UNFINISHED_OF_A_USER:
            self._close(next(iter(line)))
        elif len(self._unfinished) > MOST_UNFINISHED:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """The oldest connection of the user who has most of them."""
        most = self._counts.most()
        if most is not None:
            self._close(next(iter(self._of_user[most])))

    def _forget(self, connection: Connection) -> None:
        if connection in self._unfinished:
            self._unfinished.remove(connection)
            self._loop.remove_reader(connection.sock.fileno())
            line = self._of_user[connection.peer.uid]
            del line[connection]
            self._counts.remove(connection.peer.uid)
            if not line:
                del self._of_user[connection.peer.uid]

    def _close(self, connection: Connection) -> None:
        self._forget(connection)
        if connection.stored:
            self._store.drop(connection.name)
        let_go(connection.sock)

    def _read(self, connection: Connection) -> None:
        try:
            while connection in self._unfinished:
                look_first(connection.sock)
                if connection.handshake.expects_kind():
                    mark = connection.handshake.mark(connection.sock.recv(64, socket.MSG_PEEK))
                    if mark is not None:  # before it is taken out, so that it cannot get lost between
                        connection.mark = mark
                data, who, _ = take(connection.sock, 64)
                if not data:
                    self._close(connection)
                    return
                self._hear(connection, connection.handshake.message(data, who))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._close(connection)
        except Exception as error:  # a peer that finds a fault of ours ends its own connection, and nothing else
            self._refused(connection, f"an error of the gate's own: {error!r}")
            self._close(connection)

    def _hear(self, connection: Connection, found: Kind | str | None) -> None:
        if isinstance(found, str):
            self._refused(connection, found)
            self._close(connection)
        elif found is not None:
            self._forget(connection)
            if found is not Kind.FRONT_END:
                connection.never = NEVER.get(found, "")
                self._client(connection)
            else:
                if connection.stored:
                    self._store.drop(connection.name)
                    connection.stored = False
                self._front_end(connection)
