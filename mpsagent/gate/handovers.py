"""Which connection is handed over when, what came of it, and what an earlier gate had begun."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from mpsagent.gate import handover, identity, link
from mpsagent.gate.connection import Connection, ghost
from mpsagent.gate.handing import Handing, Told, told
from mpsagent.gate.handover import HandOver, Plan
from mpsagent.gate.handshake import Mark
from mpsagent.gate.holding import Holding
from mpsagent.gate.lane import Lane
from mpsagent.gate.link import Admissions
from mpsagent.gate.processes import KnownProcesses
from mpsagent.gate.queue import Process, Queue
from mpsagent.gate.store import DaemonName, Store
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import SERVER_NOT_READY, Credentials

UNSURE = 0.5
"""Seconds in which a restored client that may have its descriptor shows that it has."""
MOST_LATE = 256
"""Clients whose acknowledgement is outstanding; beyond it the oldest connection is closed."""
FIRST_NOT_READY, LONGEST_NOT_READY = 0.25, 2.0
"""Seconds for which nobody is handed over after a client has met a server in FAULT, doubling: a descriptor is given
there all the same, and each client would be lost. In this time the agent learns of the fault and says what to do."""


class HandOvers:
    """``admissions`` is what counts now. ``begin`` is the lane's question; ``special`` the holding's."""

    def __init__(
        self,
        lane: Lane,
        holding: Holding,
        processes: KnownProcesses,
        store: Store,
        patience: handover.Patience,
        tell: Callable[[link.FromGate], None],
        over: Callable[[], None],
    ) -> None:
        self.admissions = Admissions()
        self.current: Handing | None = None
        self._lane = lane
        self._holding = holding
        self._processes = processes
        self._store = store
        self._patience = patience
        self._tell = tell
        self._after = over
        self._own = Credentials(os.getpid(), os.geteuid(), os.getegid())
        self._late: dict[Connection, Handing] = {}
        self._not_ready = 0.0

    @property
    def _queue(self) -> Queue:
        return self._holding.queue

    def admit(self, admissions: Admissions) -> None:
        """A hand-over that these do not allow is withdrawn, if the daemon has not been told yet."""
        self.admissions = admissions
        current = self.current
        if current is not None and (not admissions.open or admissions.user(current.connection.peer.uid) is None):
            current.withdraw()

    # --- one hand-over -----------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Starts the next one; False when there is none."""
        if self._lane.known is False:
            return False
        while True:
            now = self._lane.loop.time()
            held = self._queue.next(now, self.admissions)
            if held is None:
                self._lane.wake_at(self._queue.wake(now, self.admissions))
                return False
            connection = self._holding.get(held.connection)
            assert connection is not None
            if identity.start_time(held.pid) == held.start:
                break
            self._holding.left(connection)  # its process has ended and left the connection to a child
        user = self.admissions.user(held.uid)
        assert user is not None
        table = self.admissions
        plan = Plan(user.limits, table.fail_safe, table.set_limits, table.devices, self._lane.servers)
        connection.mark = Mark.HELD  # an earlier gate may have got further; the client has stayed silent
        handing = self._handing(connection, HandOver(plan))
        self._tell(link.Handing(held.connection, held.pid, held.uid, time.time()))
        handing.start()
        return True

    def _handing(self, connection: Connection, machine: HandOver) -> Handing:
        def passing() -> None:
            connection.mark = Mark.PASSING
            self._processes.prepare(connection, machine.limits)

        def doubt(what: handover.Doubt) -> None:
            self._tell(link.Unconfirmed(connection.peer.uid, what.wanted, what.why))

        self._lane.handing = True
        self._lane.open_to_questions = False
        self.current = handing = Handing(
            self._lane,
            connection,
            machine,
            self._patience,
            self._own,
            self._store,
            passing=passing,
            doubt=doubt,
            done=lambda outcome: self._over(handing, outcome),
        )
        return handing

    def _over(self, handing: Handing, outcome: handover.Outcome) -> None:
        self.current = None
        self._lane.handing = False
        connection = handing.connection
        match outcome:
            case handover.Passed():
                self._passed(handing, outcome)
            case handover.Failed():
                self._failed(connection, outcome)
            case handover.Left():
                self._processes.not_passed(connection)
                self._holding.left(connection)
            case handover.Withdrawn():
                pass
        self._after()
        self._lane.loop.call_soon(self._lane.pump)

    def _passed(self, handing: Handing, outcome: handover.Passed) -> None:
        connection, who = handing.connection, handing.connection.peer
        self._not_ready = 0.0
        self._processes.passed(connection, outcome.limits)
        if outcome.acknowledged:
            self._holding.close(connection)
        else:
            self._be_late(connection, handing)
        seconds = self._lane.loop.time() - handing.began
        self._tell(
            link.Passed(
                connection.number,
                who.pid,
                who.uid,
                connection.start,
                outcome.limits,
                seconds,
                time.time(),
                outcome.fail_safe,
                outcome.acknowledged,
            )
        )

    def _failed(self, connection: Connection, outcome: handover.Failed) -> None:
        who, now = connection.peer, self._lane.loop.time()
        self._processes.not_passed(connection)
        self._tell(
            link.Failed(
                connection.number, who.pid, who.uid, outcome.why, outcome.stage.value, outcome.lost, outcome.status
            )
        )
        if outcome.status == SERVER_NOT_READY:
            self._not_ready = min(LONGEST_NOT_READY, self._not_ready * 2 or FIRST_NOT_READY)
            self._lane.rest(self._not_ready)
        held = self._queue.get(connection.number)
        if outcome.lost or held is None:
            self._holding.close(connection)
            return
        connection.mark = Mark.HELD
        held.failed(now)
        if outcome.daemon:
            self._lane.down()

    # --- what clients do while, or after, they are handed over -------------------------------------------------------

    def special(self, connection: Connection, data: bytes) -> bool:
        """A message of a client that is being handed over or was, or its end."""
        late = self._late.pop(connection, None)
        if late is not None:
            late.late_message(data) if data else late.close()
            self._holding.close(connection)
        elif self.current is not None and self.current.connection is connection:
            if data:
                self.current.client_message(data)
            else:
                self._holding.unwatch(connection)
                self.current.client_closed()
        elif connection.mark is Mark.PASSING and self._holding.get(connection.number) is not None:
            self._was_passed(connection)  # by an earlier gate, and it has gone on
        else:
            return False
        return True

    def _be_late(self, connection: Connection, handing: Handing) -> None:
        """It is not held any more, but its acknowledgement still has to go to the daemon."""
        self._holding.release(connection)
        self._late[connection] = handing
        if len(self._late) > MOST_LATE:
            oldest = next(iter(self._late))
            self._late.pop(oldest).close()
            self._holding.close(oldest)

    # --- what an earlier gate had begun ------------------------------------------------------------------------------

    def resume(self, daemon: socket.socket, name: DaemonName) -> None:
        """Goes on with a hand-over whose connection to the daemon was in the store; the client's is held again, unless
        it has left."""
        daemon.setblocking(False)
        connection = self._holding.get(name.number)
        if told(daemon) is not Told.ALL or self.current is not None:
            daemon.close()
            self._store.drop(str(name))
            return
        gone = connection is None
        if connection is None:
            connection = ghost(name.number)
        plan = Plan(name.limits, name.limits)
        if connection.mark is Mark.PASSING and (connection.unread_by_peer() or connection.unread_by_us()):
            handing = self._handing(connection, HandOver(plan))
            self.current = None
            self._lane.handing = False
            handing.outlast(daemon, name)
            self._processes.passed(connection, name.limits)
            self._be_late(connection, handing)
        else:
            self._handing(connection, HandOver(plan)).resume(daemon, name, gone=gone)

    def resume_passing(self, connection: Connection) -> None:
        """The last gate may have passed the descriptor on, or was about to, and its connection to the daemon is lost.
        What lies unread in the socket says so; a client that stays silent for a while is taken up again from the start,
        which one that has its descriptor does not notice."""
        if connection.unread_by_peer() or connection.unread_by_us():
            self._was_passed(connection)
            return
        held = self._queue.get(connection.number)
        assert held is not None
        held.not_before = self._lane.loop.time() + UNSURE

    def _was_passed(self, connection: Connection) -> None:
        process: Process = (connection.peer.pid, connection.start)
        known = self._queue.known_process(process)
        if known is None:
            self._processes.prepare(connection, Limits())
            self._processes.passed(connection, Limits()).limits = None
        self._holding.close(connection)
