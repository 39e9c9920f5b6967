"""A toy MPS in virtual time, and the decisions driving it: for properties over any interleaving of what users do.

Not the simulator: no process, no file, no text. It knows one server at a time, the pending list, limits handed over at
Ready, the doubling back-off, the daemon that answers nothing while it is blocked, FAULT, and that a signal to a client
at work hurts its neighbours. Durations are those of the recordings.
"""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from mpsagent.core import actions as act
from mpsagent.core.decide import Memory, decide, note
from mpsagent.core.model import State
from mpsagent.core.reduce import apply
from mpsagent.core.world import Drain, Process, World
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy

GIB = 1 << 30
H200 = Device(0, "GPU-0", "NVIDIA H200", 140 * GIB, 132)
ALICE, BOB, CAROL, DAVE = 1001, 1002, 1003, 1004
NAMES = {ALICE: "alice", BOB: "bob", CAROL: "carol", DAVE: "dave"}
NOBODY = 65534
COMMAND = 0.0015  # one run of the front-end
START = 0.15  # Starting new server to Ready
EXIT = 0.055  # an idle server's exit, at the least

POLICY = """
[limits]
threads = 50
memory = "10G"
[user.alice]
threads = 60
memory = "20G"
[user.bob]
threads = 20
memory = "4G"
[switch]
after = "10s"
grace = "5s"
"""


def policy(text: str = POLICY) -> Policy:
    found, errors = load([("policy.toml", text)])
    assert found is not None, errors
    return found


@dataclass
class Proc:
    uid: int
    start: int
    works: bool = True  # a kernel in flight
    stopped: bool = False
    stubborn: bool = False  # ignores SIGTERM
    terminated: bool = False


@dataclass
class ToyServer:
    pid: int
    uid: int
    limits: Limits = field(default_factory=Limits)
    ready: bool = False
    leaving: bool = False
    stopped: bool = False
    hung: bool = False  # it was started for a client that has died: it never shuts down, and blocks the daemon
    sticky: set[int] = field(default_factory=set)
    clients: set[int] = field(default_factory=set)


