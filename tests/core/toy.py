"""The gate's queue with a toy MPS and toy clients in virtual time: the world that the engine is tested in.

Not the simulator: no process, no file, no text. The gate holds, hands over one at a time, knows who passed and says
when a table is in force. What it chooses is chosen by the real gate's queue. MPS has a server for each user or one for
all, starts and ends them, blocks, faults, and hurts the neighbours of who is signalled without having been asked. What
the logs say may come late or never, and users may write lines of their own into them. Durations are those of the
recordings.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

from mpsagent.core import inputs as inp
from mpsagent.core.model import Key
from mpsagent.gate.places import KEPT, SETTLED
from mpsagent.gate.queue import Held, KnownProcess, Queue
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
    handing: Held | None = None

    @property
    def name(self) -> str:
        return "" if self.lane is None else f"-u{self.lane}"

    def of(self, said: inp.GateSaid[Any]) -> inp.Input:
        return said if self.lane is None else inp.Of(self.lane, said)


class Gate:
    """Hand-overs to the toy's MPS, chosen by the queue of the real gate. ``tell(input)`` goes to the agent, in order.
    ``ways``: by lane."""

    def __init__(self, clock: Clock, mps: Mps, tell: Callable[[inp.Input], None]) -> None:
        self.clock, self.tell = clock, tell
        self.ways: dict[Key, Way] = {None: Way(None, mps)}
        self.pid = 60
        self.stopped = False
        self.queue = Queue()
        self.held: dict[int, Proc] = {}
        """By number of the connection."""
        self.procs: dict[Process, Proc] = {}
        """Each process that ever came."""
        self.numbers = count(1)
        self.given: list[Given] = []
        self.ever: dict[Process, int] = {}
        """User of each process that ever passed."""
        self.turned_away: list[int] = []

    @property
    def known(self) -> list[KnownProcess]:
        return list(self.queue.known())

    @property
    def table(self) -> link.Admissions:
        """That of all users."""
        return self.ways[None].table

    def hands_over(self, uid: int) -> bool:
        return any(way.handing is not None and way.handing.uid == uid for way in self.ways.values())

    def way_of(self, process: Process) -> Way:
        """The way on which a process is known; that of all users if it is known nowhere."""
        known = self.queue.known_process(process)
        name = "" if known is None else known.instance
        return next((way for way in self.ways.values() if way.name == name), self.ways[None])

    def knock(self, proc: Proc) -> None:
        number = next(self.numbers)
        self.held[number], self.procs[proc.key] = proc, proc
        placed = next((way.name for way in self.ways.values() if proc.uid in way.table.users), "")
        one = Held(number, proc.pid, proc.uid, 100, proc.start, self.clock.now, instance=placed)
        self.queue.add(one)
        self.tell(self._knock(one))
        self.pump()

    def sync(self) -> list[inp.Input]:
        now = self.clock.now
        told: list[inp.Input] = [inp.GateSaid(now, link.Hello(self.pid, 1000.0))]
        told += [self._knock(held) for one in self.held if (held := self.queue.get(one)) is not None]
        told += [self._known(one) for one in self.known]
        return [*told, inp.GateSaid(now, link.Synced())]

    def _knock(self, one: Held) -> inp.GateSaid[link.Knock]:
        return knocked(self.clock.now, one.connection, _peer(self.procs[one.process]), one.since)

    def _known(self, one: KnownProcess) -> inp.Input:
        peer = _peer(self.procs[one.process])
        said = known(self.clock.now, peer, one.since, one.limits, one.connections, one.most, counts=one.counts)
        return self.way_of(one.process).of(said)

    # --- from the agent -----------------------------------------------------------------------------------------------

    def admissions(self, number: int, table: link.Admissions, lane: Key = None) -> None:
        if lane in self.ways:
            way = self.ways[lane]
            way.table, way.unapplied = replace(table, instance=way.name), number
            for uid in table.users:
                self.queue.place(uid, way.name)
            self._applied(way)
            self.pump()

    def found(self, proc: Proc, said: link.Found, lane: Key = None) -> None:
        """It came through another process, or passed a gate that left nothing behind."""
        if self.queue.known_process(proc.key) is None:
            self.procs[proc.key], self.ever[proc.key] = proc, proc.uid
            one = self._new(proc, said.limits, self.ways[lane])
            one.connections, one.most = said.connections, said.most
            self.queue.know(one)
        one = self.queue.known_process(proc.key)
        assert one is not None
        self.tell(self._known(one))

    def _new(self, proc: Proc, limits: Limits | None, way: Way) -> KnownProcess:
        return KnownProcess(
            proc.pid, proc.uid, 100, proc.start, self.clock.now, limits, instance=way.name, most=limits
        )  # fmt: skip

    def refuse(self, number: int) -> None:
        one = self.queue.get(number)
        if one is not None and not one.busy:
            self.queue.remove(number)
            self.turned_away.append(self.held.pop(number).pid)

    def restarts(self, *, forgets: bool = False) -> None:
        """Another gate follows, which knows what the store holds. ``forgets``: the store is lost."""
        before, self.queue = self.queue, Queue()
        for one in [] if forgets else before.known():
            self.queue.know(one)
            if before.is_own(one.process):
                self.queue.keep_own(one.process)
        for number in self.held:
            held = before.get(number)
            assert held is not None
            self.queue.add(held)

    def release(self, process: Process) -> None:
        one = self.queue.known_process(process)
        if one is not None:
            self.queue.leave(one)
        self.pump()

    def _applied(self, way: Way) -> None:
        if way.unapplied is None:
            return
        one = way.handing
        if one is None or (way.table.open and one.uid in way.table.users):
            self.tell(way.of(inp.GateSaid(self.clock.now, link.Applied(way.unapplied))))
            way.unapplied = None

    # --- hand-over ----------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        for way in list(self.ways.values()):
            if way.handing is None:
                self._begin(way)

    def _begin(self, way: Way) -> None:
        now = self.clock.now
        contexts = [f"{p.pid}.{n}" for s in way.mps.servers.values() for p in s.clients.values() for n in range(p.made)]
        self.queue.places(way.name).listed(["\n".join(["[0] GPU", *contexts])], now + SETTLED)
        one, wake, _ = self.queue.choose(now, way.table)
        if one is None:
            if wake is not None:
                self.clock.after(wake - now + 0.0001, self.pump)
            return
        way.handing, proc = one, self.procs[one.process]
        limits = self.queue.limits_for(one, way.table.users[one.uid], way.table)
        self.queue.take(one.connection, way.name, now)
        self.tell(way.of(inp.GateSaid(now, link.Handing(one.connection, 0, 0, now))))

        def meet() -> None:
            way.mps.defaults = limits
            way.mps.serve(proc, lambda ok: self._over(way, one, limits, ok, now), now + GIVE_UP)

        self.clock.after(GREETING, meet)

    def _over(self, way: Way, one: Held, limits: Limits, ok: bool, began: float) -> None:
        if way.handing is not one:
            return
        way.handing = None
        number, now = one.connection, self.clock.now
        self.queue.free(number)
        if number not in self.held:  # its process ended meanwhile
            self.tell(inp.GateSaid(now, link.Left(number)))
        elif ok:
            proc = self.held.pop(number)
            self._passed(way, proc, limits)
            self.queue.remove(number)
            peer = inp.Peer(proc.pid, proc.uid, 0, proc.start)
            self.tell(way.of(passed(now, number, peer, limits, False, now - began)))
            if proc.wants_more():
                self.clock.after(SECOND, lambda: self._again(proc))
        else:
            one.failed(now)
            failed = link.Failed(number, one.pid, one.uid, "closed", "answer", False)
            self.tell(way.of(inp.GateSaid(now, failed)))
        self._applied(way)
        self.clock.after(0.0, self.pump)

    def _passed(self, way: Way, proc: Proc, limits: Limits) -> None:
        self.ever[proc.key] = proc.uid
        self.given.append(Given(self.clock.now, proc.pid, proc.uid, limits))
        one = self.queue.known_process(proc.key)
        if one is None:
            one = self._new(proc, limits, way)
            self.queue.know(one)
            self.clock.after(KEPT, lambda: self._give_up(way, one))
        else:
            one.given(limits)
            self.queue.places(way.name).count(one, yes=True)
        one.connections += 1

    def _give_up(self, way: Way, one: KnownProcess) -> None:
        waits = self.queue.waits_for_context(one.process)
        if self.queue.known_process(one.process) is one and not one.context and not waits:
            self.queue.places(way.name).count(one, yes=False)
            self.tell(way.of(inp.GateSaid(self.clock.now, link.NoContext(one.pid, one.start))))
            self.pump()

    def _again(self, proc: Proc) -> None:
        """The process asks for its next context."""
        if not proc.dead and proc.server is not None and proc.wants_more():
            self.knock(proc)

    def ended(self, proc: Proc) -> None:
        for number in [n for n, one in self.held.items() if one is proc]:
            del self.held[number]
            one = self.queue.get(number)
            assert one is not None
            if not one.busy:
                self.tell(inp.GateSaid(self.clock.now, link.Left(number)))
            self.queue.remove(number)
        self.queue.forget(proc.key)
        self.pump()


def _peer(proc: Proc) -> inp.Peer:
    return inp.Peer(proc.pid, proc.uid, 100, proc.start, proc.cgroup)
