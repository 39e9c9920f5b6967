"""The gate: puts queue, lane, public sockets, front-ends, store and link together. A thin loop around pure parts."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpsagent.gate import handover, state
from mpsagent.gate.connection import Connection, mark_of, restored
from mpsagent.gate.frontends import FrontEnds
from mpsagent.gate.handovers import Instance
from mpsagent.gate.handshake import Mark
from mpsagent.gate.holding import Holding, first_unread
from mpsagent.gate.instance_directories import OwnDirectories, address_of, own_root
from mpsagent.gate.instances import Instances
from mpsagent.gate.lane import Lane
from mpsagent.gate.linkserver import LinkServer, Outgoing
from mpsagent.gate.processes import KnownProcesses
from mpsagent.gate.public import PublicSockets
from mpsagent.gate.queue import KnownProcess, Process, Queue
from mpsagent.gate.relays import Relays
from mpsagent.gate.store import ConnectionName, DaemonName, DescriptorStore, KnownName, parse_name
from mpsagent.linux import proc
from mpsagent.linux.peers import Credentials
from mpsagent.mps.rendezvous import PRIVILEGED
from mpsagent.wire import codec, link
from mpsagent.wire.link import Admissions

STATUS_EVERY = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """Where everything is. ``daemon``: pipe directory of the first instance's control daemon. ``link`` None: no agent
    (``admissions`` are then what counts)."""

    daemon: Path
    state: Path
    link: Path | None = None
    admissions: Sequence[Admissions] | None = None
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
        self._started = time.monotonic()
        self._link: LinkServer | None = None
        self._status = ""
        self._started_up = False
        self._kept: Sequence[str] | None = None
        """The instances that the agent has; None: it has not said."""
        self._watchdog = "WATCHDOG_USEC" in os.environ
        self._store = DescriptorStore(loop)
        self._queue = Queue()
        self._processes = KnownProcesses(loop, self._queue, self._store, self._process_ended, self._gave_up)
        self._holding = Holding(
            loop, self._queue, self._store, self._tell, self._special, self._place_of, self._changed
        )
        self._instances = Instances(options.daemon, self._make)
        self._own = OwnDirectories(own_root(options.daemon), self._store, self._listen, say)
        self._front_ends = FrontEnds(loop, self._lane_of, self._front_end_command)
        self._public = PublicSockets(
            loop,
            self._store,
            self._hold,
            self._front_ends.add,
            lambda connection: self._relays.offer(connection),
            self._holding.refused,
        )
        self._relays = Relays(loop, self._lane_of, self._store, self._public.greet)
        self._start(inherited)

    def _make(self, name: str, directory: Path) -> Instance:
        instance = Instance(
            name, directory, self._holding, self._processes, self._store, self._options.patience, self._tell,
            lambda: self._relays.again(),
        )  # fmt: skip
        if self._started_up:
            instance.lane.quiet = False
            instance.lane.probe()
        return instance

    # --- start -------------------------------------------------------------------------------------------------------

    def _start(self, inherited: list[tuple[str, int]]) -> None:
        for table in self._first_admissions():
            instance = self._instances.get(table.instance)
            instance.admissions = replace(table, instance=instance.name)
        if self._options.link is not None:
            self._link = LinkServer(self._loop, self._options.link, self._sync, self._from_agent, say)
        listeners = [(name, descriptor) for name, descriptor in inherited if parse_name(name) is None]
        for name, descriptor in listeners:
            self._own.restored(name, address_of(descriptor))
        self._restore(inherited)
        for name, descriptor in listeners:
            self._listen(name, descriptor)
        self._started_up = True
        for instance in self._instances:
            instance.lane.quiet = False
            instance.lane.probe()
        self._store.tell("READY=1", f"STATUS={self._describe()}")
        self._loop.call_later(STATUS_EVERY, self._tell_status)
        self._pump()

    def _first_admissions(self) -> Iterator[Admissions]:
        if self._options.admissions is not None:
            yield from self._options.admissions
            return
        for name in state.instances(self._options.state):
            try:
                table = state.load(self._options.state, name)
            except state.StateError as error:
                say(f"{error}; all clients are held until the agent is back")
            else:
                if table is not None and table.instance == name:
                    yield table

    def _restore(self, inherited: list[tuple[str, int]]) -> None:
        """What an earlier gate has left in the store. Processes first, because their connections go first; the
        hand-over that was cut last, because it needs its connection."""
        kept = []
        for name, descriptor in inherited:
            found = parse_name(name)
            if found is None:
                continue
            self._store.adopt([name])
            is_socket = stat.S_ISSOCK(os.fstat(descriptor).st_mode)
            if is_socket is not isinstance(found, KnownName):
                kept.append((found, descriptor))
            else:
                say(f"{name!r} of the descriptor store is not what its name says; it is dropped")
                self._store.drop(name)
                os.close(descriptor)
        processes = [(found, descriptor) for found, descriptor in kept if isinstance(found, KnownName)]
        processes.sort(key=lambda one: one[0].left)  # who passes again lies there twice for a moment
        for found, descriptor in processes:
            if not self._processes.restore(str(found), found, descriptor, self._instances.get(found.instance).name):
                self._store.drop(str(found))
        last_words: dict[int, bytes] = {}
        passing = []
        connections = [(found, descriptor) for found, descriptor in kept if isinstance(found, ConnectionName)]
        for found, descriptor in sorted(connections, key=lambda one: one[0].number):
            connection = self._restore_connection(found, socket.socket(fileno=descriptor), last_words)
            if connection is not None:
                passing.append(connection)
        daemons: dict[Instance, list[tuple[DaemonName, socket.socket]]] = {}
        for found, descriptor in kept:
            if isinstance(found, DaemonName):
                instance = self._instances.get(found.instance)
                daemons.setdefault(instance, []).append((found, socket.socket(fileno=descriptor)))
        for instance, connected in daemons.items():
            instance.resume(connected, last_words)
        for connection in passing:
            if not self._handing(connection) and self._holding.get(connection.number) is not None:
                self._where(connection).resume_passing(connection)

    def _restore_connection(
        self, found: ConnectionName, sock: socket.socket, last_words: dict[int, bytes]
    ) -> Connection | None:
        """The connection, if its client may have its descriptor already; ``last_words`` gets what it has said since."""
        self._public.numbers.seen(found.number)
        mark = mark_of(sock)
        if mark.may_have_descriptor:
            sock.setblocking(False)
            last_words[found.number] = first_unread(sock) or b""
        connection = restored(sock, found)
        if connection is None or self._holding.get(found.number) is not None:
            self._store.drop(str(found))
        elif mark in (Mark.NEW, Mark.GREETED):
            self._public.restore(connection)
        else:
            self._holding.hold(connection)
            return connection if mark.may_have_descriptor else None
        return None

    def _listen(self, name: str, descriptor: int) -> None:
        """Listen at a socket. Drop any other descriptor, such as a process that another release's gate has stored."""
        listener = None
        try:
            listener = socket.socket(fileno=descriptor)
            address = listener.getsockname()
            place = address if isinstance(address, str) else ""
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("it does not listen")
            self._public.listen(listener, privileged=PRIVILEGED in (name, Path(place).name))
        except OSError as error:
            say(f"the descriptor {name!r} that the service manager gave is of no use, and is dropped: {error}")
            self._store.adopt([name])
            self._store.drop(name)
            os.close(descriptor) if listener is None else listener.close()

    # --- what happens ------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        for instance in self._instances:
            instance.lane.pump()

    def _hold(self, connection: Connection) -> None:
        """Of a client. No user is kept out by others, however many they are."""
        for number in self._queue.crowding_out(connection.peer.uid):
            other = self._holding.get(number)
            if other is not None and not self._handing(other):
                whose = f"most of them are of user {other.peer.uid}: end some of their programs"
                why = f"{self._queue.most} connections wait, and {whose}"
                self._holding.refused(other, why)
                self._holding.close(other)
                break
        self._holding.hold(connection)

    def _changed(self, name: str | None) -> None:
        """A connection has come that waits there."""
        if name is not None:
            self._instances.get(name).lane.pump()

    def _process_ended(self, process: Process) -> None:
        for instance in self._instances:
            instance.process_ended(process)
            instance.lane.pump()  # there is room for one more

    def _gave_up(self, known: KnownProcess) -> None:
        """Tell the agent of a process without a context that no longer takes a share, and admit another one."""
        self._tell(link.NoContext(known.pid, known.start, known.instance))
        self._pump()

    def _front_end_command(self, lane: Lane, who: Credentials, command: str, at: float, refused: bool) -> None:
        name = next((one.name for one in self._instances if one.lane is lane), "")
        self._tell(link.FrontEnd(who.pid, who.uid, command, at, refused, name))

    def _special(self, connection: Connection, data: bytes) -> bool:
        if any(one.special(connection, data) for one in self._instances):
            return True
        if connection.mark.may_have_descriptor:
            self._where(connection).was_passed(connection)
            return True
        return False

    # --- which instance ----------------------------------------------------------------------------------------------

    def _place(self, uid: int) -> str | None:
        """Where a user's connections wait: the instance that admits the user. None: the agent has not said yet."""
        found = self._instances.of_user(uid)
        return None if found is None else found.name

    def _place_of(self, connection: Connection) -> tuple[str | None, str | None]:
        """The one instance that may serve this connection, None: each may; and where it waits."""
        uid = connection.peer.uid
        left = self._queue.left(connection.process)
        if self._own.on:
            asked = self._own.of(connection) or self._instances.first.name
        elif left is not None:
            asked = left.section
        else:
            return None, self._place(uid)
        users_own = self._instances.find(f"{asked}-u{uid}")  # apart
        return asked, asked if users_own is None or uid not in users_own.admissions.users else users_own.name

    def _lane_of(self, connection: Connection) -> Lane:
        """Where a user's front-ends are answered, who may have no clients."""
        asked, place = self._place_of(connection)
        name = place if asked is not None else self._queue.instance_of(connection.peer.uid) or place
        return (self._instances.find(name or "") or self._instances.first).lane

    def _use_own(self, names: Sequence[str]) -> None:
        """These instances have directories of their own, and those who wait belong where they came."""
        self._own.use(names)
        for connection in self._holding.connections():
            self._queue.ask(connection.number, *self._place_of(connection))

    def _where(self, connection: Connection) -> Instance:
        """Where a connection waits that an earlier gate had begun to hand over."""
        held = self._queue.get(connection.number)
        return self._instances.get((held.instance if held is not None else None) or "")

    def _handing(self, connection: Connection) -> bool:
        return self._instances.of_connection(connection) is not None

    def _forget(self, names: Sequence[str]) -> None:
        """Instances that are not named admit no one from now on, and go when no process is known there."""
        for instance in self._instances:
            if instance.name not in names:
                instance.admit(Admissions())
                for uid in self._queue.users_in(instance.name):
                    self._queue.place(uid, self._place(uid))
                self._queue.give_up(instance.name)
        self._kept = names
        self._drop_idle()
        state.forget(self._options.state, names)

    def _drop_idle(self) -> None:
        for instance in self._instances:
            if self._kept is None or instance.name in self._kept:
                continue
            if not self._queue.known_in(instance.name) and not any(instance.under_way()):
                self._instances.drop(instance.name)
                self._queue.drop(instance.name)

    # --- link and status ---------------------------------------------------------------------------------------------

    def _tell(self, message: link.FromGate, pidfd: Callable[[], int | None] | None = None) -> None:
        if self._link is not None:
            self._link.send(message, pidfd)

    def _sync(self) -> Iterator[Outgoing]:
        self._queue.told.clear()
        yield link.Hello(os.getpid(), self._started), None
        for instance in self._instances:
            if instance.greeting is not None:
                yield instance.greeting, None
        for known in self._queue.known():
            yield self._known(known)
        yield from self._holding.knocks()
        for instance in self._instances:
            for one in instance.under_way():
                yield link.Handing(one.number, one.peer.pid, one.peer.uid, time.monotonic(), instance.name), None
        yield link.Synced(), None

    def _known(self, one: KnownProcess) -> Outgoing:
        message = link.Known(
            one.pid, one.uid, one.gid, one.start, one.since, one.limits, proc.cgroup(one.pid), one.connections,
            one.instance, one.most, one.fail_safe, one.counts,
        )  # fmt: skip
        return message, self._pidfd_of(one.process)

    def _pidfd_of(self, process: Process) -> Callable[[], int | None]:
        return lambda: self._processes.pidfd(process)

    def _from_agent(self, message: link.FromAgent) -> None:
        match message:
            case Admissions():
                instance = self._instances.get(message.instance)
                for uid in [*message.users, *(self._queue.users_in(None) if message.others is not None else ())]:
                    self._queue.place(uid, instance.name)
                unkept = ""
                try:  # before the agent hears that they are in force
                    name = "" if instance is self._instances.first else instance.name
                    state.save(self._options.state, replace(message, instance=name))
                except (OSError, codec.LinkError) as error:
                    unkept = f"{self._options.state} cannot be written: {getattr(error, 'strerror', None) or error}"
                instance.admit(message, unkept)
            case link.Refuse():
                connection = self._holding.get(message.connection)
                if connection is not None and not self._handing(connection):
                    self._holding.left(connection)  # the agent holds its process until it hears so
            case link.Release():
                process = (message.pid, message.start)
                given = any(one.released(process) for one in self._instances)
                self._processes.release(process, message.connections, given=given)
            case link.Found():
                name = self._instances.get(message.instance).name
                found = self._processes.found(message, name)
                if found is not None:
                    self._tell(*self._known(found))
            case link.HeldUp():
                self._queue.held_up(message.uid, message.seconds, self._loop.time())
            case link.Instances():
                self._forget(message.names)
                self._use_own(message.own)
        self._pump()

    def _describe(self) -> str:
        return f"{len(self._queue)} held, {sum(1 for _ in self._queue.known())} known"

    def _tell_status(self) -> None:
        self._drop_idle()
        self._own.look()
        text = self._describe()
        if text != self._status:
            self._status = text
            self._store.tell(f"STATUS={text}")
        if self._watchdog:
            self._store.tell("WATCHDOG=1")
        self._loop.call_later(STATUS_EVERY, self._tell_status)
