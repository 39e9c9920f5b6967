"""The gate: puts queue, lane, public sockets, front-ends, store and link together. A thin loop around pure parts."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpsagent.gate import handover, identity, link, state
from mpsagent.gate.connection import Connection, mark_of, restored
from mpsagent.gate.frontends import FrontEnds
from mpsagent.gate.handovers import HandOvers
from mpsagent.gate.handshake import Mark
from mpsagent.gate.holding import Holding, first_unread
from mpsagent.gate.lane import PRIVILEGED, Lane
from mpsagent.gate.link import Admissions
from mpsagent.gate.linkserver import LinkServer, Outgoing
from mpsagent.gate.processes import KnownProcesses
from mpsagent.gate.public import PublicSockets
from mpsagent.gate.queue import KnownProcess, Process, Queue
from mpsagent.gate.relays import Relays
from mpsagent.gate.store import ConnectionName, DaemonName, KnownName, Store, parse_name
from mpsagent.mps.rendezvous import HELLO, Credentials

STATUS_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Where everything is. ``link`` None: no agent (``admissions`` are then what counts)."""

    daemon: Path
    state: Path
    link: Path | None = None
    admissions: Admissions | None = None
    patience: handover.Patience = field(default_factory=handover.Patience)


def say(text: str) -> None:
    """One line for the journal."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


class Gate:
    """``inherited`` are the descriptors that came from the service manager, with their names."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: Options, inherited: list[tuple[str, int]]) -> None:
        self._loop = loop
        self._options = options
        self._started = time.time()
        self._greeting: link.HandshakeSeen | None = None
        self._unapplied: int | None = None
        self._link: LinkServer | None = None
        self._status = ""
        self._watchdog = "WATCHDOG_USEC" in os.environ
        self._store = Store(loop)
        self._queue = Queue()
        self._lane = Lane(loop, options.daemon, lambda: self._hand_overs.begin(), self._daemon_greets)
        self._processes = KnownProcesses(loop, self._queue, self._store, self._process_ended)
        self._holding = Holding(
            loop,
            self._queue,
            self._store,
            self._tell,
            lambda connection, data: self._hand_overs.special(connection, data),
            self._lane.pump,
        )
        self._hand_overs = HandOvers(
            self._lane, self._holding, self._processes, self._store, options.patience, self._tell, self._applied
        )
        self._front_ends = FrontEnds(loop, self._lane, self._front_end_command)
        self._public = PublicSockets(
            loop,
            self._store,
            self._holding.hold,
            self._front_ends.add,
            lambda connection: self._relays.offer(connection),
            self._holding.refused,
        )
        self._relays = Relays(loop, self._lane, self._store, self._public.greet)
        self._start(inherited)

    # --- start -------------------------------------------------------------------------------------------------------

    def _start(self, inherited: list[tuple[str, int]]) -> None:
        self._hand_overs.admissions = self._first_admissions()
        if self._options.link is not None:
            self._link = LinkServer(self._loop, self._options.link, self._sync, self._from_agent, say)
        listeners = self._restore(inherited)
        for name, descriptor in listeners:
            self._listen(name, descriptor)
        self._lane.quiet = False
        self._lane.probe()
        self._store.tell("READY=1", f"STATUS={self._describe()}")
        self._loop.call_later(STATUS_EVERY, self._tell_status)
        self._lane.pump()

    def _first_admissions(self) -> Admissions:
        if self._options.admissions is not None:
            return self._options.admissions
        try:
            return state.load(self._options.state) or Admissions()
        except state.StateError as error:
            say(f"{error}; everyone is held until the agent says more")
            return Admissions()

    def _restore(self, inherited: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """What an earlier gate has left in the store; the rest is returned. Processes first, because their connections
        go first; the hand-over that was cut last, because it needs its connection."""
        kept = []
        for name, descriptor in inherited:
            found = parse_name(name)
            if found is None:
                continue
            self._store.adopt([name])
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            if str(found) == name and is_socket is not isinstance(found, KnownName):
                kept.append((found, descriptor))
            else:
                say(f"what lies in the descriptor store as {name!r} is not that; it is dropped")
                self._store.drop(name)
                os.close(descriptor)
        for found, descriptor in kept:
            if isinstance(found, KnownName) and not self._processes.restore(str(found), found, descriptor):
                self._store.drop(str(found))
        last_words: dict[int, bytes] = {}
        passing = []
        connections = [(found, descriptor) for found, descriptor in kept if isinstance(found, ConnectionName)]
        for found, descriptor in sorted(connections, key=lambda one: one[0].number):
            connection = self._restore_connection(found, socket.socket(fileno=descriptor), last_words)
            if connection is not None:
                passing.append(connection)
        daemons = [(found, descriptor) for found, descriptor in kept if isinstance(found, DaemonName)]
        self._hand_overs.resume([(found, socket.socket(fileno=one)) for found, one in daemons], last_words)
        under_way = set(self._hand_overs.under_way())
        for connection in passing:
            if connection not in under_way and self._holding.get(connection.number) is not None:
                self._hand_overs.resume_passing(connection)
        return [(name, descriptor) for name, descriptor in inherited if parse_name(name) is None]

    def _restore_connection(
        self, found: ConnectionName, sock: socket.socket, last_words: dict[int, bytes]
    ) -> Connection | None:
        """The connection, if its client may have its descriptor already; ``last_words`` gets what it has said since."""
        self._public.numbers.seen(found.number)
        mark = mark_of(sock)
        if mark >= Mark.PASSING:
            sock.setblocking(False)
            last_words[found.number] = first_unread(sock) or b""
        connection = restored(sock, found)
        if connection is None or self._holding.get(found.number) is not None:
            self._store.drop(str(found))
        elif mark in (Mark.NEW, Mark.GREETED):
            self._public.restore(connection)
        else:
            self._holding.hold(connection)
            return connection if mark >= Mark.PASSING else None
        return None

    def _listen(self, name: str, descriptor: int) -> None:
        listener = socket.socket(fileno=descriptor)
        try:
            address = listener.getsockname()
            place = address if isinstance(address, str) else ""
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("it does not listen")
            self._public.listen(listener, privileged=PRIVILEGED in (name, Path(place).name))
        except OSError as error:
            say(f"the socket {name!r} that the service manager gave is of no use: {error}")
            listener.close()

    # --- what happens ------------------------------------------------------------------------------------------------

    def _process_ended(self, known: KnownProcess) -> None:
        self._hand_overs.process_ended(known.process)
        self._lane.pump()  # there is room for one more

    def _daemon_greets(self, greeting: bytes, pid: int) -> None:
        known = greeting == HELLO
        self._greeting = link.HandshakeSeen(known, greeting[:64].hex(), pid or None)
        self._tell(self._greeting)
        if known:
            self._loop.call_soon(self._relays.again)
        self._loop.call_soon(self._lane.pump)

    def _front_end_command(self, who: Credentials, command: str, at: float, refused: bool) -> None:
        self._tell(link.FrontEnd(who.pid, who.uid, command, at, refused))

    def _applied(self) -> None:
        """Tells the agent that its admissions are in force, once no hand-over that they do not allow is under way."""
        number, table = self._unapplied, self._hand_overs.admissions
        if number is None:
            return
        if all(table.open and table.user(one.peer.uid) is not None for one in self._hand_overs.under_way()):
            self._unapplied = None
            self._tell(link.Applied(number))

    # --- link and status ---------------------------------------------------------------------------------------------

    def _tell(self, message: link.FromGate, pidfd: Callable[[], int | None] | None = None) -> None:
        if self._link is not None:
            self._link.send(message, pidfd)

    def _sync(self) -> Iterator[Outgoing]:
        yield link.Hello(os.getpid(), self._started), None
        if self._greeting is not None:
            yield self._greeting, None
        yield from self._holding.knocks()
        for one in self._hand_overs.under_way():
            yield link.Handing(one.number, one.peer.pid, one.peer.uid, time.time()), None
        for known in self._queue.known():
            message = link.Known(
                known.pid,
                known.uid,
                known.gid,
                known.start,
                known.since,
                known.limits,
                identity.cgroup(known.pid),
                known.connections,
            )
            yield message, self._pidfd_of(known.process)
        yield link.Synced(), None

    def _pidfd_of(self, process: Process) -> Callable[[], int | None]:
        return lambda: self._processes.pidfd(process)

    def _from_agent(self, message: link.FromAgent) -> None:
        match message:
            case Admissions():
                self._hand_overs.admit(message)
                self._unapplied = message.number
                self._applied()
                try:
                    state.save(self._options.state, message)
                except (OSError, link.LinkError) as error:
                    say(f"the admissions cannot be kept in {self._options.state}: {error}")
            case link.Refuse():
                connection, current = self._holding.get(message.connection), self._hand_overs.current
                if connection is not None and (current is None or current.connection is not connection):
                    self._holding.close(connection)
            case link.Release():
                self._processes.release((message.pid, message.start))
        self._lane.pump()

    def _describe(self) -> str:
        return f"{len(self._queue)} held, {sum(1 for _ in self._queue.known())} known"

    def _tell_status(self) -> None:
        text = self._describe()
        if text != self._status:
            self._status = text
            self._store.tell(f"STATUS={text}")
        if self._watchdog:
            self._store.tell("WATCHDOG=1")
        self._loop.call_later(STATUS_EVERY, self._tell_status)
