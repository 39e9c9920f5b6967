"""The gate: puts queue, lane, public sockets, front-ends, store and link together. A thin loop around pure parts."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpsagent.gate import handover, identity, link, state
from mpsagent.gate.channel import take
from mpsagent.gate.connection import Connection, restored
from mpsagent.gate.frontends import FrontEnds
from mpsagent.gate.handing import Handing, Outcome
from mpsagent.gate.handshake import Mark
from mpsagent.gate.lane import CONTROL, PRIVILEGED, Lane, connect
from mpsagent.gate.link import Admissions
from mpsagent.gate.linkserver import LinkServer, Outgoing
from mpsagent.gate.processes import KnownProcesses
from mpsagent.gate.public import PublicSockets
from mpsagent.gate.queue import Held, KnownProcess, Process, Queue
from mpsagent.gate.relay import Relay
from mpsagent.gate.store import ConnectionName, KnownName, Store, parse_name
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import CREDENTIALS, HELLO, Credentials, Kind, kind_bytes

UNSURE = 0.5
"""Seconds in which a restored client that may have its descriptor shows that it has."""
MOST_LATE = 256
"""Clients whose acknowledgement is outstanding; beyond it the oldest connection is closed."""
MOST_RELAYS = 1024
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
        self._own = Credentials(os.getpid(), os.geteuid(), os.getegid())
        self._admissions = options.admissions or link.Admissions()
        self._store = Store(loop)
        self._queue = Queue()
        self._connections: dict[int, Connection] = {}
        self._knocks: dict[int, link.Knock] = {}
        self._handing: Handing | None = None
        self._late: dict[Connection, Handing] = {}
        self._relays = 0
        self._ungreeted: list[Connection] = []
        self._greeting: link.HandshakeSeen | None = None
        self._unapplied: int | None = None
        self._link: LinkServer | None = None
        self._status = ""
        self._processes = KnownProcesses(loop, self._queue, self._store, self._process_ended)
        self._lane = Lane(loop, options.daemon, self._begin, self._daemon_greets)
        self._front_ends = FrontEnds(loop, self._lane, self._front_end_command)
        self._public = PublicSockets(loop, self._store, self._hold, self._front_ends.add, self._relay, self._refused)
        self._start(inherited)

    # --- start -------------------------------------------------------------------------------------------------------

    def _start(self, inherited: list[tuple[str, int]]) -> None:
        if self._options.admissions is None:
            try:
                self._admissions = state.load(self._options.state) or self._admissions
            except state.StateError as error:
                say(f"{error}; everybody is held until the agent says more")
        if self._options.link is not None:
            self._link = LinkServer(self._loop, self._options.link, self._sync, self._from_agent, say)
        listeners, kept = [], []
        for name, descriptor in inherited:
            found = parse_name(name)
            if found is not None:
                kept.append((name, found, descriptor))
            else:
                listeners.append((name, descriptor))
        self._store.adopt(name for name, _, _ in kept)
        # processes first: a connection of one that is known is told from a new one
        for name, found, descriptor in kept:
            if isinstance(found, KnownName) and not self._processes.restore(name, found, descriptor):
                self._store.drop(name)
        for name, found, descriptor in sorted(kept, key=lambda one: getattr(one[1], "number", 0)):
            if isinstance(found, ConnectionName):
                self._restore(name, found, descriptor)
        for name, descriptor in listeners:
            self._listen(name, descriptor)
        self._lane.probe()
        self._store.tell("READY=1", f"STATUS={self._describe()}")
        self._loop.call_later(STATUS_EVERY, self._tell_status)
        self._lane.pump()

    def _listen(self, name: str, descriptor: int) -> None:
        listener = socket.socket(fileno=descriptor)
        try:
            address = listener.getsockname()
            place = address if isinstance(address, str) else ""
            privileged = PRIVILEGED in (name, os.path.basename(place))  # noqa: PTH119 (not a path of ours)
            if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError("it does not listen")
            self._public.listen(listener, privileged=privileged)
        except OSError as error:
            say(f"the socket {name!r} that the service manager gave is of no use: {error}")
            listener.close()

    def _restore(self, name: str, found: ConnectionName, descriptor: int) -> None:
        """A connection of an earlier gate: its mark says how far that one came."""
        self._public.numbers.seen(found.number)
        try:
            sock = socket.socket(fileno=descriptor)
        except OSError:
            self._store.drop(name)
            return
        connection = restored(sock, found)
        if connection is None or found.number in self._connections:
            sock.close()
            self._store.drop(name)
            return
        mark = connection.mark
        if mark in (Mark.NEW, Mark.GREETED):
            self._public.restore(connection)
            return
        self._hold(connection)
        if mark is Mark.PASSING and found.number in self._connections:
            self._resume_passing(connection)
        return

    def _resume_passing(self, connection: Connection) -> None:
        """The last gate may have passed the descriptor on, or was about to. What lies unread in the socket says so; a
        client that stays silent for a while is taken up again from the start, which a client that has its descriptor
        does not notice."""
        if connection.unread_by_peer() or connection.unread_by_us():
            self._was_passed(connection)
            return
        held = self._queue.get(connection.number)
        assert held is not None
        held.not_before = self._loop.time() + UNSURE
        return

    def _was_passed(self, connection: Connection) -> None:
        limits = self._queue.known_process((connection.peer.pid, connection.start))
        if limits is None:
            self._processes.prepare(connection, Limits())
            self._processes.passed(connection, Limits()).limits = None
        self._close(connection)

    # --- held connections --------------------------------------------------------------------------------------------

    def _hold(self, connection: Connection) -> None:
        """A CUDA client has said all it has to say."""
        peer = connection.peer
        why = self._queue.full_for(peer.uid)
        if why is not None:
            self._refused(connection, why)
            if connection.stored:
                self._store.drop(connection.name)
            connection.sock.close()
            return
        if not connection.stored:
            connection.stored = self._store.keep(connection.name, connection.sock.fileno())
        self._connections[connection.number] = connection
        self._knocks[connection.number] = knock = link.Knock(
            connection.number,
            peer.pid,
            peer.uid,
            peer.gid,
            connection.start,
            connection.since,
            identity.cgroup(peer.pid),
            identity.pid_namespace(peer.pid),
            identity.command(peer.pid),
        )
        self._queue.add(connection.held())
        self._loop.add_reader(connection.sock.fileno(), self._read, connection)
        self._tell(knock, self._pidfd_of(connection))
        self._lane.pump()

    @staticmethod
    def _pidfd_of(connection: Connection) -> Callable[[], int | None]:
        return lambda: identity.peer_pidfd(connection.sock, connection.peer.pid, connection.start)

    def _pidfd_of_process(self, process: Process) -> Callable[[], int | None]:
        return lambda: self._processes.pidfd(process)

    def _read(self, connection: Connection) -> None:
        """A held client has nothing to say; one that is handed over acknowledges."""
        try:
            data, _, _ = take(connection.sock, 64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        handing, late = self._handing, self._late.get(connection)
        if late is not None:
            del self._late[connection]
            late.late_message(data) if data else late.close()
            self._close(connection)
        elif handing is not None and handing.connection is connection:
            if data:
                handing.client_message(data)
            else:
                self._loop.remove_reader(connection.sock.fileno())
                handing.client_closed()
        elif not data:
            passed = connection.mark is Mark.PASSING  # by an earlier gate, and it has gone on
            self._was_passed(connection) if passed else self._left(connection)
        elif connection.mark is Mark.PASSING:
            self._was_passed(connection)
        elif data not in (CREDENTIALS, kind_bytes(Kind.CLIENT)):  # which an earlier gate may have left there
            self._refused(connection, "said something while it was held")
            self._close(connection)

    def _left(self, connection: Connection) -> None:
        self._tell(link.Left(connection.number))
        self._close(connection)

    def _close(self, connection: Connection) -> None:
        """It is not ours any more, for whatever reason."""
        self._queue.remove(connection.number)
        self._connections.pop(connection.number, None)
        self._knocks.pop(connection.number, None)
        if connection.sock.fileno() >= 0:
            self._loop.remove_reader(connection.sock.fileno())
        connection.sock.close()
        if connection.stored:
            self._store.drop(connection.name)
            connection.stored = False

    def _refused(self, connection: Connection, why: str) -> None:
        self._tell(link.Refused(connection.number, connection.peer.pid, connection.peer.uid, why))

    # --- hand-over ---------------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        """Starts the next hand-over; False when there is none."""
        if self._lane.known is False:
            return False
        while True:
            now = self._loop.time()
            held = self._queue.next(now, self._admissions)
            if held is None:
                self._lane.wake_at(self._queue.wake(now, self._admissions))
                return False
            connection = self._connections[held.connection]
            if identity.start_time(held.pid) == held.start:
                break
            self._left(connection)  # its process has ended and left the connection to a child
        user = self._admissions.user(held.uid)
        assert user is not None
        if connection.mark is Mark.PASSING:  # of an earlier gate; it has stayed silent
            connection.mark = Mark.HELD
        plan = handover.Plan(
            user.limits,
            self._admissions.fail_safe,
            self._admissions.set_limits,
            self._admissions.devices,
            self._lane.servers,
        )
        self._lane.handing = True
        self._lane.open_to_questions = False
        self._tell(link.Handing(held.connection, held.pid, held.uid, time.time()))
        limits = [plan.limits]

        def doubt(what: handover.Doubt) -> None:
            limits[0] = plan.fail_safe
            self._tell(link.Unconfirmed(held.uid, what.wanted, what.why))

        def passing() -> None:
            connection.mark = Mark.PASSING
            self._processes.prepare(connection, limits[0])

        self._handing = handing = Handing(
            self._lane,
            connection,
            plan,
            self._options.patience,
            self._own,
            passing=passing,
            doubt=doubt,
            done=lambda outcome: self._over(handing, held, outcome),
        )
        handing.start()
        return True

    def _over(self, handing: Handing, held: Held, outcome: Outcome) -> None:
        self._handing = None
        self._lane.handing = False
        connection = handing.connection
        now = time.time()
        if isinstance(outcome, handover.Passed):
            self._processes.passed(connection, outcome.limits)
            if outcome.acknowledged:
                self._close(connection)
            else:
                self._be_late(connection, handing)
            self._tell(
                link.Passed(
                    held.connection,
                    held.pid,
                    held.uid,
                    held.start,
                    outcome.limits,
                    self._loop.time() - handing.began,
                    now,
                    outcome.fail_safe,
                    outcome.acknowledged,
                )
            )
        elif isinstance(outcome, handover.Failed):
            self._processes.not_passed(connection)
            self._tell(link.Failed(held.connection, held.pid, held.uid, outcome.why, outcome.stage.value, outcome.lost))
            if outcome.lost:
                self._close(connection)
            else:
                connection.mark = Mark.HELD
                held.failed(self._loop.time())
                if outcome.daemon:
                    self._lane.down()
        else:
            self._processes.not_passed(connection)
            self._left(connection)
        self._applied()
        self._loop.call_soon(self._lane.pump)

    def _applied(self) -> None:
        """Tells the agent that its admissions are in force, once no hand-over that they do not allow is under way."""
        number, handing, table = self._unapplied, self._handing, self._admissions
        if number is None:
            return
        if handing is None or (table.open and table.user(handing.connection.peer.uid) is not None):
            self._unapplied = None
            self._tell(link.Applied(number))

    def _be_late(self, connection: Connection, handing: Handing) -> None:
        """It is not held any more, but its acknowledgement still has to go to the daemon."""
        self._queue.remove(connection.number)
        self._connections.pop(connection.number, None)
        self._knocks.pop(connection.number, None)
        self._late[connection] = handing
        if len(self._late) > MOST_LATE:
            oldest = next(iter(self._late))
            self._late.pop(oldest).close()
            self._close(oldest)

    def _process_ended(self, _known: KnownProcess) -> None:
        self._lane.pump()  # there is room for one more

    # --- the daemon and front-ends -----------------------------------------------------------------------------------

    def _daemon_greets(self, greeting: bytes, pid: int) -> None:
        known = greeting == HELLO
        self._greeting = link.HandshakeSeen(known, greeting[:64].hex(), pid or None)
        self._tell(self._greeting)
        if known:
            waiting, self._ungreeted = self._ungreeted, []
            for connection in waiting:
                self._public.greet(connection)
        self._loop.call_soon(self._lane.pump)

    def _front_end_command(self, who: Credentials, command: str, at: float, refused: bool) -> None:
        self._tell(link.FrontEnd(who.pid, who.uid, command, at, refused))

    def _relay(self, connection: Connection) -> bool:
        """Passes a new connection on untouched when the daemon's greeting is not known."""
        if self._lane.known is not False:
            return False
        if self._relays >= MOST_RELAYS:  # held without a greeting rather than closed: closed now it would run outside
            self._ungreeted.append(connection)
            return True
        try:
            daemon = connect(self._options.daemon, PRIVILEGED if connection.privileged else CONTROL)
        except OSError:
            self._ungreeted.append(connection)
            self._loop.call_later(0.1, self._relay_again)
            return True
        self._relays += 1
        if connection.stored:  # a relay ends with the gate
            self._store.drop(connection.name)
            connection.stored = False
        Relay(self._loop, connection, daemon, self._lane.greeted, self._relay_done)
        return True

    def _relay_again(self) -> None:
        waiting, self._ungreeted = self._ungreeted, []
        for connection in waiting:
            if not self._relay(connection):
                self._public.greet(connection)

    def _relay_done(self) -> None:
        self._relays -= 1
        if self._ungreeted:
            self._loop.call_soon(self._relay_again)

    # --- link and status ---------------------------------------------------------------------------------------------

    def _tell(self, message: link.FromGate, pidfd: Callable[[], int | None] | None = None) -> None:
        if self._link is not None:
            self._link.send(message, pidfd)

    def _sync(self) -> Iterator[Outgoing]:
        yield link.Hello(os.getpid(), self._started), None
        if self._greeting is not None:
            yield self._greeting, None
        for number in sorted(self._knocks):
            yield self._knocks[number], self._pidfd_of(self._connections[number])
        for known in self._queue.known():
            process = known.process
            yield (
                link.Known(
                    known.pid,
                    known.uid,
                    known.gid,
                    known.start,
                    known.since,
                    known.limits,
                    identity.cgroup(known.pid),
                    known.connections,
                ),
                self._pidfd_of_process(process),
            )
        yield link.Synced(), None

    def _from_agent(self, message: link.FromAgent) -> None:
        if isinstance(message, link.Admissions):
            self._admissions = message
            self._unapplied = message.number
            self._applied()
            try:
                state.save(self._options.state, message)
            except (OSError, link.LinkError) as error:
                say(f"the admissions cannot be kept in {self._options.state}: {error}")
        elif isinstance(message, link.Refuse):
            connection = self._connections.get(message.connection)
            busy = self._handing is not None and self._handing.connection is connection
            if connection is not None and not busy:
                self._close(connection)
        else:
            self._processes.release((message.pid, message.start))
        self._lane.pump()

    def _describe(self) -> str:
        return f"{len(self._queue)} held, {sum(1 for _ in self._queue.known())} known"

    def _tell_status(self) -> None:
        text = self._describe()
        if text != self._status:
            self._status = text
            self._store.tell(f"STATUS={text}")
        self._loop.call_later(STATUS_EVERY, self._tell_status)
