"""Which connection is handed over when, what came of it, and what an earlier gate had begun."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from mpsagent.gate import handover, identity, link
from mpsagent.gate.announcement import Announcement, Told
from mpsagent.gate.connection import Connection
from mpsagent.gate.handing import Handing
from mpsagent.gate.handover import HandOver, Plan, Stage
from mpsagent.gate.handshake import Mark
from mpsagent.gate.holding import Holding
from mpsagent.gate.lane import Lane
from mpsagent.gate.link import Admissions
from mpsagent.gate.orphans import Orphans
from mpsagent.gate.processes import KnownProcesses
from mpsagent.gate.queue import Process, Queue
from mpsagent.gate.store import DaemonName, Store
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import ACKNOWLEDGED, SERVER_NOT_READY, Credentials

UNSURE = 0.5
"""Seconds in which a restored client that may have its descriptor shows that it has."""
DYING = 0.05
NOT_ADMITTED = "not admitted any more; it is held on"
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
        self._orphans = Orphans(lane.loop)
        self._late: dict[Connection, None] = {}
        """Clients that have their descriptor from an earlier gate, whose connections to the daemon are lost."""
        self._cut: deque[tuple[Connection, Announcement]] = deque()
        """Hand-overs that an earlier gate had begun."""
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

    def under_way(self) -> Iterator[Connection]:
        """Clients that the daemon has been told of, or is about to be."""
        if self.current is not None:
            yield self.current.connection
        for connection, _ in self._cut:
            yield connection

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
        def passing() -> bool:
            return self._processes.prepare(connection, machine.limits)

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
            self._orphans,
            passing=passing,
            doubt=doubt,
            done=lambda outcome: self._over(handing, outcome),
        )
        return handing

    def _over(self, handing: Handing, outcome: handover.Outcome, *, sure: bool = False) -> None:
        lives = self._processes.lives(handing.connection) if isinstance(outcome, handover.Failed) else False
        if isinstance(outcome, handover.Failed) and outcome.lost and lives and not sure:
            # a process that is killed hangs up a moment before it has ended
            self._lane.loop.call_later(DYING, lambda: self._over(handing, outcome, sure=True))
            return
        self.current = None
        self._lane.handing = False
        connection = handing.connection
        match outcome:
            case handover.Passed():
                self._passed(handing, outcome)
            case handover.Failed():
                self._failed(handing, outcome, lives=lives)
            case handover.Left():
                self._processes.not_passed(connection)
                self._holding.left(connection)
            case handover.Withdrawn():
                # the agent knows that it began, and waits to hear how it ended
                self._tell(
                    link.Failed(connection.number, connection.peer.pid, connection.peer.uid, NOT_ADMITTED, "limits")
                )
        self._after()
        self._go_on()
        self._lane.loop.call_soon(self._lane.pump)

    def _passed(self, handing: Handing, outcome: handover.Passed, *, acknowledged: bool = True) -> None:
        connection, who = handing.connection, handing.connection.peer
        if outcome.status == SERVER_NOT_READY:
            self._not_ready = min(LONGEST_NOT_READY, self._not_ready * 2 or FIRST_NOT_READY)
            self._lane.rest(self._not_ready)
        elif acknowledged:
            self._not_ready = 0.0
        self._processes.passed(connection, outcome.limits)
        self._holding.close(connection)
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
                acknowledged,
                outcome.status,
            )
        )

    def _failed(self, handing: Handing, outcome: handover.Failed, *, lives: bool) -> None:
        connection, who = handing.connection, handing.connection.peer
        if outcome.lost and lives:
            # It had its descriptor: whatever it has done with it, it counts until it ends or is released.
            self._passed(handing, handover.Passed(handing.limits, handing.fail_safe), acknowledged=False)
            return
        now = self._lane.loop.time()
        self._processes.not_passed(connection)
        self._tell(link.Failed(connection.number, who.pid, who.uid, outcome.why, outcome.stage.value, outcome.lost))
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
        """A message of a client that is being handed over or was, or its end. The message is still in the socket."""
        cut = next((one for one in self._cut if one[0] is connection), None)
        if connection in self._late:
            self._forget_late(connection)
        elif self.current is not None and self.current.connection is connection:
            if data:
                self.current.client_message(data)
            else:
                self._holding.unwatch(connection)
                self.current.client_closed()
        elif cut is not None:
            self._cut.remove(cut)
            if data:
                cut[1].acknowledge(data)
                self._was_passed(connection)
            else:
                self._orphans.add(cut[1], untouched=connection.mark is Mark.HELD)
                self._holding.left(connection)
        elif connection.mark >= Mark.PASSING:
            self._was_passed(connection)  # by an earlier gate, and it has gone on
        else:
            return False
        return True

    def process_ended(self, process: Process) -> None:
        """Its connection may live on in a child, which cannot meet the server in its place."""
        current = self.current
        if current is not None and current.stage is Stage.ACKNOWLEDGEMENT:
            connection = current.connection
            if (connection.peer.pid, connection.start) == process:
                self._holding.look(connection)
                if self.current is current and current.stage is Stage.ACKNOWLEDGEMENT:
                    self._holding.unwatch(connection)
                    current.client_closed()

    def _be_late(self, connection: Connection) -> None:
        """It is not held any more, and nothing more can be done for it."""
        self._holding.release(connection)
        self._late[connection] = None
        if len(self._late) > MOST_LATE:
            self._forget_late(next(iter(self._late)))

    def _forget_late(self, connection: Connection) -> None:
        del self._late[connection]
        self._holding.close(connection)

    # --- what an earlier gate had begun ------------------------------------------------------------------------------

    def resume(self, daemons: list[tuple[DaemonName, socket.socket]], last_words: Mapping[int, bytes]) -> None:
        """Goes on with hand-overs whose connections to the daemon were in the store; their clients' are held again,
        unless they have left. ``last_words``: what clients that may have had their descriptor have said since, by
        connection; empty: nothing."""
        newest: dict[int, Announcement] = {}
        for name, sock in sorted(daemons, key=lambda one: (one[0].number, one[0].generation)):
            announcement = Announcement(self._lane.loop, self._store, sock, name)
            told = announcement.told
            if told is Told.NOTHING:
                announcement.close()
                continue
            announcement.make_sure()
            if told is Told.ACKNOWLEDGED or last_words.get(name.number):
                announcement.acknowledge(last_words.get(name.number) or ACKNOWLEDGED)
                continue
            older = newest.get(name.number)
            if older is not None:
                self._orphans.add(older)
            newest[name.number] = announcement
        for number, announcement in newest.items():
            connection = self._holding.get(number)
            if connection is None or announcement.told is Told.ABANDONED:
                self._orphans.add(announcement, untouched=number not in last_words)
            else:
                connection.attempt = announcement.name.generation
                self._cut.append((connection, announcement))
        # who has a descriptor goes first: MPS waits for them
        self._cut = deque(sorted(self._cut, key=lambda one: -one[0].mark))
        self._go_on()

    def _go_on(self) -> None:
        """With the next hand-over that was cut."""
        if self.current is not None or not self._cut:
            return
        connection, announcement = self._cut.popleft()
        limits = announcement.name.limits or Limits()
        handing = self._handing(connection, HandOver(Plan(limits, limits)))
        self._tell(link.Handing(connection.number, connection.peer.pid, connection.peer.uid, time.time()))
        handing.resume(announcement)

    def resume_passing(self, connection: Connection) -> None:
        """The last gate may have passed the descriptor on, or was about to, and its connection to the daemon is not in
        the store. What lies unread in the socket says so; a client that stays silent for a while is taken up again from
        the start, unless its descriptor went out for certain."""
        if connection.unread_by_peer() or connection.unread_by_us():
            self._was_passed(connection)
            return
        if connection.mark is Mark.PASSED:
            self._be_late(connection)
            return
        held = self._queue.get(connection.number)
        assert held is not None
        held.not_before = self._lane.loop.time() + UNSURE

    def _was_passed(self, connection: Connection) -> None:
        process: Process = (connection.peer.pid, connection.start)
        known = self._queue.known_process(process)
        if known is None and self._processes.prepare(connection, Limits()):
            self._processes.passed(connection, Limits()).limits = None
        self._holding.close(connection)
