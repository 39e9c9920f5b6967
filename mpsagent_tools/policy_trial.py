"""The same clients under another policy: when the engine and the gate's queue would have admitted them. Pure.

Each client starts when it started and works as long as it worked; a client that never worked leaves when it left. MPS
answers at once and obeys: there are no faults, and a server starts in no time. A paused client continues its work
afterwards. A terminated client is not started again.
"""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.core.sessions import Session, Sessions
from mpsagent.core.transitions import Transition, transition_fields
from mpsagent.gate.queue import Held, KnownProcess, Queue
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.wire import link

CONTROL, SERVERS = 1 << 29, 1 << 30
"""Pids from which on those of control daemons and servers are; clients have their numbers."""
_MOST_ROUNDS = 20
_Event = inp.Input | act.Done


def tried(
    policy: Policy, sessions: Iterable[Session], until: float, who: Callable[[int], Identity], devices: Sequence[Device]
) -> list[Session]:
    """Return the sessions that these clients would have had under another policy of their instance."""
    came = sorted((one for one in sessions if one.kind == "client" and one.uid is not None), key=lambda one: one.came)
    users = {one.uid: who(one.uid) for one in came if one.uid is not None}
    if policy.sharing != "per-user":
        return _Trial(policy, users, devices, came).until(until)
    alone = replace(policy, sharing="turns")  # no other user comes
    each = [_Trial(alone, users, devices, [one for one in came if one.uid == uid]).until(until) for uid in users]
    return sorted((one for rows in each for one in rows), key=lambda one: one.came)


