"""An instance of MPS: which connection is handed over there when, what came of it, what an earlier gate had begun."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

from mpsagent.gate import handover
from mpsagent.gate.announcement import Announcement, Told
from mpsagent.gate.connection import Connection
from mpsagent.gate.handover import HandOver, Plan, Stage
from mpsagent.gate.handshake import Mark
from mpsagent.gate.handshake_rescue import SETTLING, Rescuer
from mpsagent.gate.holding import Holding
from mpsagent.gate.lane import FIRST_PAUSE, LONGEST_PAUSE, Lane, Run
from mpsagent.gate.orphans import Orphans
from mpsagent.gate.places import LIST
from mpsagent.gate.processes import KnownProcesses
from mpsagent.gate.queue import Held, Process, Queue
from mpsagent.gate.refusal import RefusalHandshake
from mpsagent.gate.store import DaemonName, DescriptorStore
from mpsagent.linux import proc
from mpsagent.linux.backoff import Backoff
from mpsagent.linux.channel import hung_up
from mpsagent.linux.descriptors import close_all, with_descriptors
from mpsagent.linux.dialogue import connect
from mpsagent.linux.peers import Credentials
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import ACKNOWLEDGED, CONTROL, HELLO, SERVER_NOT_READY
from mpsagent.mps.session import FrontEndSession, How
from mpsagent.wire import link
from mpsagent.wire.link import Admissions

UNSURE = 0.5
"""Seconds in which a restored client that may have its descriptor shows that it has."""
DYING = 0.05
ENDED = 1.0
"""Seconds for which the server is asked about a client that has ended, or acknowledged to an earlier gate."""
NOT_ADMITTED = "its user may not pass any more; it stays held"
LOST_START = "its server ended while it started, and MPS would now give it other limits than its own: start it again"
"""A client whose server is killed in the first milliseconds after its first hand-over has not heard its limits there.
Its next context gets no memory limit and 8 multiprocessors, whatever its new server was told (4 of 14,
server-lost-at-start.txt of docs/measured/2026-11-24-H100-580.159.04)."""
MOST_LATE = 256
"""Clients whose acknowledgement, or last word, is outstanding; beyond it the oldest connection is closed. The same of
those whose server ended while they started."""
FIRST_NOT_READY, LONGEST_NOT_READY = 0.25, 2.0
"""Seconds for which no one is handed over once a server says that it is in FAULT, doubling: a descriptor is given there
all the same, and each client would be lost. In this time the agent learns of the fault and says what to do. Where a
client says it, its user alone waits for so long; where there is no agent, and no command that asks for the status, each
time one client is lost."""
FIRST_UNCONFIRMED, LONGEST_UNCONFIRMED = 0.1, 30.0
"""Seconds until limits are told again to a daemon that confirms neither a user's nor the fail-safe ones, doubling: each
time is a dozen lines of control.log. Other admissions are tried at once, and other users are served beside."""
FIRST_LIST_PAUSE, LONGEST_LIST_PAUSE = 0.1, 2.0
"""Seconds between two questions for MPS's list of contexts while one waits for a place, doubling: 2 KB of control.log
each beside a full server. At the end of a process it is asked at once."""
CONTEXT = 0.1
"""Seconds between two contexts. The driver makes them one after the other, whoever asks: 0.08 s for one alone, 0.15 s
each for 46 at once, when no client has one for 4 s; what ends a turn ends 46 clients in the middle of it
(contexts-at-once.txt, an H100); two H200 of one host are not quicker, beside clients of another agent 0.19 s each."""


OURSELVES = Credentials(os.getpid(), os.geteuid(), os.getegid())


@dataclass(eq=False, repr=False)
class Instance:
    """``lane`` leads to its daemon, whose pipe directory is ``directory``. ``admissions`` is what counts now. ``begin``
    is the lane's question; ``special`` the holding's; ``tell`` the agent's ear; ``greeted`` hears of each greeting that
    is known."""

    name: str
    directory: InitVar[Path]
    _holding: Holding
    _processes: KnownProcesses
    store: DescriptorStore
    patience: handover.Patience
    _ear: Callable[[link.FromGate], None]
    _greeted: Callable[[], None]

    def __post_init__(self, directory: Path) -> None:
        self.admissions = Admissions(instance=self.name)
        self.current: HandoverDriver | None = None
        self.greeting: link.HandshakeSeen | None = None
        self.lane = Lane(self._holding.loop, directory, self.begin, self._greets)
        self._unapplied: int | None = None
        self._unkept = ""
        self.orphans = Orphans(self._holding.loop)
        self._late: dict[Connection, None] = {}
        """Clients that have their descriptor from an earlier gate, whose connections to the daemon are lost."""
        self._refusals: dict[int, RefusalHandshake] = {}
        """One at a time of each user."""
        self._cut: deque[tuple[Connection, Announcement]] = deque()
        """Hand-overs that an earlier gate had begun."""
        self._not_ready = Backoff(FIRST_NOT_READY, LONGEST_NOT_READY)
        self._list_from, self._list_again = 0.0, Backoff(FIRST_LIST_PAUSE, LONGEST_LIST_PAUSE)
        """When MPS may be asked again which contexts there are."""
        self._limited, self._lifting = True, False
        """The daemon may have limits that were set here, perhaps by an earlier gate. If limits are to be left alone,
        they are lifted once."""
        self._settling: dict[Process, list[int]] = {}
        """Copies of what leads clients to their servers, until these have settled."""
        self._lost: dict[Process, None] = {}
        """Whose server ended while they started: for good, though the agent soon releases them as who has no server."""
        self._normal = False
        """The daemon's default client priority is certainly the normal one, so it need not be set again."""

    @property
    def _queue(self) -> Queue:
        return self._holding.queue

    def _tell(self, message: Any) -> None:
        self._ear(replace(message, instance=self.name))

    def _greets(self, greeting: bytes, pid: int) -> None:
        known = greeting == HELLO
        self.greeting = link.HandshakeSeen(known, greeting[:64].hex(), pid or None, self.name)
        self._tell(self.greeting)
        if known:
            self.lane.loop.call_soon(self._greeted)
        self.lane.loop.call_soon(self.lane.pump)

    def admit(self, table: Admissions, unkept: str = "") -> None:
        """A hand-over that these do not allow is withdrawn, if the daemon has not been told yet. ``unkept``: why the
        table is not on disk."""
        admissions = replace(table, instance=self.name)
        for uid in self._queue.resting(self.name):
            if _wanted(admissions, uid) != _wanted(self.admissions, uid):
                self._queue.rested(self.name, uid)
        self.admissions = admissions
        self._limited = self._limited or admissions.set_limits
        current = self.current
        if current is not None and (not admissions.open or admissions.user(current.connection.peer.uid) is None):
            current.withdraw()
        self._unapplied, self._unkept = admissions.number, unkept
        self._applied()

    def _applied(self) -> None:
        """Tells the agent that its admissions are in force, once no hand-over that they do not allow is under way."""
        number, table = self._unapplied, self.admissions
        if number is not None and all(table.open and table.user(one.peer.uid) is not None for one in self.under_way()):
            self._unapplied = None
            self._tell(link.Applied(number, unkept=self._unkept))

    def released(self, process: Process) -> bool:
        """Whether a connection of it is being handed over all the same, because the daemon has been told of it."""
        current = self.current
        if current is not None and current.connection.process == process:
            current.withdraw()
        return any(one.process == process for one in self.under_way())

    def under_way(self) -> Iterator[Connection]:
        """Clients that the daemon has been told of, or is about to be."""
        if self.current is not None:
            yield self.current.connection
        for connection, _ in self._cut:
            yield connection

    # --- one hand-over -----------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Starts the next one; False when there is none."""
        if self.lane.known is False:
            return False
        while True:
            now = self.lane.loop.time()
            held, wake, short = self._queue.choose(now, self.admissions)
            for uid, until in self._queue.newly_slowed(self.name, now):
                self._tell(link.Slowed(uid, until))
            if held is None and short:
                for beyond in list(self._queue.beyond(self.admissions)):
                    self._refuse(beyond)
            if held is None and short and now >= self._list_from:
                self._ask_for_contexts()
                return True
            if held is None:
                self.lane.wake_at(wake)
                if short:
                    self.lane.wake_at(self._list_from)
                return False
            connection = self._holding.get(held.connection)
            assert connection is not None
            if proc.start_time(held.pid) != held.start:
                self._holding.left(connection)  # its process has ended and left the connection to a child
            elif self._lost_start(held.process):
                self._holding.refused(connection, LOST_START)
                self._holding.close(connection)
            else:
                break
        user = self.admissions.user(held.uid)
        assert user is not None
        table = self.admissions
        limits = self._queue.limits_for(held, user, table)
        self._lifting = self._limited and not table.set_limits and limits == Limits()
        fail_safe = _least(table.fail_safe, limits)
        setting = table.set_limits or self._lifting
        if self.lane.altered:
            self._normal = self.lane.altered = False
        priority = limits.below_normal or fail_safe.below_normal or not self._normal
        plan = Plan(limits, fail_safe, setting, table.devices, self.lane.servers, priority)
        if self._queue.known_process(held.process) is not None:
            self._queue.contexts_from = now + CONTEXT
        self._queue.take(held.connection, self.name, now)
        connection.mark = Mark.HELD  # an earlier gate may have got further; the client has stayed silent
        self._handing(connection, HandOver(plan)).start()
        return True

    def settle(self, process: Process, descriptors: list[int]) -> None:
        """A client that is killed now must not hang up on its server before that has settled. A hand-over that came to
        nothing leaves no descriptor, and nothing of the one before is forgotten for it."""
        if descriptors:
            self._settling[process] = descriptors
            self.lane.loop.call_later(SETTLING, self._settled, process, descriptors)

    def _settled(self, process: Process, descriptors: list[int]) -> None:
        stopped = any(proc.fields(pid)[:1] in ([b"T"], [b"t"]) for pid in self.lane.servers)
        if not self._lost_start(process) and stopped:  # it has not told its client the limits, and may be killed yet
            self.lane.loop.call_later(SETTLING, self._settled, process, descriptors)
            return
        if self._settling.get(process) is descriptors:
            del self._settling[process]
        close_all(descriptors)

    def _lost_start(self, process: Process) -> bool:
        """Whether its server has ended before its first hand-over had settled."""
        known = self._queue.known_process(process)
        first = known is not None and known.connections <= 1 + known.restored
        if first and any(hung_up(one) for one in self._settling.get(process, ())):
            self._lost[process] = None
            if len(self._lost) > MOST_LATE:
                del self._lost[next(iter(self._lost))]
        return process in self._lost

    def _ask_for_contexts(self) -> None:
        """MPS's own list says which contexts have ended; who waits for a place is looked after again soon."""

        def answered(session: FrontEndSession | None, _why: str) -> None:
            done = session is not None and session.how is How.DONE
            now = self.lane.loop.time()
            self._queue.places(self.name).listed(session.answers if session is not None and done else None, asked)
            self._list_from = now + self._list_again.pause()
            self.lane.handing = False
            self.lane.loop.call_soon(self.lane.pump)

        asked = self.lane.loop.time()
        self.lane.handing = True
        self.lane.open_to_questions = False
        Run(self.lane, [LIST], OURSELVES, self.patience.limits, answered)

    def _refuse(self, held: Held) -> None:
        """It would wait for contexts that it, or who waits for it, has itself."""
        connection, user = self._holding.get(held.connection), self.admissions.user(held.uid)
        if connection is None or user is None or held.uid in self._refusals:
            return
        try:
            self._refusals[held.uid] = RefusalHandshake(self.lane.loop, connection)
        except OSError:  # of ours: it is held on; or it has gone, which its socket says
            return
        self._holding.release(connection)
        why = f"its user has as many contexts as max_contexts allows, {user.max_contexts} (CUDA error 808)"
        self._holding.refused(connection, why)
        if len(self._refusals) > MOST_LATE:
            self._refused(next(iter(self._refusals.values())).connection)

    def _refused(self, connection: Connection) -> None:
        self._refusals.pop(connection.peer.uid).close()
        self._holding.close(connection)
        self.lane.loop.call_soon(self.lane.pump)

    def _handing(self, connection: Connection, machine: HandOver) -> HandoverDriver:
        self.lane.handing = True
        self.lane.open_to_questions = False
        self.current = HandoverDriver(self, connection, machine)
        self._tell(link.Handing(connection.number, connection.peer.pid, connection.peer.uid, time.monotonic()))
        return self.current

    def is_own(self, connection: Connection) -> bool:
        """Return whether it is handed over with its own limits instead of its user's limits."""
        return self._queue.is_own(connection.process)

    def passing(self, handing: HandoverDriver) -> bool:
        """The descriptor is about to go out; whether the client's process lives, and the server that it started on."""
        if self._lost_start(handing.connection.process):
            return False
        return self._processes.prepare(handing.connection, handing.limits, self.name)

    def doubt(self, handing: HandoverDriver, what: handover.LimitsDoubted) -> None:
        self._tell(link.Unconfirmed(handing.connection.peer.uid, what.wanted, what.why))

    def over(self, handing: HandoverDriver, outcome: handover.Outcome, *, sure: bool = False) -> None:
        lives = self._processes.lives(handing.connection) if isinstance(outcome, handover.ClientFailed) else False
        if isinstance(outcome, handover.ClientFailed) and outcome.lost and lives and not sure:
            # a process that is killed hangs up a moment before it has ended
            self.lane.loop.call_later(DYING, lambda: self.over(handing, outcome, sure=True))
            return
        self.current = None
        self.lane.handing = False
        connection = handing.connection
        self._queue.free(connection.number)
        plan = handing.machine.plan
        if plan.set_limits and plan.priority:
            self._normal = isinstance(outcome, handover.ClientPassed) and not outcome.limits.below_normal
        match outcome:
            case handover.ClientPassed():
                if self._lifting:
                    self._limited = self.admissions.set_limits
                self._passed(handing, outcome)
            case handover.ClientFailed():
                self._failed(handing, outcome, lives=lives)
            case handover.ClientGone():
                self._processes.not_passed(connection)
                self._holding.left(connection)
            case handover.Withdrawn():
                # the agent knows that it began, and waits to hear how it ended
                self._tell(
                    link.Failed(connection.number, connection.peer.pid, connection.peer.uid, NOT_ADMITTED, "limits")
                )
        self._applied()
        self._go_on()
        self.lane.loop.call_soon(self.lane.pump)

    def _passed(self, handing: HandoverDriver, outcome: handover.ClientPassed, *, acknowledged: bool = True) -> None:
        connection, who = handing.connection, handing.connection.peer
        now = self.lane.loop.time()
        if outcome.status == SERVER_NOT_READY:  # the client said so, and it holds up no other client (recording 12, H3)
            self._queue.rest(self.name, who.uid, now, FIRST_NOT_READY, LONGEST_NOT_READY)
        elif acknowledged:
            self._not_ready.reset()
            self._queue.rested(self.name, who.uid)
            self._queue.took(who.uid, now - handing.given, now, lost=False)
        limits = handing.limits
        known = self._processes.passed(connection, limits, self.name, fail_safe=outcome.fail_safe)
        if known.connections > 1:  # the first is its channel; MPS's list says which came to nothing
            self._queue.places(self.name).opened(known.process, now)
        self._list_again.reset()
        self._holding.close(connection)
        seconds = now - handing.began
        self._tell(
            link.Passed(
                connection.number,
                who.pid,
                who.uid,
                connection.start,
                limits,
                seconds,
                time.monotonic(),
                outcome.fail_safe,
                acknowledged,
                outcome.status,
            )
        )

    def _failed(self, handing: HandoverDriver, outcome: handover.ClientFailed, *, lives: bool) -> None:
        connection, who = handing.connection, handing.connection.peer
        now = self.lane.loop.time()
        if outcome.lost:
            self._queue.took(who.uid, now - handing.given, now, lives=lives)
        if outcome.lost and lives:
            # It had its descriptor: whatever it has done with it, it counts until it ends or is released.
            self._passed(
                handing, handover.ClientPassed(handing.machine.limits, handing.machine.fail_safe), acknowledged=False
            )
            self._tell(link.Failed(connection.number, who.pid, who.uid, outcome.why, outcome.stage.value, lost=True))
            return
        self._processes.not_passed(connection)
        self._tell(link.Failed(connection.number, who.pid, who.uid, outcome.why, outcome.stage.value, outcome.lost))
        held = self._queue.get(connection.number)
        if outcome.never:
            self._holding.refused(connection, outcome.why)
        if outcome.lost or outcome.never or held is None:
            self._holding.close(connection)
            return
        connection.mark = Mark.HELD
        held.failed(now)
        if outcome.unconfirmed:
            self._queue.rest(self.name, who.uid, now, FIRST_UNCONFIRMED, LONGEST_UNCONFIRMED)
        elif outcome.fault:
            self._rest_in_fault()
        elif outcome.daemon:
            self.lane.down()

    def _rest_in_fault(self) -> None:
        self.lane.rest(self._not_ready.pause())

    # --- what clients do while, or after, they are handed over -------------------------------------------------------

    def special(self, connection: Connection, data: bytes) -> bool:
        """A message of a client that is being handed over or was, or its end. The message is still in the socket."""
        cut = next((one for one in self._cut if one[0] is connection), None)
        refusal = self._refusals.get(connection.peer.uid)
        if refusal is not None and refusal.connection is connection:
            self._refused(connection)
        elif connection in self._late:
            self._forget_late(connection)
        elif self.current is not None and self.current.connection is connection:
            if data:
                self.current.client_message(data)
            else:
                self._holding.unwatch(connection)
                self.current.client_closed()
        elif cut is not None:
            if not data:
                self._cut.remove(cut)
                self.orphans.add(cut[1], untouched=connection.mark is Mark.HELD)
                self._holding.left(connection)
            elif connection.mark.may_have_descriptor:
                cut[1].acknowledge(data)
                connection.mark = Mark.PASSED
        else:
            return False
        return True

    def process_ended(self, process: Process) -> None:
        """Its connection may live on in a child, which cannot meet the server in its place."""
        self._list_from = 0.0
        self._list_again.reset()
        current = self.current
        if current is None or current.connection.process != process:
            return
        if current.machine.stage is Stage.ACKNOWLEDGEMENT:
            self._holding.look(current.connection)
            if self.current is current and current.machine.stage is Stage.ACKNOWLEDGEMENT:
                self._holding.unwatch(current.connection)
                current.client_closed()
        if self.current is current and current.machine.stage is Stage.MEETING:
            current.process_ended()

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
            announcement = Announcement(self.lane.loop, self.store, sock, name)
            told = announcement.told
            if told is Told.NOTHING:
                announcement.close()
                continue
            announcement.make_sure()
            older = newest.get(name.number)
            if older is not None:
                self.orphans.add(older)
            newest[name.number] = announcement
        for number, announcement in newest.items():
            connection = self._holding.get(number)
            if connection is None or announcement.told is Told.ABANDONED:
                self.orphans.add(announcement, untouched=number not in last_words)
            else:
                if last_words.get(number):
                    connection.mark = Mark.PASSED
                connection.attempt = announcement.name.generation
                self._cut.append((connection, announcement))
                self._queue.take(number, self.name, self.lane.loop.time())
        # who has a descriptor goes first: MPS waits for them
        self._cut = deque(sorted(self._cut, key=lambda one: -one[0].mark))
        self._go_on()

    def _go_on(self) -> None:
        """With the next hand-over that was cut."""
        if self.current is not None or not self._cut:
            return
        connection, announcement = self._cut.popleft()
        limits = announcement.name.limits or Limits()
        if announcement.name.own:
            self._queue.keep_own(connection.process)
        handing = self._handing(connection, HandOver(Plan(limits, limits)))
        handing.unknown = announcement.name.limits is None
        handing.resume(announcement)

    def resume_passing(self, connection: Connection) -> None:
        """The last gate may have passed the descriptor on, or was about to, and its connection to the daemon is not in
        the store. What lies unread in the socket says so; a client that stays silent for a while is taken up again from
        the start, unless its descriptor went out for certain."""
        if connection.unread_by_peer() or connection.unread_by_us():
            self.was_passed(connection)
            return
        if connection.mark is Mark.PASSED:
            self._be_late(connection)
            return
        held = self._queue.get(connection.number)
        assert held is not None
        held.not_before = self.lane.loop.time() + UNSURE

    def was_passed(self, connection: Connection) -> None:
        """By an earlier gate, and it has gone on."""
        known = self._queue.known_process(connection.process)
        self._queue.places(self.name).doubtful = True
        if known is None and self._processes.prepare(connection, None, self.name):
            self._processes.passed(connection, None, self.name)
        self._holding.close(connection)


