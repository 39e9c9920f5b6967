"""Carries out one hand-over: the machine's actions on the sockets of client and daemon, and its deadlines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from mpsagent.gate.announcement import Announcement, close_all
from mpsagent.gate.channel import with_descriptors
from mpsagent.gate.connection import Connection
from mpsagent.gate.handover import (
    Abandon,
    Acknowledge,
    Action,
    Announce,
    Connect,
    Doubt,
    Give,
    HandOver,
    Outcome,
    Patience,
    Plan,
    Rescue,
    Stage,
)
from mpsagent.gate.handover import Run as RunSession
from mpsagent.gate.handshake import Mark
from mpsagent.gate.lane import FIRST_PAUSE, LONGEST_PAUSE, Lane, Run
from mpsagent.gate.orphans import Orphans
from mpsagent.gate.question import CONTROL, connect
from mpsagent.gate.rescue import SETTLING, Rescuer
from mpsagent.gate.store import DaemonName, Store
from mpsagent.mps.limits import Limits
from mpsagent.mps.rendezvous import Credentials
from mpsagent.mps.session import How, Session


class Handing:
    """``passing`` is called just before the descriptor goes out, and says whether the client's process lives; ``doubt``
    when limits are not confirmed; ``done`` once with what came of it, and the client's socket is the caller's again."""

    def __init__(
        self,
        lane: Lane,
        connection: Connection,
        machine: HandOver,
        patience: Patience,
        own: Credentials,
        store: Store,
        orphans: Orphans,
        instance: str,
        *,
        passing: Callable[[], bool],
        doubt: Callable[[Doubt], None],
        done: Callable[[Outcome], None],
    ) -> None:
        self.connection = connection
        self.began = self.given = lane.loop.time()
        self._lane = lane
        self._patience = patience
        self._own = own
        self._store = store
        self._orphans = orphans
        self._instance = instance
        self._passing = passing
        self._doubt = doubt
        self._done = done
        self._machine = machine
        self._run: Run | None = None
        self._daemon: Announcement | None = None
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE
        self._stage: Stage | None = None
        self._actions: deque[Action] = deque()
        self._acting = False

    @property
    def stage(self) -> Stage:
        return self._machine.stage

    @property
    def plan(self) -> Plan:
        return self._machine.plan

    @property
    def limits(self) -> Limits:
        return self._machine.limits

    @property
    def fail_safe(self) -> bool:
        return self._machine.fail_safe

    def start(self) -> None:
        self._do(self._machine.start())

    def resume(self, daemon: Announcement) -> None:
        """Goes on with an earlier gate's connection to the daemon, which has been told everything."""
        self._daemon = daemon
        mark = self.connection.mark
        if mark is Mark.PASSED or (mark is Mark.PASSING and self.connection.unread_by_peer()):
            self._passing()
            _, self._descriptors = daemon.answer() or (b"", [])
            self._do(self._machine.resume_given(fail_safe=daemon.name.fail_safe))
        else:
            self._do(self._machine.resume(fail_safe=daemon.name.fail_safe))
            daemon.await_answer(self._answered, self._daemon_closed)

    # --- the client's side, fed by who watches its socket ---

    def client_message(self, data: bytes) -> None:
        self._do(self._machine.client_message(data))

    def client_closed(self) -> None:
        self._do(self._machine.client_closed())

    def withdraw(self) -> None:
        """The client is not admitted any more."""
        self._do(self._machine.withdraw())

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

    def _do(self, actions: Sequence[Action]) -> None:
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

    def _act(self, action: Action) -> None:
        match action:
            case RunSession(commands, pause):
                self._retry = self._lane.loop.call_later(pause, self._start_session, commands)
            case Connect():
                self._connect()
            case Announce():
                self._announce()
            case Give(data):
                self._give(data)
            case Rescue():
                self._rescue(action)
            case Acknowledge(data):
                if self._daemon is not None:
                    self._daemon.acknowledge(data)
            case Abandon():
                if self._daemon is not None:
                    self._orphans.add(self._daemon)
                    self._daemon = None
            case Doubt():
                self._doubt(action)
            case _:
                self._finish(action)

    def _start_session(self, commands: Sequence[str]) -> None:
        self._run = Run(self._lane, commands, self._own, self._patience.limits, self._session)

    def _session(self, session: Session | None, why: str) -> None:
        self._run = None
        if session is not None and session.how is not How.DONE:
            session, why = None, "the control daemon ended in the middle of a front-end session"
        actions = self._machine.session(None if session is None else session.answers, why)
        self._lane.servers = self._machine.servers
        self._do(actions)

    def _connect(self) -> None:
        if self._machine.stage is not Stage.CONNECT:
            return
        if self._store.congested:  # what is given to the store now would not be safe there
            self._store.when_free(self._connect)
            return
        try:
            sock = connect(self._lane.directory, CONTROL)
        except BlockingIOError:
            self._retry = self._lane.loop.call_later(self._pause, self._connect)
            self._pause = min(LONGEST_PAUSE, self._pause * 2)
            return
        except OSError as error:
            self._do(self._machine.unreachable(f"the control daemon cannot be reached: {error.strerror}"))
            return
        connection, machine = self.connection, self._machine
        connection.attempt += 1
        name = DaemonName(
            connection.number,
            connection.attempt,
            connection.peer.uid,
            connection.peer.gid,
            machine.fail_safe,
            machine.limits,
            self._instance,
        )
        self._daemon = Announcement(self._lane.loop, self._store, sock, name)
        self._daemon.greeting(self._greeted, self._daemon_closed)
        self._do(machine.connected())

    def _greeted(self, data: bytes) -> None:
        assert self._daemon is not None
        self._lane.greeted(data, self._daemon.sock)
        self._do(self._machine.daemon_message(data, 0))

    def _announce(self) -> None:
        if self._daemon is None or self._machine.stage is not Stage.ANSWER:
            return
        if self._store.congested:
            self._store.when_free(self._announce)
            return
        try:
            self._daemon.announce()
        except OSError as error:
            self._do(self._machine.unannounced(f"the client could not be announced to the daemon: {error.strerror}"))
            return
        self._daemon.await_answer(self._answered, self._daemon_closed)

    def _answered(self, data: bytes, descriptors: list[int]) -> None:
        self._descriptors = descriptors
        self._do(self._machine.daemon_message(data, len(descriptors)))

    def _daemon_closed(self) -> None:
        self._do(self._machine.daemon_closed())

    def _give(self, data: bytes) -> None:
        """A gate that is killed in here is followed by one that gives it again, if it cannot know: the same descriptor,
        and the client reads nothing after its first."""
        alive = self._passing()
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
            self._do(self._machine.undeliverable())

    def _rescue(self, how: Rescue) -> None:
        if not self._descriptors:  # the daemon has ended, and its servers with it
            self._do(self._machine.rescued("nothing could be done for its server"))
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
        self._do(self._machine.rescued(why))

    def _finish(self, outcome: Outcome) -> None:
        self._close()
        self._done(outcome)
        # A client that is killed now must not hang up on its server before that has settled.
        self._lane.loop.call_later(SETTLING, close_all, self._descriptors)
        self._descriptors = []

    def _set_deadline(self) -> None:
        stage = self._machine.stage
        if stage is self._stage:
            return
        self._stage = stage
        self._lane.open_to_questions = stage is Stage.ANSWER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = self._patience.of(stage)
        if seconds is not None:
            self._timer = self._lane.loop.call_later(seconds, self._expired)
        if self._lane.open_to_questions:
            self._lane.loop.call_soon(self._lane.pump)

    def _expired(self) -> None:
        if self._machine.stage is Stage.MEETING and self._run is not None and self._run.turned_away:
            self._do(self._machine.session(None))  # it has not been asked, and MPS speaks with others
        else:
            self._do(self._machine.expired())
