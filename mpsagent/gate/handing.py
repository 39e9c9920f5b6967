"""Carries out one hand-over: the machine's actions on the sockets of client and daemon, and its deadlines."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum

from mpsagent.gate.channel import Channel, as_process, with_descriptors
from mpsagent.gate.connection import Connection
from mpsagent.gate.handover import (
    Action,
    Connect,
    Doubt,
    Give,
    HandOver,
    Outcome,
    Passed,
    Patience,
    Stage,
    Tell,
)
from mpsagent.gate.handover import Run as RunSession
from mpsagent.gate.lane import CONTROL, FIRST_PAUSE, LONGEST_PAUSE, Lane, Run, connect
from mpsagent.gate.session import How, Session
from mpsagent.gate.store import DaemonName, Store
from mpsagent.mps.rendezvous import CREDENTIALS, Credentials


class Told(IntEnum):
    """What the daemon may have heard, kept as the priority of the connection to it (see handshake.Mark)."""

    NOTHING = 0
    CREDENTIALS = 1
    ALL = 2


def told(daemon: socket.socket) -> Told:
    try:
        return Told(daemon.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY))
    except (OSError, ValueError):
        return Told.NOTHING


class Handing:
    """``passing`` is called just before the descriptor goes out, ``doubt`` when limits are not confirmed, ``done`` once
    with what came of it. After ``done`` the client's socket is the caller's again, unless the acknowledgement is
    outstanding: then :meth:`late_message` has to be told of it.

    The connection to the daemon lies in the store as long as it lasts: a server waits for ever for a client whose relay
    dies after the daemon was told (seen on an H100), so the next gate goes on with it.
    """

    def __init__(
        self,
        lane: Lane,
        connection: Connection,
        machine: HandOver,
        patience: Patience,
        own: Credentials,
        store: Store,
        *,
        passing: Callable[[], None],
        doubt: Callable[[Doubt], None],
        done: Callable[[Outcome], None],
    ) -> None:
        self.connection = connection
        self.began = lane.loop.time()
        self._lane = lane
        self._patience = patience
        self._own = own
        self._store = store
        self._passing = passing
        self._doubt = doubt
        self._done = done
        self._machine = machine
        self._run: Run | None = None
        self._daemon: Channel | None = None
        self._name = ""
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

    def start(self) -> None:
        self._do(self._machine.start())

    def resume(self, daemon: socket.socket, name: DaemonName, *, gone: bool) -> None:
        """Goes on with an earlier gate's connection to the daemon, which has been told everything."""
        self._name = str(name)
        self._do(self._machine.resume(fail_safe=name.fail_safe, gone=gone))
        self._listen(daemon)

    def outlast(self, daemon: socket.socket, name: DaemonName) -> None:
        """Only the acknowledgement is outstanding, of a hand-over that an earlier gate has made."""
        self._name = str(name)
        self._machine.stage = Stage.DONE
        self._listen(daemon)

    # --- the client's side, fed by who watches its socket ---

    def client_message(self, data: bytes) -> None:
        self._do(self._machine.client_message(data))

    def client_closed(self) -> None:
        self._do(self._machine.client_closed())

    def late_message(self, data: bytes) -> None:
        """The acknowledgement of a client that had not given it in time."""
        if self._daemon is not None:
            self._tell(data)
        self.close()

    def withdraw(self) -> None:
        """The client is not admitted any more."""
        self._do(self._machine.withdraw())

    def close(self) -> None:
        """Ends everything here but the client's socket."""
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        if self._run is not None:
            self._run.cancel()
        if self._daemon is not None:
            self._daemon.close()
            self._store.drop(self._name)
        self._drop_descriptors()

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
            case RunSession(commands):
                self._run = Run(self._lane, commands, self._own, self._patience.limits, self._session)
            case Connect():
                self._connect()
            case Tell(data):
                self._tell(data)
            case Give(data):
                self._give(data)
            case Doubt():
                self._doubt(action)
            case _:
                self._finish(action)

    def _session(self, session: Session | None, why: str) -> None:
        self._run = None
        if session is not None and session.how is not How.DONE:
            session, why = None, "the control daemon ended in the middle of a front-end session"
        actions = self._machine.session(None if session is None else session.answers, why)
        self._lane.servers = self._machine.servers
        self._do(actions)

    def _connect(self) -> None:
        try:
            sock = connect(self._lane.directory, CONTROL)
        except BlockingIOError:
            self._retry = self._lane.loop.call_later(self._pause, self._connect)
            self._pause = min(LONGEST_PAUSE, self._pause * 2)
            return
        except OSError as error:
            self._do(self._machine.unreachable(f"the control daemon cannot be reached: {error.strerror}"))
            return
        name = DaemonName(self.connection.number, self._machine.limits, self._machine.fail_safe)
        self._name = str(name)
        self._store.keep(self._name, sock.fileno())
        self._listen(sock)
        self._do(self._machine.connected())

    def _listen(self, daemon: socket.socket) -> None:
        self._daemon = Channel(
            self._lane.loop, daemon, self._from_daemon, self._daemon_closed, descriptors=4, peek=True
        )

    def _from_daemon(self, data: bytes, _who: Credentials | None, descriptors: list[int]) -> None:
        assert self._daemon is not None
        if self._machine.stage is Stage.GREETING:
            self._lane.greeted(data, self._daemon.sock)
        self._drop_descriptors()
        self._descriptors = descriptors
        self._do(self._machine.daemon_message(data, len(descriptors)))
        self._drop_descriptors()

    def _daemon_closed(self) -> None:
        self._store.drop(self._name)
        self._do(self._machine.daemon_closed())

    def _tell(self, data: bytes) -> None:
        assert self._daemon is not None
        if self._machine.stage is Stage.ANSWER:
            mark = Told.CREDENTIALS if data == CREDENTIALS else Told.ALL
            with suppress(OSError):
                self._daemon.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, int(mark))
        who = self.connection.peer
        error = self._daemon.send(data, as_process(who))
        if isinstance(error, PermissionError):
            # without CAP_SYS_ADMIN: the server learns the client's pid from the client itself (seen on an H100)
            error = self._daemon.send(data, as_process(Credentials(self._own.pid, who.uid, who.gid)))
        if isinstance(error, ProcessLookupError):
            if self._machine.stage is Stage.DONE:  # only its acknowledgement, and the process has ended since
                self._daemon.send(data)
            else:
                self._do(self._machine.undeliverable())

    def _give(self, data: bytes) -> None:
        self._passing()
        try:
            self.connection.sock.sendmsg([data], with_descriptors(self._descriptors))
        except OSError:  # it has gone, or never reads: its buffer held nothing but the greeting
            self._do(self._machine.undeliverable())

    def _drop_descriptors(self) -> None:
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors = []

    def _finish(self, outcome: Outcome) -> None:
        late = isinstance(outcome, Passed) and not outcome.acknowledged
        if not late:
            self.close()
        self._done(outcome)

    def _set_deadline(self) -> None:
        stage = self._machine.stage
        if stage is self._stage:
            return
        self._stage = stage
        self._lane.open_to_questions = stage in (Stage.ANSWER, Stage.ACKNOWLEDGEMENT)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = self._patience.of(stage)
        if seconds is not None and stage is not Stage.LIMITS:  # sessions have their own
            self._timer = self._lane.loop.call_later(seconds, self._expired)
        if self._lane.open_to_questions:
            self._lane.loop.call_soon(self._lane.pump)

    def _expired(self) -> None:
        self._do(self._machine.expired())
