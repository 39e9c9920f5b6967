"""A toy gate, a toy MPS and toy clients in virtual time: the world that the engine is tested in.

Not the simulator: no process, no file, no text. The gate holds, hands over one at a time, knows who passed and says
when a table is in force. MPS has a server for each user or one for all, starts and ends them, blocks, faults, and hurts
the neighbours of who is signalled without having been asked. What the logs say may come late or never, and users may
write lines of their own into them. Durations are those of the recordings.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from mpsagent.core import inputs as inp
from mpsagent.core.model import Key
from mpsagent.gate.places import KEPT
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from mpsagent.wire import link
from tests.core.said import knocked, known, passed

GREETING = 0.002  # limits set and read back
START = 0.15  # Starting new server to Ready
EXIT = 0.055  # an idle server's exit
SECOND = 0.001  # from a client's channel to its first context
LEAVES = 9.9  # from the answer of terminate_client until the client's work has left a busy GPU
LATE = 0.2  # until the fault after the exit of a client whose work was still on the GPU
GIVE_UP = 40.0  # the gate waits so long for the daemon's answer

Process = tuple[int, int]


@dataclass
class Proc:
    """``works``: a kernel is in flight once it has a context; ``stubborn``: ignores SIGTERM; ``stays``: lives on when
    its server has gone; ``contexts``: how many it makes."""

    pid: int
    uid: int
    start: int
    works: bool = True
    stopped: bool = False
    frozen: bool = False
    """The agent stopped it, and not its owner."""
    freezes: bool = True
    """It can be stopped at all."""
    stubborn: bool = False
    stays: bool = False
    contexts: int = 1
    cgroup: str | None = None
    terminated: bool = False
    free_at: float = 0.0
    """When its work has left the GPU, after ``terminate_client``."""
    held: bool = False
    """Its files of the GPU are, meanwhile."""
    server: Server | None = None
    dead: bool = False
    hollow: float = 0.0
    """Seconds for which it holds MPS up, until the gate gives it up."""
    made: int = 0
    """Contexts that it has; its channel is not counted."""
    counts: bool = True
    """It takes a part of its user's total."""
    mute: bool = False
    """It does not answer ``terminate_client``."""

    @property
    def key(self) -> Process:
        return self.pid, self.start

    def wants_more(self) -> bool:
        return self.server is not None and self.made < self.contexts


@dataclass
class Server:
    pid: int
    uid: int
    ready: bool = False
    leaving: bool = False
    stopped: bool = False
    fault: bool = False
    sticky: set[int] = field(default_factory=set)
    clients: dict[int, Proc] = field(default_factory=dict)


@dataclass
class Connection:
    number: int
    proc: Proc
    since: float
    not_before: float = 0.0
    pause: float = 0.0


class Given(NamedTuple):
    at: float
    pid: int
    uid: int
    limits: Limits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0
        self.queue: list[tuple[float, int, Callable[[], object]]] = []
        self.numbers = count()

    def after(self, delay: float, what: Callable[[], object]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.numbers), what))