class _Trial:
    """A simulated node: a gate and a control daemon that carry out the engine's actions."""

    def __init__(
        self, policy: Policy, users: dict[int, Identity], devices: Sequence[Device], came: Sequence[Session]
    ) -> None:
        self._policy, self._core, self._queue = policy, Core(), Queue()
        self._clients = dict(enumerate(came, 1))
        self._coming = [(one.came, number) for number, one in self._clients.items()]
        self._left: dict[int, float] = {}
        """Remaining seconds of work of waiting and paused clients."""
        self._ends: list[tuple[float, int]] = []
        self._working: dict[int, float] = {}
        """The end of the work of working clients."""
        self._leaves: dict[int, float] = {}
        """The time at which clients that never worked leave."""
        self._servers: dict[int, int] = {}
        """The server of each user; 0: of all users."""
        self._table = link.Admissions()
        self._again: float | None = None
        """The time of the next question to the gate's queue."""
        self._daemons = self._records = 0
        self._sessions, self._rows = Sessions(), dict[int, Session]()
        self._now = came[0].came if came else 0.0
        self._settle([
            inp.PolicyChanged(self._now, policy), inp.DevicesFound(self._now, tuple(devices)),
            inp.PeopleKnown(self._now, users), self._daemon(), inp.GateSaid(self._now, link.Hello(1, self._now)),
            inp.GateSaid(self._now, link.Synced()),
        ])  # fmt: skip

    def until(self, end: float) -> list[Session]:
        """Return all sessions until this time. Logs have milliseconds: ends in this millisecond are included."""
        heapq.heapify(self._coming)
        while (at := self._next()) is not None and at < end + 0.001:
            self._now = at
            told: list[_Event] = []
            while self._coming and self._coming[0][0] <= at:
                told += self._comes(heapq.heappop(self._coming)[1])
            while self._ends and self._ends[0][0] <= at:
                due, number = heapq.heappop(self._ends)
                if due in (self._working.get(number), self._leaves.get(number)):
                    told += self._gone(number)
            self._settle(told)
        for one in self._rows.values():
            if one.kind == "client":
                known = self._clients[one.pid]
                one.pid, one.job, one.instance = known.pid, known.job, known.instance
        return list(self._rows.values())

    def _next(self) -> float | None:
        times = [one[0][0] for one in (self._coming, self._ends) if one]
        if self._working or self._left:
            times += [max(at, self._now + 0.001) for at in (self._core.deadline(), self._again) if at is not None]
        return max(self._now, min(times)) if times else None

    # --- clients ------------------------------------------------------------------------------------------------------

    def _comes(self, number: int) -> Iterator[_Event]:
        one = self._clients[number]
        uid = one.uid or 0
        self._left[number] = float("inf") if one.passed is None or one.ended is None else one.ended - one.passed
        if one.passed is None and one.ended is not None:  # how long it would have worked is not known
            self._leaves[number] = one.ended
            heapq.heappush(self._ends, (one.ended, number))
        knock = link.Knock(number, number, uid, uid, number, self._now)
        yield inp.GateSaid(self._now, knock)
        why = self._queue.full_for(uid)
        if why is None:
            self._queue.add(Held(number, number, uid, uid, number, self._now, instance=self._table.instance))
        else:
            yield inp.GateSaid(self._now, link.Refused(number, number, uid, why))
            del self._left[number]

    def _handed_over(self) -> Iterator[_Event]:
        """Admit clients from the gate's queue."""
        while True:
            held, self._again, _ = self._queue.choose(self._now, self._table)
            if held is None:
                return
            number, uid = held.connection, held.uid
            limits = self._queue.limits_for(held, self._table.users[uid], self._table)
            self._queue.take(number, held.instance or "", self._now)
            known = KnownProcess(number, uid, uid, number, self._now, limits, 1, held.instance or "")
            self._queue.know(known)
            self._queue.remove(number)
            ends = self._working[number] = self._now + self._left.pop(number)
            heapq.heappush(self._ends, (ends, number))
            yield inp.GateSaid(self._now, link.Passed(number, number, uid, number, limits, 0.0, self._now))
            yield from self._server(uid, number)

    def _server(self, uid: int, number: int) -> Iterator[_Event]:
        of = 0 if self._core.view().shared else uid
        if of not in self._servers:
            self._daemons += 1
            server = self._servers[of] = SERVERS + self._daemons
            yield ev.ServerStarting(self._now, server, of)
            yield ev.ServerReady(self._now, server)
        yield from (ev.ContextConnected(self._now, self._servers[of], number, context) for context in (0, 1))

    def _gone(self, number: int) -> Iterator[_Event]:
        """Remove a client whose process has ended."""
        self._queue.forget((number, number))
        if self._queue.remove(number) is not None:
            yield inp.GateSaid(self._now, link.Left(number))
        left, due = self._left.pop(number, None), self._working.pop(number, None)
        if left is None and due is None:
            return
        for server in self._servers.values():
            if number in self._core.state.servers[server].attached:
                yield ev.ClientDisconnected(self._now, server, number)
        yield inp.ProcessEnded(self._now, number)

    # --- what the engine wants ----------------------------------------------------------------------------------------

    def _settle(self, told: list[_Event]) -> None:
        """Decide upon what this moment brought, do it, and look again at what follows."""
        for _ in range(_MOST_ROUNDS):
            daemon = self._core.engines[None]
            daemon.remember("hangs", replace(daemon.memories.hangs, queried_at=float("inf")))  # nothing hangs
            step = self._core.receive_all(told, self._now)
            for _, mistake in step.mistakes:
                raise mistake
            self._write(step.transitions)
            told = [event for action in step.actions for event in self._do(action)]
            told += self._handed_over()
            if not told:
                return

    def _do(self, action: act.Action) -> Iterator[_Event]:
        if isinstance(action, act.Report):
            return
        yield act.Done(self._now, action, ok=True)
        if not action.enforce:
            return
        match action:
            case act.TellGate(message=link.Admissions() as table):
                self._table = table
                yield inp.GateSaid(self._now, link.Applied(table.number))
            case act.TellGate(message=link.Refuse(connection)):
                yield from self._gone(connection)
            case act.TerminateClient():
                self._wrote("action.done", action="TerminateClient", **act.action_fields(action))
                yield from self._gone(action.pid)
            case act.SignalClient(signal=signal.SIGTERM | signal.SIGKILL):
                self._wrote("action.done", action="SignalClient", **act.action_fields(action))
                yield from self._gone(action.pid)
            case act.Freeze() if action.pid in self._working:
                self._left[action.pid] = self._working.pop(action.pid) - self._now
            case act.Thaw() if action.pid in self._left:
                ends = self._working[action.pid] = self._now + self._left.pop(action.pid)
                heapq.heappush(self._ends, (ends, action.pid))
            case act.ShutdownServer() | act.KillServer():
                self._servers = {uid: pid for uid, pid in self._servers.items() if pid != action.server}
                yield ev.ServerExited(self._now, action.server, 0)
            case act.QuitControl() | act.KillControl():
                for number in [*self._working, *(one for one in self._left if self._queue.get(one) is None)]:
                    yield from self._gone(number)
                self._servers.clear()
                if self._core.state.control is not None:
                    yield inp.ControlGone(self._now, self._core.state.control.pid)
            case act.StartControl():
                yield self._daemon()
            case act.Reconcile():
                yield from self._answers()

    def _daemon(self) -> _Event:
        self._daemons += 1
        return inp.ControlRuns(self._now, CONTROL + self._daemons, self._now, "")

    def _answers(self) -> Iterator[_Event]:
        """Return MPS's answers to a query."""
        servers = self._core.state.servers
        yield inp.ServersListed(self._now, {one.pid: one.uid or 0 for one in servers.values()}, frozenset(servers))
        for one in servers.values():
            yield inp.ServerStatusSeen(self._now, one.pid, str(one.status))
            yield inp.ClientsListed(self._now, one.pid, frozenset(one.attached))

    def _write(self, told: Iterable[Transition]) -> None:
        for one in told:
            self._wrote(one.kind, **{"at": one.at, **transition_fields(one)})

    def _wrote(self, kind: str, **fields: object) -> None:
        self._records += 1
        record = {"seq": self._records, "at": self._now, "kind": kind, **fields}
        for row in self._sessions.take(record):
            self._rows[row.number] = row