class Toy:
    """Drive it with ``client``, ``leave``, ``run``. ``lag``: seconds from an event to the agent's decision."""

    def __init__(self, text: str = POLICY, *, lag: float = 0.002, agent: bool = True) -> None:
        self.policy, self.lag, self.agent = policy(text), lag, agent
        self.now = 1000.0
        self.identities: dict[int, Identity] = {uid: Identity(uid, name) for uid, name in NAMES.items()}
        self.drain: Drain | None = None
        self.state, self.memory = State(), Memory()
        self.procs: dict[int, Proc] = {}
        self.server: ToyServer | None = None
        self.pending: list[int] = []
        self.uids: dict[int, int] = {}
        self.defaults = Limits()
        self.control = False
        self.control_pid = 0
        self.control_stopped = False
        self.never_resumes = False
        self.spare = False  # servers are not killed before they are Ready
        self.door = False
        self.quitting = False
        self.backoff = 0.2
        self.retry_id = 0
        self.front_end_fails = False
        self.start_fails = False
        self.silent_since: float | None = None
        self.blocked_by: int | None = None
        # what happened
        self.done: list[tuple[float, act.Action]] = []
        self.given: list[tuple[int, int, Limits]] = []  # (pid, uid, limits) of each server's first clients
        self.served: dict[int, float] = {}
        self.arrived: dict[int, float] = {}
        self.refused: list[int] = []
        self.hurt: set[int] = set()  # innocent neighbours
        self.asked_first: set[tuple[int, int]] = set()  # (pid, start) that terminate_client was sent for
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._commands: list[act.Action] = []
        self._command_running = False
        self._deadline: float | None = None
        self._numbers, self._pids = count(), count(5000)
        self._due: float | None = None

    # --- the agent ----------------------------------------------------------------------------------------------------

    def world(self) -> World:
        live = {pid: Process(p.uid, p.start, p.stopped) for pid, p in self.procs.items()}
        if self.server is not None:
            live[self.server.pid] = Process(self.server.uid, 1, self.server.stopped)
        if self.control:
            live[self.control_pid] = Process(0, 1, self.control_stopped)
        return World(
            state=self.state,
            policy=self.policy,
            devices=(H200,),
            identities=dict(self.identities),
            processes=live,
            control_alive=self.control,
            door_open=self.door,
            silent_since=self.silent_since,
            parked_uid=NOBODY,
            drain=self.drain,
        )

    def decide(self) -> list[act.Action]:
        if not self.agent:
            return []
        world = self.world()
        found = decide(world, self.memory, self.now)
        again = decide(world, found.memory, self.now)
        assert again.actions == [], f"decided twice at the same time: {again.actions}"
        assert found.deadline is None or found.deadline > self.now, (found.deadline, found.memory)
        self.memory, self._deadline = found.memory, found.deadline
        for action in found.actions:
            assert action.rule, action
            assert action.reason, action
            self._perform(action)
        return found.actions

    def _perform(self, action: act.Action) -> None:
        self.done.append((self.now, action))
        if not action.enforce or isinstance(action, act.Report):
            self._after(0.0, lambda: self._note(action, True))
        elif isinstance(action, act.SignalClient):
            self._note(action, self._signal(action))
        elif isinstance(action, act.KillServer) and action.before_ready and self.spare:
            self._note(action, False)
        elif isinstance(action, act.KillServer | act.KillControl | act.Resume):
            self._kill(action)
            self._after(0.0, lambda: self._note(action, True))
        elif isinstance(action, act.StartControl):
            self._after(0.01, lambda: self._start_control(action))
        elif isinstance(action, act.OpenDoor):
            self.door = True
            self._note(action, True)
        elif isinstance(action, act.RunHook):
            self._after(0.1, lambda: self._note(action, True))
        else:
            self._commands.append(action)
            self._next_command()

    def _note(self, action: act.Action, ok: bool) -> None:
        self.memory = note(self.memory, act.Outcome(self.now, action, ok))
        self._wake()

    def _tell(self, *events: ev.Event) -> None:
        for event in events:
            self.events += 1
            self.state = apply(self.state, event)
        self._wake()

    def _wake(self) -> None:
        at = self.now + self.lag
        if self._due is None or at < self._due:
            self._due = at

    # --- the front-end: one command at a time, none while the daemon is blocked ---------------------------------------

    def _blocked(self) -> bool:
        if self.control_stopped or (self.server is not None and self.server.stopped):
            return True
        if self.blocked_by is not None and self.blocked_by in self.procs:
            return True
        return self.server is not None and not self.server.ready and not self.server.leaving

    def _next_command(self) -> None:
        if not self._command_running and self._commands:
            self._command_running = True
            action = self._commands.pop(0)
            limit = action.deadline if isinstance(action, act.TerminateClient) else 10.0
            self._after(COMMAND, lambda: self._command(action, self.now + limit))

    def _finish(self, action: act.Action, ok: bool) -> None:
        self._command_running = False
        self._note(action, ok)
        self._next_command()

    def _command(self, action: act.Action, limit: float) -> None:
        if self.control and not self.front_end_fails and self._blocked():
            if self.now >= limit:
                if self.silent_since is None and not isinstance(action, act.TerminateClient):
                    self.silent_since = limit - 10.0
                self._finish(action, False)
            else:
                self._after(0.01, lambda: self._command(action, limit))
            return
        self.silent_since = None
        if isinstance(action, act.TerminateClient) and self.control and not self.front_end_fails and not self.quitting:
            proc = self.procs.get(action.pid)
            if proc is not None:
                self.asked_first.add((action.pid, proc.start))
                proc.terminated = True
                if proc.stopped:
                    self.blocked_by = action.pid
                    self._after(action.deadline, lambda: self._finish(action, False))
                    return
        ok = self.control and not self.front_end_fails and not self.quitting and self._carry_out(action)
        self._finish(action, ok)

    def _carry_out(self, action: act.Action) -> bool:
        server = self.server
        if isinstance(action, act.SetDefaults):
            self.defaults = action.limits
        elif isinstance(action, act.SetServerLimits):
            if server is None or server.pid != action.server:
                return False
            server.limits = action.limits
        elif isinstance(action, act.StartServer):
            if server is None:
                self._start_server(action.uid)
        elif isinstance(action, act.ShutdownServer):
            if server is None or server.pid != action.server:
                return False
            self._try_shutdown(force=action.force)
        elif isinstance(action, act.TerminateClient):
            return server is not None and action.pid in server.clients
        elif isinstance(action, act.QuitControl):
            self._quit(action.timeout)
        return True

    # --- the toy MPS --------------------------------------------------------------------------------------------------

    def _start_control(self, action: act.Action) -> None:
        if self.start_fails:
            self._note(action, False)
            return
        self.control, self.control_pid, self.control_stopped, self.quitting = True, next(self._pids), False, False
        self.defaults, self.door, self.silent_since = Limits(), False, None
        self._tell(ev.ControlStarted(self.now, self.control_pid, "/s"))
        self._note(action, True)

    def crash_control(self) -> None:
        if not self.control:
            return
        self.control, self.server, self.pending, self.silent_since = False, None, [], None
        self._tell(ev.ControlGone(self.now))

    def _quit(self, timeout: int) -> None:
        self.quitting = True
        self._tell(ev.QuitIssued(self.now, timeout))
        self.refused += self.pending
        self.pending = []
        until = self.now + timeout

        def over() -> None:
            if not self.control:
                return
            if self.server is None or not self.server.clients or self.now >= until:
                if self.server is not None:
                    self._tell(
                        ev.ShutdownForced(self.now, self.server.pid), ev.ServerExited(self.now, self.server.pid, 0)
                    )
                self.server, self.control = None, False
                self._tell(ev.ControlExited(self.now, self.control_pid, 0))
            else:
                self._after(0.2, over)

        self._after(0.02, over)

    def _start_server(self, uid: int) -> None:
        server = self.server = ToyServer(next(self._pids), uid)
        self._tell(ev.ServerStarting(self.now, server.pid, uid))
        self._after(START, lambda: self._ready(server))

    def _ready(self, server: ToyServer) -> None:
        if self.server is not server or server.leaving:
            return
        server.limits, server.ready = self.defaults, True
        self._tell(
            ev.ThreadsSet(self.now, server.pid, server.limits.threads),
            *(ev.MemorySet(self.now, server.pid, d, size) for d, size in server.limits.memory.items()),
            ev.ServerStarted(self.now, server.pid),
            ev.ServerReady(self.now, server.pid),
        )
        for pid in [p for p in self.pending if self.uids[p] == server.uid]:
            self.pending.remove(pid)
            if pid in self.procs:
                self._attach(server, pid)
            else:
                server.hung = True
                self._tell(ev.ServerStuck(self.now, server.pid))
        self.backoff = 0.2
        self._contest()

    def _attach(self, server: ToyServer, pid: int) -> None:
        server.clients.add(pid)
        self.given.append((pid, server.uid, server.limits))
        self.served[pid] = self.now
        self._tell(ev.ContextConnected(self.now, server.pid, pid, 0), ev.ContextConnected(self.now, server.pid, pid, 1))

    def _contest(self) -> None:
        """Somebody waits: start his server, or ask the present one to make way, again and again."""
        if not self.pending or not self.control or self.quitting:
            return
        server = self.server
        if server is None:
            self._start_server(self.uids[self.pending[0]])
        elif server.ready and not server.leaving:
            self._try_shutdown()

    def _try_shutdown(self, force: bool = False) -> None:
        server = self.server
        if server is None or not server.ready or server.leaving:
            return
        self._tell(ev.ShutdownTried(self.now, server.pid, False))
        if server.hung and not server.clients:
            server.stopped = True
        if server.stopped:
            return
        if server.clients and not force:
            delay = self.backoff
            self.backoff *= 2
            self._tell(
                ev.ShutdownRefused(self.now, server.pid, len(server.clients) * 2),
                ev.ShutdownLater(self.now, server.pid, delay),
            )
            self.retry_id += 1
            mine = self.retry_id
            self._after(delay, lambda: self._contest() if mine == self.retry_id else None)
            return
        server.leaving = True
        if force:
            self._tell(ev.ShutdownForced(self.now, server.pid))
        self._tell(ev.ServerStopping(self.now, server.pid))
        self._after(0.02 if force else EXIT, lambda: self._exited(server))

    def _exited(self, server: ToyServer) -> None:
        if self.server is server:
            self.server = None
            self._tell(ev.ServerExited(self.now, server.pid, 0))
            # Who came for the server's own user goes first, whoever waits longer (recording 01, S4); last, if that was
            # never Ready (X26).
            own = [p for p in self.pending if self.uids[p] == server.uid]
            others = [p for p in self.pending if p not in own]
            self.pending = own + others if server.ready else others + own
            self._contest()

    def fault(self) -> None:
        server = self.server
        if server is None or not server.ready or not server.clients or server.leaving:
            return
        server.sticky = set(server.clients)
        self._tell(
            ev.FaultStarted(self.now, server.pid),
            ev.FaultDevice(self.now, server.pid, 0),
            *(ev.FaultClient(self.now, server.pid, pid) for pid in sorted(server.sticky)),
        )

    # --- what users do ------------------------------------------------------------------------------------------------

    def client(self, uid: int, pid: int | None = None, **how: bool) -> int:
        pid = next(self._pids) if pid is None else pid
        self.procs[pid] = Proc(uid, next(self._numbers), **how)
        self.arrived[pid] = self.now
        self.uids[pid] = uid
        self._connect(pid)
        return pid

    def _connect(self, pid: int) -> None:
        """What the control daemon makes of a new client, as soon as it is not blocked."""
        if pid not in self.procs:
            return
        uid, server = self.uids[pid], self.server
        blocked = self.control_stopped or (self.blocked_by is not None and self.blocked_by in self.procs)
        if server is not None and server.hung:  # it takes no client, and blocks the daemon once another user has come
            blocked = blocked or server.stopped or server.uid == uid
        if self.control and blocked:
            self._after(0.01, lambda: self._connect(pid))
            return
        if not self.control or self.quitting or not self.door:
            self.refused.append(pid)
        elif server is not None and server.uid == uid and server.ready and not server.leaving:
            self._tell(ev.ClientAdmitted(self.now, pid, uid))
            if server.sticky:
                self.refused.append(pid)
                self._tell(ev.ClientRefused(self.now, server.pid, pid, "status 807"))
            else:
                self._attach(server, pid)
        else:
            self.pending.append(pid)
            self._tell(ev.ClientQueued(self.now, pid, uid))
            self._contest()

    def leave(self, pid: int) -> None:
        """The process ends by itself, its work done."""
        if pid in self.procs:
            self.procs[pid].works = False
            self._dies(pid)

    def _dies(self, pid: int) -> None:
        del self.procs[pid]
        server = self.server
        if server is not None and pid in server.clients:
            server.clients.discard(pid)
            if pid in server.sticky and server.sticky == {pid}:
                self._tell(ev.ContextDestroyed(self.now, server.pid, 0))
            server.sticky.discard(pid)
            self._tell(ev.ClientDisconnected(self.now, server.pid, pid))
        self._tell(ev.ProcessGone(self.now, pid))

    def _signal(self, action: act.SignalClient) -> bool:
        proc, server = self.procs.get(action.pid), self.server
        if proc is None:
            return False
        assert (proc.uid, proc.start) == (action.uid, action.start), f"a wrong process is signalled: {action} {proc}"
        on_server = server is not None and action.pid in server.clients
        if on_server and server is not None and proc.works and not proc.terminated and not server.sticky:
            self.hurt |= {p for p in server.clients if p != action.pid}
        if action.signal == signal.SIGKILL or not (proc.stopped or proc.stubborn):
            self._dies(action.pid)
        return True

    def _kill(self, action: act.Action) -> None:
        server = self.server
        if isinstance(action, act.KillControl):
            self.crash_control()
        elif isinstance(action, act.KillServer) and server is not None and server.pid == action.server:
            # What had been asked meanwhile is heard before the exit is seen (recording 06, V3: 12 ms).
            server.stopped, server.leaving = False, True
            self._after(0.012, lambda: self._exited(server))
        elif isinstance(action, act.Resume):
            if server is not None and server.pid == action.pid and not server.hung and not self.never_resumes:
                server.stopped = False
            if self.control and action.pid == self.control_pid and not self.never_resumes:
                self.control_stopped = False

    # --- time ---------------------------------------------------------------------------------------------------------

    def _after(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self._numbers), what))

    def at(self, delay: float, what: Callable[[], object]) -> None:
        self._after(delay, lambda: void(what()))

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        end = self.now + seconds
        for _ in range(200_000):
            next_event = self._queue[0][0] if self._queue else float("inf")
            wakes = [t for t in (self._due, self._deadline) if t is not None]
            wake = min(wakes, default=float("inf")) if self.agent else float("inf")
            at = min(next_event, wake)
            if at > end:
                self.now = end
                return
            self.now = max(self.now, at)
            if next_event <= wake:
                heapq.heappop(self._queue)[2]()
            else:
                self._due = self._deadline = None
                self.decide()
        raise AssertionError("the decisions never come to rest")

    def up(self) -> Toy:
        """Started, parked, door open."""
        self._wake()
        self.run(2.0)
        assert self.control
        assert self.door
        return self

    # --- questions ----------------------------------------------------------------------------------------------------

    def actions(self, *kinds: type) -> list[act.Action]:
        return [action for _, action in self.done if isinstance(action, kinds) and action.enforce]

    def reports(self, kind: str) -> list[act.Report]:
        return [a for _, a in self.done if isinstance(a, act.Report) and a.kind == kind]

    def limits(self, uid: int) -> Limits:
        return self.policy.rules(self.identities.get(uid, Identity(uid))).limits((H200,))


def void(_: object) -> None:
    return None