class Mps:
    """The control daemon and its servers. ``log`` takes lines as they are written; ``starts`` False: no server does."""

    def __init__(self, clock: Clock, shared: bool, log: Callable[[ev.Line], None], lost: Callable[[Proc], None]):
        self.clock, self.shared, self.log, self.lost = clock, shared, log, lost
        self.pids = count(5000)
        self.control = 0
        self.started = 0.0
        self.stopped = False
        self.quitting = False
        self.blocked_by: Proc | None = None
        self.servers: dict[int, Server] = {}
        self.can_start = True
        self.defaults = Limits()
        self.never_resumes = False
        self.overlaps: list[tuple[float, int, int]] = []
        """A user was handed over while another user's server was there."""
        self.refused: list[tuple[float, int]] = []
        self.hurt: set[int] = set()
        self.faults: list[float] = []

    # --- the control daemon -------------------------------------------------------------------------------------------

    def start(self) -> int:
        self.control, self.started = next(self.pids), self.clock.now
        self.stopped = self.quitting = False
        self.blocked_by = None
        self.log(ev.ControlStarted(self.clock.now, self.control, "/s"))
        return self.control

    def end(self) -> None:
        """Its servers exit with it, and say nothing."""
        self.control = 0
        for server in list(self.servers.values()):
            self.exited(server, silent=True)

    def quit(self, timeout: int) -> None:
        self.quitting = True
        self.log(ev.QuitIssued(self.clock.now, timeout))
        until, mine = self.clock.now + timeout, self.control

        def over() -> None:
            if self.control != mine:
                return
            if self.clock.now < until and any(s.clients for s in self.servers.values()):
                self.clock.after(0.2, over)
                return
            for server in list(self.servers.values()):
                self.log(ev.ShutdownForced(self.clock.now, server.pid))
                self.exited(server)
            self.gone(mine)

        self.clock.after(0.02, over)

    gone: Callable[[int], None]

    def blocked(self) -> bool:
        if self.stopped or (self.blocked_by is not None and self.blocked_by.server is not None):
            return True
        return any(s.stopped or (not s.ready and not s.leaving) for s in self.servers.values())

    # --- servers ------------------------------------------------------------------------------------------------------

    def serve(self, proc: Proc, done: Callable[[bool], None], until: float) -> None:
        """The gate hands a client over. ``done(False)``: the daemon closed, or did not answer in time."""
        if self.clock.now >= until or not self.control or self.quitting or proc.dead:
            done(False)
            return
        if proc.hollow:
            self.clock.after(proc.hollow, lambda: done(False))
            return
        again = lambda: self.serve(proc, done, until)  # noqa: E731
        uid = 0 if self.shared else proc.uid
        others = [s for s in self.servers.values() if s.uid != uid]
        mine = next((s for s in self.servers.values() if s.uid == uid), None)
        if self.stopped or any(s.stopped for s in self.servers.values()):
            self.clock.after(0.05, again)
        elif others:
            if (self.clock.now, uid, others[0].uid) not in self.overlaps:
                self.overlaps.append((self.clock.now, uid, others[0].uid))
            self.shutdown(others[0])
            self.clock.after(0.1, again)
        elif mine is None:
            self._start(uid)
            self.clock.after(START, again)
        elif not mine.ready or mine.leaving or mine.stopped:
            self.clock.after(0.01, again)
        else:
            self._attach(mine, proc)
            done(True)

    def _start(self, uid: int) -> None:
        server = Server(next(self.pids), uid)
        self.servers[server.pid] = server
        self.log(ev.ServerStarting(self.clock.now, server.pid, uid))

        def ready() -> None:
            if server.pid not in self.servers:
                return
            if not self.can_start:
                self.log(ev.ServerFailed(self.clock.now, server.pid, "no device"))
                self.exited(server)
                return
            server.ready = True
            self.log(ev.ThreadsSet(self.clock.now, server.pid, self.defaults.threads))
            for device, size in self.defaults.memory.items():
                self.log(ev.MemorySet(self.clock.now, server.pid, device, size))
            self.log(ev.ServerStarted(self.clock.now, server.pid))
            self.log(ev.ServerReady(self.clock.now, server.pid))

        self.clock.after(START * 0.9, ready)

    def _attach(self, server: Server, proc: Proc) -> None:
        if server.fault:
            self.refused.append((self.clock.now, proc.pid))
            self.log(ev.ClientRefused(self.clock.now, server.pid, proc.pid, "status 807"))
            return
        context = 0 if proc.server is None else proc.made + 1
        proc.made = context
        proc.server = server
        server.clients[proc.pid] = proc
        self.log(ev.ContextConnected(self.clock.now, server.pid, proc.pid, context))

    def relayed(self, server: Server, proc: Proc) -> None:
        """It comes with the descriptor that another process got, for its channel and for a context."""
        for _ in range(2):
            self._attach(server, proc)

    def leave(self, proc: Proc) -> None:
        """A client lets go of its server, by its end or by itself."""
        server = proc.server
        proc.server, proc.made = None, 0
        if server is None:
            return
        server.clients.pop(proc.pid, None)
        was = proc.pid in server.sticky
        server.sticky.discard(proc.pid)
        self.log(ev.ClientDisconnected(self.clock.now, server.pid, proc.pid))
        if server.fault and was and not server.sticky:
            server.fault = False
            self.log(ev.ContextDestroyed(self.clock.now, server.pid, 0))

    def shutdown(self, server: Server, *, force: bool = False) -> None:
        if not server.ready or server.leaving:
            return
        self.log(ev.ShutdownTried(self.clock.now, server.pid))
        if server.stopped:
            return
        if server.clients and not force:
            self.log(ev.ShutdownRefused(self.clock.now, server.pid))
            return
        server.leaving = True
        if force:
            self.log(ev.ShutdownForced(self.clock.now, server.pid))
        self.log(ev.ServerStopping(self.clock.now, server.pid))
        self.clock.after(0.02 if force else EXIT, lambda: self.exited(server))

    def exited(self, server: Server, *, silent: bool = False) -> None:
        if self.servers.pop(server.pid, None) is None:
            return
        if not silent:
            self.log(ev.ServerExited(self.clock.now, server.pid, 0))
        for proc in list(server.clients.values()):
            proc.server, proc.made = None, 0
            self.lost(proc)
        server.clients.clear()

    def fault(self, server: Server) -> None:
        if not server.ready or server.leaving or not any(p.made for p in server.clients.values()):
            return
        server.fault = True
        self.faults.append(self.clock.now)
        server.sticky = {pid for pid, p in server.clients.items() if p.made}
        self.log(ev.FaultStarted(self.clock.now, server.pid))
        self.log(ev.FaultDevice(self.clock.now, server.pid, 0))
        for pid in sorted(server.sticky):
            self.log(ev.FaultClient(self.clock.now, server.pid, pid))

    def signalled(self, proc: Proc) -> None:
        """A signal that ends a client with work on the GPU is a fault for its neighbours."""
        server = proc.server
        gone = proc.terminated and (proc.held or self.clock.now >= proc.free_at)
        if server is None or not proc.made or not proc.works or gone or server.fault:
            return

        def hurts() -> None:
            self.hurt |= {p.pid for p in server.clients.values() if p is not proc and not p.terminated}

        if proc.terminated:
            self.clock.after(LATE, hurts)
        else:
            hurts()


