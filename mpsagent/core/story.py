"""The story of a log: who was served when, who waited, what ended how. A pure fold over events, in the order of time.

Unlike the state (:mod:`mpsagent.core.model`), which knows only the present, the story keeps a record of everything
that has been: one for each server, client, fault and refusal. Memory grows with these, not with the lines read.

How a client ended is what the logs can prove. A client that was killed leaves like one that finished: both are ``ok``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile

from mpsagent.mps import events as ev
from mpsagent.mps.events import Line, What

_SAME_MOMENT = 0.01
"""Seconds within which lines of the two logs belong to one event."""


class Outcome(StrEnum):
    """``ok``: left by itself, or still runs (then ``disconnected`` is None). ``faulted``: had a sticky error.
    ``terminated``: ``terminate_client`` was sent for it. ``refused``: the server did not let it in. ``lost``: its
    server ended under it. ``never_served``: still waiting at the end, or gone while waiting. ``unknown``: was let in,
    and the log does not say what became of it. The first cause wins."""

    OK = "ok"
    FAULTED = "faulted"
    TERMINATED = "terminated"
    REFUSED = "refused"
    LOST = "lost"
    NEVER_SERVED = "never_served"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class ServerRecord:
    """``exit_status`` None with ``exited`` set: the log does not say; the server was gone at the latest then.
    ``started`` None: the log begins after it. ``threads`` None: it never reported its limits."""

    pid: int
    uid: int | None
    started: float | None
    ready: float | None = None
    exited: float | None = None
    exit_status: int | None = None
    forced: bool = False
    threads: float | None = None
    memory: dict[int, int] = field(default_factory=dict)
    faults: int = 0


@dataclass(slots=True)
class ClientRecord:
    """``queued`` None: was let in without waiting. ``waited`` in seconds, until connected or given up. ``pid`` None:
    all processes of this user whose pids the log does not give (a control daemon in another pid namespace says 0)."""

    pid: int | None
    uid: int | None
    server: int | None = None
    queued: float | None = None
    connected: float | None = None
    disconnected: float | None = None
    waited: float = 0.0
    outcome: Outcome | None = None


@dataclass(slots=True)
class FaultRecord:
    """``sticky``: the pids listed, all alike. ``recovered``: when the server took clients again; None: it never did."""

    server: int
    at: float
    sticky: dict[int, None] = field(default_factory=dict)
    devices: dict[int, None] = field(default_factory=dict)
    recovered: float | None = None


@dataclass(slots=True)
class RefusalRecord:
    """``pid`` None: the log does not say whom; a server that is full does not (recording 02, R13)."""

    at: float
    server: int
    pid: int | None
    reason: str


class Story:
    """The fold. ``feed`` events in the order of time, then ``finish`` once."""

    def __init__(self) -> None:
        self.servers: list[ServerRecord] = []
        self.clients: list[ClientRecord] = []
        self.faults: list[FaultRecord] = []
        self.refused: list[RefusalRecord] = []
        self.unknown_lines = 0
        self.unnamed = False
        """The log does not name all clients: who is served, and until when, is not known."""
        self._server_log = False
        self._readies: dict[int | None, list[float]] = {}
        self._perhaps_served: list[tuple[ClientRecord, float]] = []
        self.last_event: float | None = None
        self._servers: dict[int, ServerRecord] = {}
        self._clients: dict[int, ClientRecord] = {}
        self._by_server: dict[int, set[int]] = {}
        self._waiting: dict[int | None, dict[int, ClientRecord]] = {}
        """By user, in the order of time: who is not connected."""
        self._fault: dict[int, FaultRecord] = {}
        self._devices_left: dict[int, set[int]] = {}
        self._sticky_left: dict[int, list[int]] = {}
        self._full_at: dict[int, float] = {}
        self._with_context: set[int] = set()
        self._turned_away: dict[int, RefusalRecord] = {}
        self._announced: int | None = None
        self._named: set[int] = set()
        """Pids that the control daemon named, and which of them last."""
        self._through: dict[int, int] = {}
        """Of each client that it had not named when a server had it, the pid that it had named last."""

    def feed(self, event: Line) -> None:
        self.last_event = event.at
        self._server_log = self._server_log or event.what in ev.SERVER_LOG
        rule = _RULES.get(event.what)
        if rule is not None:
            rule(self, event)

    def finish(self) -> Story:
        """Close what is still open: who is connected runs on, who waits was never served."""
        for record in list(self._clients.values()):
            if record.connected is None:
                self._never_served(record, self.last_event or 0.0)
            else:
                record.outcome = record.outcome or Outcome.OK
        self._clients.clear()
        # Our gate announces clients by its own pid, and servers have theirs: it is no client that was never served.
        gates = {gate for pid, gate in self._through.items() if pid not in self._named}
        self.clients = [one for one in self.clients if one.connected is not None or one.pid not in gates]
        if self.unnamed or not self._server_log:
            for record, at in self._perhaps_served:
                record.outcome = Outcome.UNKNOWN
                record.waited = 0.0 if record.queued is None else at - record.queued
        return self

    # --- servers and the control daemon

    def _server(self, pid: int) -> ServerRecord:
        """The server's open record; made when the log begins after the server's start."""
        record = self._servers.get(pid)
        if record is None:
            record = self._servers[pid] = ServerRecord(pid, None, None)
            self.servers.append(record)
        return record

    def _starting(self, event: Line) -> None:
        record = self._servers.get(event.server)
        if record is not None and record.ready is not None:  # the pid was used before and its end is not in the log
            self._server_gone(event.server, event.at, None)
        record = self._server(event.server)
        record.uid, record.started = event.uid, event.at if record.started is None else record.started

    def _startup(self, event: Line) -> None:
        record = self._server(event.server)
        record.started = event.at if record.started is None else record.started

    def _ready(self, event: Line) -> None:
        record = self._server(event.server)
        record.ready = event.at
        self._readies.setdefault(record.uid, []).append(event.at)

    def _threads(self, event: Line) -> None:
        self._server(event.server).threads = event.percent

    def _memory(self, event: Line) -> None:
        memory = self._server(event.server).memory
        if event.size:
            memory[event.device] = event.size
        else:
            memory.pop(event.device, None)

    def _forced(self, event: Line) -> None:
        self._server(event.server).forced = True

    def _exited(self, event: Line) -> None:
        self._server(event.server)
        self._server_gone(event.server, event.at, event.number)

    def _server_gone(self, pid: int, at: float, status: int | None) -> None:
        record = self._servers.pop(pid)
        record.exited, record.exit_status = at, status
        for client in self._by_server.pop(pid, set()):
            self._close(self._clients[client], at, Outcome.LOST)
        if record.ready is not None:  # all who waited for this server were attached when it became Ready
            ready, line = record.ready, self._waiting.get(record.uid, {}).values()
            for waiting in list(takewhile(lambda one: one.queued is None or one.queued <= ready, line)):
                self._never_served(waiting, ready)
        self._fault.pop(pid, None)
        self._devices_left.pop(pid, None)
        self._sticky_left.pop(pid, None)
        self._full_at.pop(pid, None)

    def _control_gone(self, event: Line) -> None:
        """With a control daemon its servers end, and its pending list (recordings 02, R11 and 06, V4)."""
        for pid in list(self._servers):
            self._server_gone(pid, event.at, None)
        for record in list(self._clients.values()):
            self._never_served(record, event.at)

    # --- clients

    def _open(self, pid: int, uid: int | None) -> ClientRecord:
        """The client's open record, or a new one."""
        self.unnamed = self.unnamed or not pid
        key = pid or _key(None, uid)
        record = self._clients.get(key)
        if record is None:
            record = self._clients[key] = ClientRecord(pid or None, uid)
            self.clients.append(record)
            self._waiting.setdefault(uid, {})[key] = record
        elif record.uid is None:
            record.uid = uid
        return record

    def _waits_no_more(self, record: ClientRecord) -> None:
        line = self._waiting.get(record.uid, {})
        if line.pop(_key(record.pid, record.uid), None) is not None and not line:
            del self._waiting[record.uid]

    def _queued(self, event: Line) -> None:
        if not event.pid and _key(None, event.uid) in self._clients:
            return  # another process of theirs, or the same one again
        self._name(event.pid)
        record = self._open(event.pid, event.uid)
        if record.connected is None and record.queued is None:
            record.queued = event.at
            line, key = self._waiting[record.uid], _key(record.pid, record.uid)
            line[key] = line.pop(key)

    def _admitted(self, event: Line) -> None:
        refusal = self._turned_away.pop(event.pid, None)
        if refusal is None or event.at > refusal.at + _SAME_MOMENT:
            self._name(event.pid)
            self._open(event.pid, event.uid)

    def _name(self, pid: int) -> None:
        if pid > 0:
            self._announced = pid
            self._named.add(pid)

    def _connected(self, event: Line) -> None:
        if event.pid <= 0:
            self.unnamed = True
            return
        server = self._server(event.server)
        if event.pid not in self._named and self._announced is not None:
            self._through.setdefault(event.pid, self._announced)
        record = self._clients.get(event.pid)
        if record is not None and record.server not in (None, event.server):  # its end there is not in the log
            self._close(record, event.at, Outcome.LOST)
        record = self._open(event.pid, server.uid)
        if record.connected is None:
            record.connected, record.server = event.at, event.server
            record.waited = 0.0 if record.queued is None else max(0.0, event.at - record.queued)
            self._by_server.setdefault(event.server, set()).add(event.pid)
            self._waits_no_more(record)
        if event.context:
            self._with_context.add(event.pid)

    def _disconnected(self, event: Line) -> None:
        record = self._clients.get(event.pid)
        if record is None or record.server != event.server:
            return
        turned_away = event.pid not in self._with_context and event.server in self._full_at
        if turned_away and record.connected is not None and record.connected <= self._full_at[event.server]:
            self._close(record, event.at, Outcome.REFUSED)  # it had its channel, but the server was full
        else:
            self._close(record, event.at, Outcome.OK)
        fault = self._fault.get(event.server)
        if fault is not None:
            left = self._sticky_left[event.server]
            while left and left[-1] not in self._clients:
                left.pop()
            if not left:
                self._recovered(fault, event.at)

    def _unnamed_client(self, event: Line) -> None:
        self.unnamed = True

    def _terminated(self, event: Line) -> None:
        self._mark(event.pid, event.server, Outcome.TERMINATED)

    def _refused(self, event: Line) -> None:
        self.refused.append(RefusalRecord(event.at, event.server, event.pid or None, event.text))
        server = self._server(event.server)
        if event.pid <= 0:
            self.unnamed = True
            return
        record = self._clients.get(event.pid)
        if record is None:  # its admission has the same time stamp and is still to be read
            record = self._open(event.pid, server.uid)
            self._turned_away[event.pid] = self.refused[-1]
        if record.connected is None:
            record.server = event.server
            record.waited = 0.0 if record.queued is None else max(0.0, event.at - record.queued)
            self._close(record, None, Outcome.REFUSED)

    def _full(self, event: Line) -> None:
        self.refused.append(RefusalRecord(event.at, event.server, None, f"server full ({event.number} clients)"))
        self._full_at[event.server] = event.at

    def _mark(self, pid: int, server: int, outcome: Outcome) -> None:
        record = self._clients.get(pid)
        if record is not None and record.server == server and record.outcome is None:
            record.outcome = outcome

    def _close(self, record: ClientRecord, at: float | None, outcome: Outcome) -> None:
        """The end of a client; an outcome that was marked before stays."""
        record.disconnected = at
        record.outcome = record.outcome or outcome
        key = _key(record.pid, record.uid)
        self._clients.pop(key, None)
        self._with_context.discard(key)
        self._waits_no_more(record)
        if record.server is not None:
            self._by_server.get(record.server, set()).discard(key)

    def _never_served(self, record: ClientRecord, at: float) -> None:
        """Unless the log does not name clients: then who waited was let in when the next server was Ready."""
        readies = self._readies.get(record.uid, [])
        first = len(readies) if record.queued is None else bisect_left(readies, record.queued)
        if record.outcome is None and (record.queued is None or first < len(readies)):
            self._perhaps_served.append((record, at if record.queued is None else readies[first]))
        record.waited = 0.0 if record.queued is None else max(0.0, at - record.queued)
        self._close(record, None, Outcome.NEVER_SERVED)

    # --- faults

    def _fault_started(self, event: Line) -> None:
        if event.server in self._fault:  # a second one before the first was over adds to it
            return
        fault = self._fault[event.server] = FaultRecord(event.server, event.at)
        self._devices_left[event.server] = set()
        self._sticky_left[event.server] = []
        self.faults.append(fault)
        self._server(event.server).faults += 1

    def _fault_device(self, event: Line) -> None:
        fault = self._fault.get(event.server)
        if fault is not None:
            self._devices_left[event.server].add(event.device)
            fault.devices[event.device] = None

    def _fault_client(self, event: Line) -> None:
        fault = self._fault.get(event.server)
        if fault is not None and event.pid not in fault.sticky:
            fault.sticky[event.pid] = None
            self._sticky_left[event.server].append(event.pid)
        self._mark(event.pid, event.server, Outcome.FAULTED)

    def _destroyed(self, event: Line) -> None:
        """From here on the server takes clients again, before the last one's leaving is logged (recording 03, Q4)."""
        fault = self._fault.get(event.server)
        if fault is not None:
            self._devices_left[event.server].discard(event.device)
            if not self._devices_left[event.server]:
                self._recovered(fault, event.at)

    def _recovered(self, fault: FaultRecord, at: float) -> None:
        fault.recovered = at
        del self._fault[fault.server]

    def _unknown(self, event: Line) -> None:
        self.unknown_lines += 1


