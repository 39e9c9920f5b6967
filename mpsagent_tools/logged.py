"""Sessions from MPS's own logs. Pure.

The state gets its clients only from the gate, and a log has no messages of a gate. So the reducer gets each line, and
for a queued or connected client the message that a gate would have sent. It derives all other facts (faults, lost
servers, the end of clients) from the lines, and :mod:`mpsagent.core.sessions` makes rows of its transitions.

A log does not distinguish a killed client from a finished one. Drivers before 580, and a control daemon in a container,
do not name all clients: then admissions are known, but not their duration (``unknown``). In the log of a node with
mpsagent the gate announces all clients by its own pid, which is not a waiting client.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import takewhile

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.model import State
from mpsagent.core.reduce import reduce
from mpsagent.core.sessions import Session, Sessions
from mpsagent.core.transitions import transition_fields
from mpsagent.mps import events as ev
from mpsagent.mps.events import Line
from mpsagent.mps.limits import Limits
from mpsagent.wire import link

_SAME_MOMENT = 0.01
"""Seconds within which lines of the two logs belong to one event."""
_MOST_AT_WORK = 1024
"""More than MPS can have: only a broken log comes here."""


class Logged:
    """``feed`` lines in the order of time, then ``finish`` once. ``unnamed``: the log does not name all clients."""

    def __init__(self) -> None:
        self.unnamed = False
        self.last = 0.0
        self._state, self._sessions = State(), Sessions()
        self._rows: dict[int, Session] = {}
        self._latest: Session
        self._number = 0
        self._waiting: dict[int, dict[int, float]] = {}
        """The waiting processes of each user, and since when, in this order."""
        self._users: dict[int, int] = {}
        """The user of each waiting process."""
        self._at_work: dict[int, int] = {}
        """pid -> server"""
        self._readies: dict[int | None, list[float]] = {}
        self._perhaps: list[tuple[Session, float]] = []
        """Waiting processes and the time of their admission, for a log that does not name connected clients."""
        self._server_log = False
        self._refused: dict[int, float] = {}
        self._announced: tuple[int | None, int] = None, -1
        """The pid and the user that the control daemon named last."""
        self._named: set[int] = set()
        self._through: dict[int, int] = {}
        """The pid that the daemon had named last, for each client that was connected before the daemon named it."""

    @property
    def unknown_lines(self) -> int:
        return self._state.unknown_lines

    def feed(self, event: Line) -> None:
        self.last, what = event.at, event.what
        self._server_log = self._server_log or what in ev.SERVER_LOG
        if what in (ev.ControlStarted, ev.ControlExited):
            self._control_gone(event.at)
        if what is ev.ControlStarted or (self._state.control is None and what is not ev.ControlExited):
            pid, socket = (event.pid, event.text) if what is ev.ControlStarted else (0, "")
            self._take(inp.ControlRuns(event.at, pid, event.at, socket))
        gone = list(self._leaving(event))
        if what in (ev.ClientQueued, ev.ClientAdmitted):
            self._comes(event)
        elif what is ev.ContextConnected:
            self._connected(event)
        elif what is ev.ClientRefused:
            self._turned_away(event.at, event.server, event.pid, event.text)
        elif what is ev.ClientsFull:
            server = self._state.servers.get(event.server)
            whom = 0 if server is None else server.last_context
            self._turned_away(event.at, event.server, whom, f"server full ({event.number} clients)")
        elif what is ev.TerminationAsked and event.pid in self._at_work:
            self._terminated(event)
        elif what is ev.ClientUnnamed:
            self.unnamed = True
        self._take(event)
        if what is ev.ServerReady:
            server = self._state.servers.get(event.server)
            self._readies.setdefault(None if server is None else server.uid, []).append(event.at)
        for pid, at in gone:
            self._gone(pid, at)

    def finish(self) -> list[Session]:
        """Return the sessions in the order of time. Sessions that have no end in the log are open."""
        for uid, line in self._waiting.items():
            for pid, since in line.items():
                self._knock(pid, uid, since)
                self._let_in_perhaps(uid, since)
        for one, at in self._perhaps if self.unnamed or not self._server_log else ():
            one.passed = one.ended = at
            one.outcome = "unknown"
        # The gate announces clients by its own pid, and servers know the clients' pids: the gate's is not a client.
        gates = {gate for pid, gate in self._through.items() if pid not in self._named}
        rows = [one for one in self._rows.values() if one.passed is not None or one.pid not in gates]
        for one in rows:
            one.pid, one.uid = max(0, one.pid), None if one.uid == -1 else one.uid
        return sorted(rows, key=lambda one: (one.came, one.number))

    # --- who comes ----------------------------------------------------------------------------------------------------

    def _comes(self, event: Line) -> None:
        if event.what is ev.ClientAdmitted and event.at <= self._refused.pop(event.pid, -1.0) + _SAME_MOMENT:
            return  # it was refused, which server.log has said first
        self.unnamed = self.unnamed or event.pid <= 0
        pid = event.pid if event.pid > 0 else -2 - event.uid  # all processes of this user that the log does not name
        if event.pid > 0:
            self._announced = event.pid, event.uid
            self._named.add(event.pid)
        if pid not in self._users and pid not in self._at_work:
            self._users[pid] = event.uid
            self._waiting.setdefault(event.uid, {})[pid] = event.at
            if event.what is ev.ClientAdmitted:
                self._readies.setdefault(event.uid, []).append(event.at)

    def _connected(self, event: Line) -> None:
        if event.pid <= 0:
            self.unnamed = True
            return
        if self._at_work.get(event.pid) == event.server:
            return
        if event.pid in self._at_work:  # its end there is not in the log
            self._gone(event.pid, event.at)
        gate = self._announced[0]
        if event.pid not in self._named and gate is not None:
            self._through.setdefault(event.pid, gate)
        server = self._state.servers.get(event.server)
        limits = Limits() if server is None else server.limits
        uid, since = self._whose(event.pid, event.server), self._waits_no_more(event.pid, event.at)
        connection = self._knock(event.pid, uid, since)
        passed = link.Passed(connection, event.pid, uid, connection, limits, 0.0, event.at)
        self._take(inp.GateSaid(event.at, passed))
        self._at_work[event.pid] = event.server
        if len(self._at_work) > _MOST_AT_WORK:
            self._gone(next(iter(self._at_work)), event.at)

    def _turned_away(self, at: float, server: int, pid: int, why: str) -> None:
        self.unnamed = self.unnamed or pid < 0
        uid, connection = self._whose(pid, server), 0
        if pid > 0 and pid not in self._at_work:
            self._refused[pid] = at  # its admission has the same time stamp and is still to be read
            connection = self._knock(pid, uid, self._waits_no_more(pid, at))
        self._take(inp.GateSaid(at, link.Refused(connection, pid, uid, why)))

    def _whose(self, pid: int, server: int) -> int:
        """Return the client's user, if known from its announcement or from a server that has only one user."""
        known = self._state.servers.get(server)
        of_server = None if known is None else known.uid
        return self._users.get(pid, of_server or (self._announced[1] if pid > 0 else -1))

    def _knock(self, pid: int, uid: int, since: float) -> int:
        """Return the number of the connection with which the client waits."""
        connection = self._number = self._number + 1
        self._take(inp.GateSaid(since, link.Knock(connection, pid, uid, uid, connection, since)))
        return connection

    # --- who goes -----------------------------------------------------------------------------------------------------

    def _leaving(self, event: Line) -> Iterable[tuple[int, float]]:
        """Return the processes that end with this line, and the times of their ends."""
        if event.what is ev.ClientDisconnected:
            if self._at_work.get(event.pid) == event.server:
                yield event.pid, event.at
        elif event.what is ev.ServerExited:
            yield from ((pid, event.at) for pid, server in self._at_work.items() if server == event.server)
            known = self._state.servers.get(event.server)
            if known is not None and known.uid is not None and known.ready is not None:
                ready, line = known.ready, self._waiting.get(known.uid, {})
                # all processes that waited for it were attached when it became Ready: the others had ended
                yield from ((pid, ready) for pid, since in takewhile(lambda one: one[1] <= ready, line.items()))
        elif event.what is ev.SharedMemoryRemoved:  # MPS gives a server up, and drops its waiting clients
            newest = max(self._state.servers.values(), key=lambda one: one.started, default=None)
            if newest is not None and newest.uid is not None:
                yield from ((pid, event.at) for pid in self._waiting.get(newest.uid, ()))

    def _control_gone(self, at: float) -> None:
        """Remove the servers and the pending list, which end with a control daemon (recordings 02, R11 and 06, V4)."""
        if self._state.control is not None:
            self._take(inp.ControlGone(at, self._state.control.pid))
        for pid in [*self._at_work, *self._users]:
            self._gone(pid, at)

    def _gone(self, pid: int, at: float) -> None:
        if self._at_work.pop(pid, None) is not None:
            self._take(inp.ProcessEnded(at, pid))
            return
        uid = self._users[pid]
        since = self._waits_no_more(pid, at)
        connection = self._knock(pid, uid, since)
        self._let_in_perhaps(uid, since)
        self._take(inp.GateSaid(max(since, at), link.Left(connection)))

    def _waits_no_more(self, pid: int, at: float) -> float:
        """Remove a waiting process; return the time since which it has waited."""
        uid = self._users.pop(pid, None)
        if uid is None:
            return at
        since = self._waiting[uid].pop(pid)
        if not self._waiting[uid]:
            del self._waiting[uid]
        return since

    def _let_in_perhaps(self, uid: int, since: float) -> None:
        """Note that a waiting process was admitted when its user's next server was Ready."""
        readies = self._readies.get(uid, [])
        first = bisect_left(readies, since)
        if first < len(readies):
            self._perhaps.append((self._latest, readies[first]))

    def _terminated(self, event: Line) -> None:
        client = self._state.clients[event.pid]
        asked = act.TerminateClient(
            server=event.server, pid=client.pid, uid=client.uid, start=client.peer.start, deadline=0.0,
            reason="terminate_client was sent for it", rule="",
        )  # fmt: skip
        self._take(act.Done(event.at, asked, ok=True))
        self._record("action.done", event.at, action="TerminateClient", pid=client.pid, reason=asked.reason)

    def _take(self, event: inp.Input | act.Done) -> None:
        self._state, told = reduce(self._state, event)
        for one in told:
            self._record(one.kind, one.at, **transition_fields(one))

    def _record(self, kind: str, at: float, **fields: object) -> None:
        self._number += 1
        for row in self._sessions.take({"seq": self._number, "kind": kind, "at": at, **fields}):
            self._rows[row.number] = self._latest = row