@dataclass
class Way:
    """To one control daemon: the table that counts there, and who is being handed over."""

    lane: Key
    mps: Mps
    table: link.Admissions = field(default_factory=link.Admissions)
    unapplied: int | None = None
    handing: Connection | None = None

    def of(self, said: inp.GateSaid[Any]) -> inp.Input:
        return said if self.lane is None else inp.Of(self.lane, said)


class Gate:
    """``tell(input)`` goes to the agent, in order. ``ways``: by lane."""

    def __init__(self, clock: Clock, mps: Mps, tell: Callable[[inp.Input], None]) -> None:
        self.clock, self.tell = clock, tell
        self.ways: dict[Key, Way] = {None: Way(None, mps)}
        self.pid = 60
        self.stopped = False
        self.held: dict[int, Connection] = {}
        self.known: dict[Process, Proc] = {}
        self.lanes: dict[Process, Key] = {}
        """Where a process that is known has passed."""
        self.connections: dict[Process, int] = {}
        self.passed: dict[Process, tuple[float, Limits | None]] = {}
        """When it passed first, and the limits of its last hand-over."""
        self.most: dict[Process, Limits | None] = {}
        self.numbers = count(1)
        self.given: list[Given] = []
        self.came: dict[Process, int] = {}
        self.ever: dict[Process, int] = {}
        """User of each process that ever came, that ever passed."""
        self.turned_away: list[int] = []
        self.own: dict[Process, str] = {}

    @property
    def table(self) -> link.Admissions:
        """That of all users."""
        return self.ways[None].table

    def hands_over(self, uid: int) -> bool:
        return any(way.handing is not None and way.handing.proc.uid == uid for way in self.ways.values())

    def knock(self, proc: Proc) -> int:
        one = Connection(next(self.numbers), proc, self.clock.now)
        self.held[one.number] = one
        self.came[proc.key] = proc.uid
        self.tell(self._knock(one))
        self.pump()
        return one.number

    def sync(self) -> list[inp.Input]:
        now = self.clock.now
        told: list[inp.Input] = [inp.GateSaid(now, link.Hello(self.pid, 1000.0))]
        told += [self._knock(one) for one in self.held.values()]
        for p in self.known.values():
            most, count = self.most.get(p.key), self.connections.get(p.key, 1)
            said = known(now, _peer(p), *self.passed[p.key], count, most, counts=p.counts)
            told.append(self.ways[self.lanes.get(p.key)].of(said))
        return [*told, inp.GateSaid(now, link.Synced())]

    def _knock(self, one: Connection) -> inp.GateSaid[link.Knock]:
        return knocked(self.clock.now, one.number, _peer(one.proc), one.since)

    # --- from the agent -----------------------------------------------------------------------------------------------

    def admissions(self, number: int, table: link.Admissions, lane: Key = None) -> None:
        if lane in self.ways:
            way = self.ways[lane]
            way.table, way.unapplied = table, number
            self._applied(way)
            self.pump()

    def found(self, proc: Proc, said: link.Found, lane: Key = None) -> None:
        """It came through another process, or passed a gate that left nothing behind."""
        if proc.key not in self.known:
            self.known[proc.key], self.ever[proc.key], self.connections[proc.key] = proc, proc.uid, said.connections
            self.lanes[proc.key], self.passed[proc.key] = lane, (self.clock.now, said.limits)
            self.most[proc.key] = said.most
        given, connections, most = self.passed[proc.key], self.connections[proc.key], self.most.get(proc.key)
        self.tell(self.ways[lane].of(known(self.clock.now, _peer(proc), *given, connections, most)))

    def refuse(self, number: int) -> None:
        one = self.held.get(number)
        if one is not None and all(one is not way.handing for way in self.ways.values()):
            del self.held[number]
            self.turned_away.append(one.proc.pid)

    def forget(self) -> None:
        """It is stopped and started, and its descriptor store is lost."""
        self.known.clear()
        self.connections.clear()
        self.passed.clear()
        self.most.clear()

    def release(self, process: Process) -> None:
        self.known.pop(process, None)
        self.pump()

    def _applied(self, way: Way) -> None:
        if way.unapplied is None:
            return
        one = way.handing
        if one is None or (way.table.open and one.proc.uid in way.table.users):
            self.tell(way.of(inp.GateSaid(self.clock.now, link.Applied(way.unapplied))))
            way.unapplied = None

    # --- hand-over ----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        for way in list(self.ways.values()):
            self._begin(way)

    def _begin(self, way: Way) -> None:
        if way.handing is not None:
            return
        one = self._next(way)
        if one is None:
            return
        way.handing = one
        limits = self._limits(way, one, way.table.users[one.proc.uid])
        self.tell(way.of(inp.GateSaid(self.clock.now, link.Handing(one.number, 0, 0, self.clock.now))))
        began = self.clock.now

        def meet() -> None:
            way.mps.defaults = limits
            way.mps.serve(one.proc, lambda ok: self._over(way, one, limits, ok, began), began + GIVE_UP)

        self.clock.after(GREETING, meet)

    def _limits(self, way: Way, one: Connection, user: link.User) -> Limits:
        if one.proc.key in self.own and one.proc.key in self.known:
            return self.passed[one.proc.key][1] or user.limits
        if user.named:
            self.own[one.proc.key] = self.job(way, one.proc)
        named = way.table.processes.get(one.proc.key)
        return user.limits if named is None else named.limits

    def job(self, way: Way, proc: Proc) -> str:
        named = way.table.processes.get(proc.key)
        return self.own.get(proc.key, "") if named is None else named.job

    def room_in_job(self, way: Way, proc: Proc, limits: Limits) -> bool:
        job = way.table.jobs.get(self.job(way, proc))
        if job is None:
            return True
        there = [p for p in self.known.values() if p is not proc and self.job(way, p) == job.name]
        used = [self.passed[p.key][1] or limits for p in there if p.counts]
        fits = job.total is None or job.total.fits(used, limits)
        return fits and (job.max_clients is None or len(used) < job.max_clients)

    def _next(self, way: Way) -> Connection | None:
        table = way.table
        if not table.open:
            return None
        here = [p for p in self.known.values() if self.lanes.get(p.key) == way.lane]
        for kin in (True, False):
            places = {proc.key: max(int(proc.counts), proc.made) for proc in here}
            for one in self.held.values():
                user = table.users.get(one.proc.uid)
                if user is None or (one.proc.key in self.known) is not kin or (kin and one.proc.key not in places):
                    continue
                limits = self._limits(way, one, user)
                mine = [p for p in here if p.uid == one.proc.uid and p.counts and p is not one.proc]
                used = [self.passed[p.key][1] or user.limits for p in mine]
                full = user.max_clients is not None and len(used) >= user.max_clients
                full = full or (user.total is not None and not user.total.fits(used, limits))
                full = full or (user.named and one.proc.key not in table.processes)
                full = full or not self.room_in_job(way, one.proc, limits)
                if (not kin and user.admit == "known") or (full and not (kin and one.proc.counts)):
                    continue
                has = sum(places[p.key] for p in here if p.uid == one.proc.uid)
                full = sum(places.values()) >= table.room or has >= (user.max_contexts or 1000)
                if full and not (kin and one.proc.counts and one.proc.made == 0):
                    continue
                if one.not_before > self.clock.now:
                    self.clock.after(one.not_before - self.clock.now + 0.0001, self.pump)
                    continue
                return one
        return None

    def _over(self, way: Way, one: Connection, limits: Limits, ok: bool, began: float) -> None:
        if way.handing is not one:
            return
        way.handing = None
        proc, now = one.proc, self.clock.now
        if one.number not in self.held:  # its process ended meanwhile
            self.tell(inp.GateSaid(now, link.Left(one.number)))
        elif ok:
            del self.held[one.number]
            self.known[proc.key], self.lanes[proc.key] = proc, way.lane
            self.ever[proc.key] = proc.uid
            self.connections[proc.key] = self.connections.get(proc.key, 0) + 1
            if self.connections[proc.key] == 1:
                self.clock.after(KEPT, lambda: self._give_up(way, proc))
            proc.counts = True
            before, most = self.passed.get(proc.key), self.most.get(proc.key)
            self.most[proc.key] = limits if before is None else None if most is None else most.joined(limits)
            self.passed[proc.key] = now if before is None else before[0], limits
            self.given.append(Given(now, proc.pid, proc.uid, limits))
            peer = inp.Peer(proc.pid, proc.uid, 0, proc.start)
            self.tell(way.of(passed(now, one.number, peer, limits, False, now - began)))
            if proc.wants_more():
                self.clock.after(SECOND, lambda: self._again(proc))
        else:
            one.pause = min(2.0, one.pause * 2 or 0.05)
            one.not_before = now + one.pause
            failed = link.Failed(one.number, proc.pid, proc.uid, "closed", "answer", False)
            self.tell(way.of(inp.GateSaid(now, failed)))
        self._applied(way)
        self.clock.after(0.0, self.pump)

    def _give_up(self, way: Way, proc: Proc) -> None:
        waits = any(one.proc is proc for one in self.held.values())
        if self.known.get(proc.key) is proc and self.connections.get(proc.key) == 1 and not waits:
            proc.counts = False
            self.tell(way.of(inp.GateSaid(self.clock.now, link.NoContext(proc.pid, proc.start))))
            self.pump()

    def _again(self, proc: Proc) -> None:
        """The process asks for its next context."""
        if proc.key in self.connections and proc.server is not None and proc.wants_more():
            self.knock(proc)

    def ended(self, proc: Proc) -> None:
        for number in [n for n, one in self.held.items() if one.proc is proc]:
            one = self.held.pop(number)
            if all(one is not way.handing for way in self.ways.values()):
                self.tell(inp.GateSaid(self.clock.now, link.Left(number)))
        self.known.pop(proc.key, None)
        self.connections.pop(proc.key, None)
        self.pump()


def _peer(proc: Proc) -> inp.Peer:
    return inp.Peer(proc.pid, proc.uid, 100, proc.start, proc.cgroup)
