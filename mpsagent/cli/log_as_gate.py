"""What the gate would have told of an old log: pending lines as knocks, connections as hand-overs, leaving as ends.

Logs that were written without a gate have no word of it, and the engine believes the gate alone. So each line that
speaks of a client becomes what the gate would have said, as far as the engine's table of admissions lets that user in.

In the logs of a node that has a gate, that announces all clients by its own pid, and only servers name them.

Only the first few connections of each user, and of all, are shown to the engine at a time: what it decides hangs on who
is first, and the work for each line must not grow with the queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import takewhile

from mpsagent.core import inputs as inp
from mpsagent.mps import events as ev
from mpsagent.mps.events import Line
from mpsagent.wire import link

SHOWN_OF_USER, SHOWN = 8, 64
"""Held connections that the engine is shown at a time."""


@dataclass(slots=True)
class _One:
    """A process of the log. ``connection`` None: it passed. ``due``: the log has let it in."""

    peer: inp.Peer
    since: float
    connection: int | None
    shown: bool = False
    due: bool = False
    server: int | None = None


class LogAsGate:
    """Log events in, gate inputs out. ``table``: the admissions that are in force."""

    def __init__(self) -> None:
        self.table = link.Admissions()
        self._ones: dict[int, _One] = {}
        self._waiting: dict[int, dict[int, _One]] = {}
        """By user, in the order of time: who has not been let in."""
        self._of_server: dict[int, dict[int, _One]] = {}
        self._line: list[tuple[int, _One]] = []
        """Who is not shown, by order of arrival; behind whom, if their user has as many shown as may be."""
        self._behind: dict[int, list[tuple[int, _One]]] = {}
        self._shown: dict[int, list[_One]] = {}
        self._shown_count = 0
        self._passed: dict[int, int] = {}
        self._numbers = 0
        self._control: int | None = None
        self._server_uids: dict[int, tuple[int, float | None]] = {}
        self._starting_uid = -1
        self._ended_by_us: set[int] = set()
        self._announced: tuple[int, int] = (0, 0)
        """The pid and the user that the control daemon named last."""
        self._gates: set[int] = set()
        self._unnamed: tuple[float, int, int] | None = None
        """When a process came that it had not named, and whom it had named last: a gate, unless its own line follows
        in the same moment (server.log goes first)."""

    # --- what the log says --------------------------------------------------------------------------------------------

    def before(self, event: Line) -> Iterator[inp.Input]:
        """What the gate and the kernel say before the engine reads this line."""
        if event.what is ev.ControlStarted:
            if self._control != event.pid:
                yield from self._control_gone(event.at)
                yield from self._control_runs(event.at, event.pid, event.text)
        elif self._control is None and event.what is not ev.ControlExited:
            yield from self._control_runs(event.at, 0, "")  # the log begins in the middle
        yield from self._gate_is_none(event.at)
        if event.what in (ev.ClientQueued, ev.ClientAdmitted):
            self._announced = event.pid, event.uid
            if self._unnamed is not None and self._unnamed[1] == event.pid:
                self._unnamed = None
            if event.pid not in self._gates:
                yield from self._knock(event.at, event.pid, event.uid, event.what is ev.ClientAdmitted)
        elif event.what is ev.ContextConnected:
            uid = self._server_uids.get(event.server, (0, None))[0] or self._announced[1]
            last = self._ones.get(self._announced[0])
            if event.pid not in self._ones and last is not None and last.server is None:
                self._unnamed = event.at, event.pid, last.peer.pid
            self._gates.discard(event.pid)
            yield from self._knock(event.at, event.pid, uid, True)
            one = self._ones.get(event.pid)
            if one is not None and one.server != event.server:
                self._leaves(one)
                one.server = event.server
                self._of_server.setdefault(event.server, {})[event.pid] = one
        elif event.what is ev.ServerStarting:
            self._server_uids[event.server] = (event.uid, None)
            self._starting_uid = event.uid
        elif event.what is ev.ServerReady:
            self._server_uids[event.server] = (self._server_uids.get(event.server, (0, None))[0], event.at)

    def after(self, event: Line) -> Iterator[inp.Input]:
        """What they say after it."""
        if event.what in (ev.ClientDisconnected, ev.ClientRefused):
            self._ended_by_us.discard(event.pid)
            yield from self.gone(event.at, event.pid)
        elif event.what is ev.ServerExited:
            uid, ready = self._server_uids.pop(event.server, (-1, None))
            gone = list(self._of_server.get(event.server, ()))
            if ready is not None:  # who waited for this server was let in when it became Ready, or has gone
                line = self._waiting.get(uid, {}).items()
                gone += [pid for pid, _ in takewhile(lambda waits: waits[1].since <= ready, line)]
            for pid in gone:
                yield from self.gone(event.at, pid)
        elif event.what is ev.SharedMemoryRemoved:  # MPS gives a server up, and drops who waits for it
            for pid in list(self._waiting.get(self._starting_uid, ())):
                yield from self.gone(event.at, pid)
        elif event.what is ev.ControlExited:
            yield from self._control_gone(event.at)

    def _gate_is_none(self, at: float) -> Iterator[inp.Input]:
        if self._unnamed is not None and at > self._unnamed[0]:
            self._gates.add(self._unnamed[2])
            yield from self.gone(at, self._unnamed[2])
            self._unnamed = None

    def _control_runs(self, at: float, pid: int, socket: str) -> Iterator[inp.Input]:
        self._control = pid
        yield inp.ControlRuns(at, pid, at, socket)

    def _control_gone(self, at: float) -> Iterator[inp.Input]:
        """With a control daemon its servers end, and its pending list (recordings 02, R11 and 06, V4)."""
        if self._control is None:
            return
        for pid in list(self._ones):
            yield from self.gone(at, pid)
        yield inp.ControlGone(at, self._control)
        self._control = None
        self._server_uids.clear()

    # --- who waits and who passed -------------------------------------------------------------------------------------

    def _knock(self, at: float, pid: int, uid: int, due: bool) -> Iterator[inp.Input]:
        if not pid or (pid in self._ended_by_us and due):  # no pid in the line; or it lives on only in this log
            return
        self._ended_by_us.discard(pid)
        one = self._ones.get(pid)
        if one is None:
            self._numbers += 1
            one = self._ones[pid] = _One(inp.Peer(pid, uid, uid, self._numbers), at, self._numbers)
            self._waiting.setdefault(uid, {})[pid] = one
            heappush(self._line, (self._numbers, one))
            yield from self._show(at)
        if due:
            one.due = True
            self._waits_no_more(one)

    def _waits_no_more(self, one: _One) -> None:
        line = self._waiting.get(one.peer.uid, {})
        if line.pop(one.peer.pid, None) is not None and not line:
            del self._waiting[one.peer.uid]

    def _leaves(self, one: _One) -> None:
        if one.server is not None:
            there = self._of_server[one.server]
            del there[one.peer.pid]
            if not there:
                del self._of_server[one.server]

    def _show(self, at: float) -> Iterator[inp.Input]:
        """Let the engine see as many as it may."""
        while self._line and self._shown_count < SHOWN:
            number, one = heappop(self._line)
            if self._ones.get(one.peer.pid) is not one:
                continue
            mine = self._shown.setdefault(one.peer.uid, [])
            if len(mine) >= SHOWN_OF_USER:
                heappush(self._behind.setdefault(one.peer.uid, []), (number, one))
                continue
            mine.append(one)
            self._shown_count += 1
            one.shown = True
            assert one.connection is not None
            yield inp.GateSaid(at, link.Knock(one.connection, *one.peer[:4], one.since))

    def _hide(self, one: _One) -> None:
        if one.shown:
            one.shown = False
            self._shown_count -= 1
            mine = self._shown[one.peer.uid]
            mine.remove(one)
            if not mine:
                del self._shown[one.peer.uid]
            behind = self._behind.get(one.peer.uid, [])
            while behind:
                number, following = heappop(behind)
                if self._ones.get(following.peer.pid) is following:
                    heappush(self._line, (number, following))
                    break
            if not behind:
                self._behind.pop(one.peer.uid, None)

    def gone(self, at: float, pid: int, by_us: bool = False) -> Iterator[inp.Input]:
        """The process has ended, or its connection is closed. ``by_us``: the log goes on with it all the same."""
        if by_us:
            self._ended_by_us.add(pid)
        one = self._ones.pop(pid, None)
        if one is None:
            return
        self._waits_no_more(one)
        self._leaves(one)
        if one.connection is None:
            self._passed[one.peer.uid] -= 1
            if not self._passed[one.peer.uid]:
                del self._passed[one.peer.uid]
            yield inp.ProcessEnded(at, pid)
        elif one.shown:
            self._hide(one)
            yield inp.GateSaid(at, link.Left(one.connection))
            yield from self._show(at)

    def hand_over(self, at: float) -> Iterator[inp.Input]:
        """Those whom both the log and the table let in."""
        if not self.table.open:
            return
        for user in self.table.users.values():
            for one in list(self._shown.get(user.uid, ())):
                if one.due and one.connection is not None and self._fits(user):
                    yield inp.GateSaid(at, link.Handing(one.connection, 0, 0, at))
                    pid, uid, _, start = one.peer[:4]
                    yield inp.GateSaid(at, link.Passed(one.connection, pid, uid, start, user.limits, 0.0, at))
                    self._hide(one)
                    one.connection = None
                    self._passed[user.uid] = self._passed.get(user.uid, 0) + 1
                    yield from self._show(at)

    def _fits(self, user: link.User) -> bool:
        mine = self._passed.get(user.uid, 0)
        free = user.max_clients is None or mine < user.max_clients
        return free and user.admit == "all" and sum(self._passed.values()) < self.table.room

    @property
    def users(self) -> set[int]:
        """Who has to do with MPS now, as far as the engine is shown."""
        return self._shown.keys() | self._passed.keys()