def _key(pid: int | None, uid: int | None) -> int:
    """Under which a client's record is found while it is open."""
    return pid if pid is not None else -2 - (-1 if uid is None else uid)


def tell(events: Iterable[Line]) -> Story:
    """The whole story of events in the order of time."""
    story = Story()
    for event in events:
        story.feed(event)
    return story.finish()


_RULES: dict[What, Callable[[Story, Line], None]] = {
    ev.ControlStarted: Story._control_gone,
    ev.ControlExited: Story._control_gone,
    ev.ServerStarting: Story._starting,
    ev.ServerStartup: Story._startup,
    ev.ServerReady: Story._ready,
    ev.ServerExited: Story._exited,
    ev.ShutdownForced: Story._forced,
    ev.ThreadsSet: Story._threads,
    ev.MemorySet: Story._memory,
    ev.ClientQueued: Story._queued,
    ev.ClientAdmitted: Story._admitted,
    ev.ContextConnected: Story._connected,
    ev.ClientUnnamed: Story._unnamed_client,
    ev.ClientDisconnected: Story._disconnected,
    ev.TerminationAsked: Story._terminated,
    ev.ClientRefused: Story._refused,
    ev.ClientsFull: Story._full,
    ev.FaultStarted: Story._fault_started,
    ev.FaultDevice: Story._fault_device,
    ev.FaultClient: Story._fault_client,
    ev.ContextDestroyed: Story._destroyed,
    ev.Unknown: Story._unknown,
}