class HandoverDriver:
    """Carries out one hand-over: the machine's actions on the sockets of client and daemon, and its deadlines. Its
    instance hears once what came of it, and the client's socket is the instance's again."""

    def __init__(self, instance: Instance, connection: Connection, machine: HandOver) -> None:
        self.connection = connection
        self.machine = machine
        self.began = self.given = instance.lane.loop.time()
        self.unknown = False
        """True if an earlier gate set the limits, and they are not known."""
        self._instance = instance
        self._lane = instance.lane
        self._run: Run | None = None
        self._daemon: Announcement | None = None
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._pauses = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        self._stage: Stage | None = None
        self._actions: deque[handover.Action] = deque()
        self._acting = False

    @property
    def limits(self) -> Limits | None:
        """The limits that the client gets; None: unknown."""
        return None if self.unknown else self.machine.limits

    def start(self) -> None:
        self._do(self.machine.start())

    def resume(self, daemon: Announcement) -> None:
        """Goes on with an earlier gate's connection to the daemon, which has been told everything."""
        self._daemon = daemon
        mark = self.connection.mark
        if mark is Mark.PASSED or (mark is Mark.PASSING and self.connection.unread_by_peer()):
            self._instance.passing(self)
            _, self._descriptors = daemon.answer() or (b"", [])
            self._do(self.machine.resume_given(fail_safe=daemon.name.fail_safe))
            if daemon.told is Told.ACKNOWLEDGED:
                self.client_message(ACKNOWLEDGED)
                self._hurry()
        else:
            self._do(self.machine.resume(fail_safe=daemon.name.fail_safe))
            daemon.await_answer(self._answered, self._daemon_closed)

    # --- the client's side, fed by who watches its socket ---

    def client_message(self, data: bytes) -> None:
        self._do(self.machine.client_message(data))

    def client_closed(self) -> None:
        self._do(self.machine.client_closed())

    def process_ended(self) -> None:
        """It says that it has met its server, which is asked."""
        self.machine.client_ended()
        self._hurry()

    def _hurry(self) -> None:
        """Its server's answer takes milliseconds if they have met, and MPS may have waited for long."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._lane.loop.call_later(ENDED, self._expired)

    def withdraw(self) -> None:
        """The client is not admitted any more."""
        self._do(self.machine.withdraw())

    def _close(self) -> None:
        """Ends everything here but the client's socket."""
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        if self._run is not None:
            self._run.cancel()
        if self._daemon is not None:
            self._daemon.close()
            self._daemon = None

    # --- actions ---

    def _do(self, actions: Sequence[handover.Action]) -> None:
        """In order, also when carrying one out brings the next event."""
        self._actions.extend(actions)
        if self._acting:
            return
        self._acting = True
        try:
            while self._actions:
                self._act(self._actions.popleft())
        finally:
            self._acting = False
        self._set_deadline()

    def _act(self, action: handover.Action) -> None:
        match action:
            case handover.RunSession(commands, pause):
                self._retry = self._lane.loop.call_later(pause, self._start_session, commands)
            case handover.Connect():
                self._connect()
            case handover.Announce():
                self._announce()
            case handover.Give(data):
                self._give(data)
            case handover.StartRescue():
                self._rescue(action)
            case handover.Acknowledge(data):
                if self._daemon is not None:
                    self._daemon.acknowledge(data)
            case handover.Abandon():
                if self._daemon is not None:
                    self._instance.orphans.add(self._daemon)
                    self._daemon = None
            case handover.LimitsDoubted():
                self._instance.doubt(self, action)
            case _:
                self._finish(action)

    def _start_session(self, commands: Sequence[str]) -> None:
        self._run = Run(self._lane, commands, OURSELVES, self._instance.patience.limits, self._session)

    def _session(self, session: FrontEndSession | None, why: str) -> None:
        self._run = None
        if session is not None and session.how is not How.DONE:
            session, why = None, "the control daemon ended in the middle of a front-end session"
        actions = self.machine.session(None if session is None else session.answers, why)
        self._lane.servers = self.machine.servers
        self._do(actions)

    def _connect(self) -> None:
        if self.machine.stage is not Stage.CONNECT:
            return
        if self._instance.store.congested:  # what is given to the store now would not be safe there
            self._instance.store.when_free(self._connect)
            return
        try:
            sock = connect(self._lane.directory, CONTROL)
        except BlockingIOError:
            self._retry = self._lane.loop.call_later(self._pauses.pause(), self._connect)
            return
        except OSError as error:
            self._do(self.machine.unreachable(f"the control daemon cannot be reached: {error.strerror}"))
            return
        connection, machine = self.connection, self.machine
        connection.attempt += 1
        name = DaemonName(
            connection.number,
            connection.attempt,
            connection.peer.uid,
            connection.peer.gid,
            machine.fail_safe,
            machine.limits,
            self._instance.name,
            self._instance.is_own(connection),
        )
        self._daemon = Announcement(self._lane.loop, self._instance.store, sock, name)
        self._daemon.greeting(self._greeted, self._daemon_closed)
        self._do(machine.connected())

    def _greeted(self, data: bytes) -> None:
        assert self._daemon is not None
        self._lane.greeted(data, self._daemon.sock)
        self._do(self.machine.daemon_message(data, 0))

    def _announce(self) -> None:
        if self._daemon is None or self.machine.stage is not Stage.ANSWER:
            return
        if self._instance.store.congested:
            self._instance.store.when_free(self._announce)
            return
        try:
            self._daemon.announce()
        except OSError as error:
            self._do(self.machine.unreachable(f"the client could not be announced to the daemon: {error.strerror}"))
            return
        self._daemon.await_answer(self._answered, self._daemon_closed)

    def _answered(self, data: bytes, descriptors: list[int]) -> None:
        self._descriptors = descriptors
        self._do(self.machine.daemon_message(data, len(descriptors)))

    def _daemon_closed(self) -> None:
        self._do(self.machine.daemon_closed())

    def _give(self, data: bytes) -> None:
        """A gate that is killed in here is followed by one that gives it again, if it cannot know: the same descriptor,
        and the client reads nothing after its first."""
        alive = self._instance.passing(self)
        self.given = self._lane.loop.time()
        self.connection.mark = Mark.PASSING
        try:
            if alive:
                self.connection.sock.sendmsg([data], with_descriptors(self._descriptors))
        except OSError:  # it has gone, or never reads: its buffer held nothing but the greeting
            alive = False
        if alive:
            self.connection.mark = Mark.PASSED
        else:
            self._do(self.machine.undeliverable())

    def _rescue(self, how: handover.StartRescue) -> None:
        if not self._descriptors:  # the daemon has ended, and its servers with it
            self._do(self.machine.rescued("its control daemon has ended, and its server with it"))
            return
        Rescuer(
            self._lane.loop,
            self._descriptors.pop(),
            self.connection.peer,
            self._rescued,
            untouched=how.untouched,
            acknowledged=how.acknowledged,
        )

    def _rescued(self, why: str | None) -> None:
        self._do(self.machine.rescued(why))

    def _finish(self, outcome: handover.Outcome) -> None:
        self._close()
        self._instance.over(self, outcome)
        self._instance.settle(self.connection.process, self._descriptors)
        self._descriptors = []

    def _set_deadline(self) -> None:
        stage = self.machine.stage
        if stage is self._stage:
            return
        self._stage = stage
        self._lane.open_to_questions = stage is Stage.ANSWER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = self._instance.patience.of(stage)
        if seconds is not None:
            self._timer = self._lane.loop.call_later(seconds, self._expired)
        if self._lane.open_to_questions:
            self._lane.loop.call_soon(self._lane.pump)

    def _expired(self) -> None:
        if self.machine.stage is Stage.MEETING and self._run is not None and self._run.turned_away:
            self._do(self.machine.session(None))  # it has not been asked, and MPS speaks with others
        else:
            self._do(self.machine.expired())


def _wanted(table: Admissions, uid: int) -> tuple[object, ...]:
    """What MPS is told for this user."""
    return table.user(uid), table.fail_safe, table.devices, table.set_limits


def _least(fail_safe: Limits, wanted: Limits) -> Limits:
    """Never more than wanted: a job may have less than any user."""
    memory = {device: min(size, wanted.memory.get(device, size)) for device, size in fail_safe.memory.items()}
    return Limits(min(fail_safe.threads, wanted.threads), memory, fail_safe.below_normal or wanted.below_normal)
