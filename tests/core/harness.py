"""The engine in the toy world: inputs with their delays, actions carried out, and what must hold at every moment.

What is checked all the time: two users are never at work at once; a user is admitted with exactly the policy's limits;
a signal goes only to a process that passed the gate and is still the same; nothing is asked twice at the same time; the
deadline lies in the future; nobody is refused but by the policy.
"""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import ladder
from mpsagent.core import transitions as tr
from mpsagent.core.coordinator import Core, Step
from mpsagent.core.model import Key
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.wire import link
from tests.core.toy import LEAVES, Clock, Gate, Mps, Proc, Way
from tests.policies import in_turns

GIB = 1 << 30
H200 = Device(0, "GPU-0", "NVIDIA H200", 140 * GIB, 132)
ALICE, BOB, CAROL, DAVE = 1001, 1002, 1003, 1004
USERS = (ALICE, BOB, CAROL, DAVE)
NAMES = {ALICE: "alice", BOB: "bob", CAROL: "carol", DAVE: "dave"}
COMMAND = 0.0015  # one run of the front-end
LEAVING = 0.026  # from the end of a program's contexts to the end of its process
LOOK = 1.0  # the observer

POLICY = """
[limits]
active_threads = '50%'
memory_limit = "10G"
[user.alice]
active_threads = '60%'
memory_limit = "20G"
[user.bob]
active_threads = '20%'
memory_limit = "4G"
[turn]
time_limit = "10s"
grace = "5s"
"""
PATIENT = POLICY.replace('"10s"', '"1h"')
SHARED = '[instance.gpu]\nserver_scope = "all"\n'
TOGETHER = '[instance.gpu]\nsharing = "one-server"\n'


def policy(text: str = POLICY) -> Policy:
    """Users take turns unless an instance of the text says otherwise."""
    found, errors = load([("policy.toml", text), ("turns.toml", in_turns(text))])
    assert found is not None, errors
    return found


def of(lane: Key, *events: Any) -> list[inp.Input]:
    """Said to be about a lane."""
    return list(events) if lane is None else [inp.Of(lane, one) for one in events]


class Stage:
    """``lag``: seconds between agent and gate, each way; ``log_lag``: until a line is read (None: never); ``named``:
    server.log says which client a line is about, as from driver 580 on."""

    def __init__(
        self,
        text: str = POLICY,
        *,
        shared: bool = False,
        together: bool = False,
        pausing: bool = False,
        lag: float = 0.001,
        log_lag: Callable[[], float | None] | None = None,
        named: bool = True,
    ) -> None:
        self.clock = Clock()
        self.text, self.shared, self.together = text, shared or together or pausing, together
        """``together``: several users may be at work at once."""
        self.pausing, self.overlaps = pausing, False
        """``overlaps``: several users may be at work for a moment, after a drain or a fault or without an agent."""
        self.policy = self._policy(text)
        self.lag, self.log_lag = lag, log_lag or (lambda: 0.002)
        self.named = named
        self.mps = self._daemon(None)
        """The control daemon of all users; ``daemons``: by lane."""
        self.daemons: dict[Key, Mps] = {None: self.mps}
        self.gate = Gate(self.clock, self.mps, self._from_gate)
        self.core: Core | None = None
        self.link = 0
        """Number of the link between agent and gate; 0: down."""
        self.identities = {uid: Identity(uid, name) for uid, name in NAMES.items()}
        self.procs: dict[int, Proc] = {}
        self.lines: dict[Key, list[ev.Line]] = {}
        """What control.log and server.log of a lane hold since the last start of its daemon."""
        self.kept: tuple[inp.Begun, ...] = ()
        self.front_end_fails = False
        self.start_fails = False
        self.open_fails = ""
        """Why no lane can be made."""
        self.unkillable = False
        self.holds = True
        """The files of the GPU of a client that is being ended can be held."""
        self.hook_takes = 0.01
        """Seconds that a hook runs."""
        self.silent: set[Key] = set()
        self._asked: dict[Key, float] = {}
        """By control daemon, when its last command began."""
        self.gate_deaf = False
        self.forging = False
        # what happened
        self.done: list[tuple[float, act.Action]] = []
        self.told: list[tr.Transition] = []
        self.came: dict[int, float] = {}
        self.served: dict[int, float] = {}
        self.refused: list[int] = []
        """Users of whom the gate was asked to refuse a connection."""
        self.ticks = 0
        self.inputs = 0
        self._links = count(1)
        self._starts = count(1)
        self._pids = count(100)
        self._commands: dict[Key, list[act.Action]] = {}
        self._running: set[Key] = set()
        self._stopped: frozenset[int] = frozenset()
        self.cpu_idle: dict[int, float] = {}
        self.lifts: dict[int, inp.Lifts] = {}

    def _daemon(self, lane: Key) -> Mps:
        made = Mps(self.clock, lane is None and self.shared, lambda line: self._log(line, lane), self._server_lost)
        made.gone = lambda control: self._control_gone(control, lane)
        return made

    def _policy(self, text: str) -> Policy:
        if "[instance" in text:
            return policy(text)
        return policy(text + (TOGETHER if self.together else SHARED if self.shared else ""))

    @property
    def now(self) -> float:
        return self.clock.now

    # --- the agent ----------------------------------------------------------------------------------------------------

    def up(self) -> Stage:
        self.start_agent()
        self.run(1.0)
        assert self.mps.control or self.policy.sharing == "per-user"
        return self

    def start_agent(self) -> None:
        """A new agent: what it finds, what the logs say, then the gate."""
        self.core, kept = (core := Core()), self.kept
        self.thaw()  # as every agent begins
        found: list[inp.Input] = [
            inp.PolicyChanged(self.now, self.policy),
            inp.DevicesFound(self.now, (H200,)),
            inp.PeopleKnown(self.now, dict(self.identities)),
        ]
        for lane, mps in self.daemons.items():
            found += [] if lane is None else [inp.DaemonOpened(self.now, lane)]
            if mps.control:
                runs = inp.ControlRuns(self.now, mps.control, mps.started, "/s", mps.shared)
                found += of(lane, runs, *self.lines.get(lane, ()))
        core.absorb(found)
        self._carry(core.tick(self.now))
        self.connect(kept)
        self.after(LOOK, lambda: self._look(core))

    def kill_agent(self) -> None:
        """Its front-end dies with it; what had been sent is heard all the same."""
        self.core, self.link = None, 0
        self._commands.clear()

    def connect(self, kept: tuple[inp.Begun, ...] = ()) -> None:
        self.link = number = next(self._links)
        for one in self.gate.sync():
            self._soon(number, one)
        self._soon(number, inp.Resumed(self.now, kept))

    def cut_link(self) -> None:
        if self.link and self.core is not None:
            self.link = 0
            self.feed(inp.LinkLost(self.now))

    def feed(self, *events: inp.Input | act.Done) -> None:
        if self.core is None:
            return
        self.inputs += len(events)
        for event in events:
            said = event.what if isinstance(event, inp.Of) else event
            if isinstance(said, inp.GateSaid) and isinstance(said.what, link.Passed):
                self._check_alone()
        self._carry(self.core.receive_all(events, self.now))

    def _carry(self, step: Step) -> None:
        core = self.core
        assert core is not None
        for _, error in step.mistakes:
            raise error
        self.told += step.transitions
        # A step that did nothing was a pass over the same state: it would do nothing again.
        if step != Step((), ()) and core.tick(self.now) != Step((), ()):
            raise AssertionError("decided twice at the same time")
        deadline = core.deadline()
        assert deadline is None or deadline > self.now, (deadline, self.now)
        self.kept = tuple(one for lane in core.engines.values() for one in ladder.begun(lane.memories.ladder))
        for action in step.actions:
            assert action.reason, action
            assert "None" not in action.reason, action
            assert action.rule, action
            self.done.append((self.now, action))
            self._do(action)

    def _do(self, action: act.Action) -> None:
        if not action.enforce:
            self._answer(action, True)
            return
        match action:
            case act.TellGate(message=link.Admissions() as table):
                self._check_table(table)
                if not self._to_gate(lambda: self.gate.admissions(table.number, table, action.daemon)):
                    self._answer(action, False)
            case act.TellGate(message=link.Refuse() as refuse):
                self._check_refusal(refuse)
                self._answer(action, self._to_gate(lambda: self.gate.refuse(refuse.connection)))
            case act.TellGate(message=link.Release() as release):
                self._check_release(release)
                self._answer(action, self._to_gate(lambda: self.gate.release((release.pid, release.start))))
            case act.TellGate(message=link.Found() as found):
                self._answer(action, self._to_gate(lambda: self._found(found, action.daemon)))
            case act.TellGate(message=link.HeldUp()):
                self._answer(action, self._to_gate(lambda: None))
            case act.WarnClient():
                self._answer(action, True)
            case act.SignalClient() | act.SignalHeld():
                self._answer(action, self._signal(action))
            case act.Freeze() | act.Thaw():
                core = self.core
                self.after(0.002, lambda: self._freeze(action) if self.core is core else None)
            case act.KillServer():
                self._answer(action, self._kill_server(action))
            case act.KillControl():
                ok = bool(self.daemons[action.daemon].control) and not self.unkillable
                if ok:
                    self.crash_control(action.daemon)
                self._answer(action, ok)
            case act.Resume():
                self._resume(action.pid)
                self._answer(action, True)
            case act.StartControl():
                self.after(0.05, lambda: self._start_control(action))
            case act.OpenDaemon():
                self.after(0.01, lambda: self._open(action))
            case act.CloseDaemon():
                assert not self.daemons[action.uid].control, "a lane is taken away under its control daemon"
                del self.daemons[action.uid], self.gate.ways[action.uid]
                self.after(0.02, lambda: self._answer(action, True))
            case act.RunHook():
                core = self.core
                self.after(self.hook_takes, lambda: self._answer(action, True) if self.core is core else None)
            case act.Tell():
                self.after(0.01, lambda: self._answer(action, True))
            case act.Report():
                pass
            case _:
                self._commands.setdefault(action.daemon, []).append(action)
                self._next_command(action.daemon)

    def _open(self, action: act.OpenDaemon) -> None:
        """An agent that was killed meanwhile leaves the directories all the same."""
        if self.open_fails:
            self._answer(action, False, self.open_fails)
            return
        mps = self.daemons[action.uid] = self._daemon(action.uid)
        self.gate.ways[action.uid] = Way(action.uid, mps)
        self.feed(inp.DaemonOpened(self.now, action.uid), act.Done(self.now, action, True))

    def _answer(self, action: act.Action, ok: bool, text: str = "") -> None:
        core = self.core
        self.after(0.0, lambda: self.feed(act.Done(self.now, action, ok, text)) if self.core is core else None)

    def _to_gate(self, what: Callable[[], None]) -> bool:
        link = self.link
        if not link or self.gate_deaf:
            return False
        self.after(self.lag, lambda: what() if link else None)
        return True

    def _found(self, said: link.Found, lane: Key) -> None:
        proc = self.procs.get(said.pid)
        if proc is not None and (proc.uid, proc.start) == (said.uid, said.start):
            self.gate.found(proc, said, lane)

    def _from_gate(self, one: inp.Input) -> None:
        said = one.what if isinstance(one, inp.Of) else one
        if isinstance(said, inp.GateSaid) and isinstance(said.what, link.Passed):
            self.served.setdefault(said.peer.pid, self.now)
        if self.link:
            self._soon(self.link, one)

    def _soon(self, link: int, one: inp.Input) -> None:
        self.after(self.lag, lambda: self.feed(one) if link == self.link else None)

    def _log(self, line: ev.Line, lane: Key = None) -> None:
        if line.what is ev.ControlStarted:
            self.lines[lane] = []
        if line.what is ev.ContextConnected:
            self._check_alone()
        if not self.named and line.what in (ev.ContextConnected, ev.ClientDisconnected):
            line = ev.ClientUnnamed(line.at, line.server)
        lag = self.log_lag()
        if lag is not None:
            self.lines.setdefault(lane, []).append(line)
            core = self.core
            self.after(lag, lambda: self.feed(*of(lane, line)) if self.core is core else None)

    def forge(self, *lines: ev.Line) -> None:
        """A line comes into a log."""
        self.forging = True
        self.lines.setdefault(None, []).extend(lines)
        self.feed(*lines)

    def _look(self, core: Core) -> None:
        """Once a second, as the observer does."""
        if self.core is not core:
            return
        stopped = frozenset(p.pid for p in self.procs.values() if p.stopped)
        stopped |= {self.gate.pid} if self.gate.stopped else frozenset()
        for mps in self.daemons.values():
            stopped |= {s.pid for s in mps.servers.values() if s.stopped}
            stopped |= {mps.control} if mps.control and mps.stopped else frozenset()
        frozen = any(c.frozen for c in core.state.clients.values())
        if stopped != self._stopped or self.cpu_idle or self.lifts or frozen:
            self._stopped = stopped
            idle = {pid: self.now - since for pid, since in self.cpu_idle.items()}
            self.feed(inp.ProcessesSeen(self.now, stopped, idle, dict(self.lifts)))
        for lane in [one for one in self.silent if one not in self.daemons or not self.daemons[one].blocked()]:
            self.silent.discard(lane)
            self.feed(*of(lane, inp.DaemonSilent(self.now, False)))
        self.after(LOOK, lambda: self._look(core))

    # --- what must hold -----------------------------------------------------------------------------------------------

    def at_work(self) -> set[int]:
        servers = [server for mps in self.daemons.values() for server in mps.servers.values()]
        return {p.uid for s in servers for p in s.clients.values() if not (self.pausing and p.frozen)}

    def _check_alone(self) -> None:
        if self.overlaps:
            return
        assert self.together or len(self.at_work()) <= 1, f"two users at work at {self.now}: {self.at_work()}"

    def _check_table(self, table: link.Admissions) -> None:
        assert self.together or len(table.users) <= 1
        for one in table.users.values():
            rules = self.policy.rules(self.identities.get(one.uid) or Identity(one.uid, NAMES[one.uid]))
            exact = rules.limits((H200,)) if rules.enforce else Limits()
            assert one.limits == exact, (one, exact)
            assert rules.access == "allow" or not rules.enforce

    def _check_refusal(self, said: link.Refuse) -> None:
        assert self.core is not None
        held = self.core.state.held[said.connection]
        view = self.core.view(held.uid if held.uid in self.core.engines else None)
        self.refused.append(held.uid)
        assert view.denied(held.uid) or view.given_up is not None, said

    def look(self, pid: int) -> inp.Seen:
        """As the executor shows a process that MPS lists."""
        proc = self.procs[pid]
        return inp.Seen(self.now, proc.uid, proc.start, float("-inf"))

    def _check_release(self, said: link.Release) -> None:
        """A log alone moves no turn: who is released has no server."""
        proc = self.procs.get(said.pid)
        assert proc is None or proc.start != said.start or proc.server is None or not proc.made, said

    def _signal(self, action: act.SignalClient | act.SignalHeld) -> bool:
        """By the pidfd that was taken at the gate: a process that has ended gets nothing, whoever has its pid now."""
        key = action.pid, action.start
        if isinstance(action, act.SignalHeld):
            assert self.gate.procs[key].uid == action.uid
        else:
            assert self.gate.ever.get(key) == action.uid, f"it never passed the gate: {action}"
        proc = self.procs.get(action.pid)
        if proc is None or proc.start != action.start:
            return False
        if action.signal == signal.SIGCONT:
            proc.stopped = proc.frozen = False
            return True
        for mps in self.daemons.values():
            mps.signalled(proc)
        if (action.signal == signal.SIGKILL and not self.unkillable) or not (proc.stopped or proc.stubborn):
            self.ends(proc, killed=True)
        return True

    def _freeze(self, action: act.Freeze | act.Thaw) -> None:
        """As the freezer does it: one that its owner has stopped stays so."""
        assert self.gate.ever.get((action.pid, action.start)) == action.uid, f"it never passed the gate: {action}"
        proc = self.procs.get(action.pid)
        if proc is None or proc.start != action.start:
            self._answer(action, False, "it has ended")
            return
        if isinstance(action, act.Freeze):
            assert not self.gate.hands_over(proc.uid), "frozen in the middle of a hand-over"
            if proc.freezes:
                proc.frozen = proc.frozen or not proc.stopped
                proc.stopped = True
            self._answer(action, proc.freezes)
            return
        if proc.frozen:
            proc.frozen = proc.stopped = False
        self._answer(action, True)

    def thaw(self) -> None:
        """What the unit does when its agent has gone (ExecStopPost)."""
        for proc in self.procs.values():
            if proc.frozen:
                proc.frozen = proc.stopped = False

    def owner_resumes(self, proc: Proc) -> None:
        proc.frozen = proc.stopped = False

    # --- the front-end: one command at a time, none while the daemon is blocked ---------------------------------------

    def _next_command(self, lane: Key) -> None:
        if lane in self._running or not self._commands.get(lane) or self.core is None:
            return
        self._running.add(lane)
        core, action = self.core, self._commands[lane].pop(0)
        deadline = action.deadline if isinstance(action, act.TerminateClient) else 10.0
        began = self._asked[action.daemon] = self.now
        self.after(COMMAND, lambda: self._command(core, action, began, began + deadline))

    def _finish(self, core: Core, action: act.Action, ok: bool, text: str = "", *, held: bool = False) -> None:
        self._running.discard(action.daemon)
        if core is self.core:
            took = self.now - self._asked[action.daemon] if isinstance(action, act.TerminateClient) else 0.0
            self.feed(act.Done(self.now, action, ok, text, held, took))
        self._next_command(action.daemon)

    def _command(self, core: Core, action: act.Action, began: float, limit: float) -> None:
        mps, lane = self.daemons.get(action.daemon), action.daemon
        if mps is None or not mps.control or self.front_end_fails or mps.quitting:
            self._finish(core, action, False, "no daemon")
            return
        if isinstance(action, act.TerminateClient) and (proc := self.procs.get(action.pid)) is not None:
            proc.stopped = proc.frozen = False  # the executor resumes it while it is asked
        if mps.blocked():
            if self.now < limit:
                self.after(0.05, lambda: self._command(core, action, began, limit))
                return
            if not isinstance(action, act.TerminateClient) and core is self.core:
                self.silent.add(lane)
                self.feed(*of(lane, inp.DaemonSilent(began, True)))
            self._finish(core, action, False, "silent")
            return
        if lane in self.silent and core is self.core:
            self.silent.discard(lane)
            self.feed(*of(lane, inp.DaemonSilent(self.now, False)))
        if isinstance(action, act.TerminateClient):
            self._terminate(core, mps, action, limit)
        elif isinstance(action, act.ShutdownServer):
            server = mps.servers.get(action.server)
            if server is not None:
                mps.shutdown(server, force=action.force)
            self._finish(core, action, server is not None)
        elif isinstance(action, act.QuitControl):
            mps.quit(action.timeout)
            self._finish(core, action, True)
        else:
            assert isinstance(action, act.Reconcile)
            self._reconcile(core, mps, action)
            self._finish(core, action, True)

    def _terminate(self, core: Core, mps: Mps, action: act.TerminateClient, limit: float) -> None:
        server, proc = mps.servers.get(action.server), self.procs.get(action.pid)
        if server is None or proc is None or proc.server is not server or not proc.made:
            self._finish(core, action, False, "201")
            return
        self._log(ev.TerminationAsked(self.now, server.pid, proc.pid), action.daemon)
        if proc.terminated or proc.mute or server.fault:  # it blocks until the process exits
            mps.blocked_by = proc
            self.after(limit - self.now, lambda: self._finish(core, action, False, "silent"))
            return
        proc.terminated, proc.free_at = True, self.now + 0.008 + LEAVES
        proc.held = action.protect and self.holds
        self.after(0.008, lambda: self._finish(core, action, True, held=proc.held))

    def _reconcile(self, core: Core, mps: Mps, action: act.Reconcile) -> None:
        if core is not self.core or action.daemon not in core.engines:
            return
        now, servers, known = self.now, mps.servers, core.engines[action.daemon].state.servers
        told: list[inp.Input] = [inp.ServersListed(now, {pid: s.uid for pid, s in servers.items()}, frozenset(known))]
        fresh = [pid for pid in servers if pid not in known]
        for pid in dict.fromkeys((*action.servers, *fresh)):
            server = servers.get(pid)
            if server is not None:
                word = "FAULT" if server.fault else "SHUTTING_DOWN" if server.leaving else "ACTIVE"
                told.append(inp.ServerStatusSeen(now, pid, word))
                listed = frozenset(p for p, one in server.clients.items() if one.made)
                told.append(inp.ClientsListed(now, pid, listed, {p: self.look(p) for p in listed & self.procs.keys()}))
        self.feed(*of(action.daemon, *told))

    # --- by the kernel ------------------------------------------------------------------------------------------------

    def _start_control(self, action: act.StartControl) -> None:
        mps = self.daemons.get(action.daemon)
        if mps is None or self.start_fails or mps.control:
            self._answer(action, False)
            return
        mps.shared = action.multiuser
        if action.daemon is None:
            self.shared = action.multiuser
        control = mps.start()
        self.feed(*of(action.daemon, inp.ControlRuns(self.now, control, self.now, "/s", action.multiuser)))
        self._answer(action, True)

    def crash_control(self, lane: Key = None) -> None:
        control = self.daemons[lane].control
        if control:
            self._control_gone(control, lane)

    def _control_gone(self, control: int, lane: Key) -> None:
        """After a ``quit``, or a crash."""
        mps = self.daemons[lane]
        mps.end()
        mps.stopped = mps.quitting = False
        self.gate.pump()
        self.after(self.lag, lambda: self.feed(*of(lane, inp.ControlGone(self.now, control))))

    def _kill_server(self, action: act.KillServer) -> bool:
        """The executor asks the kernel whose child it is."""
        mps = self.daemons[action.daemon]
        server = mps.servers.get(action.server)
        if server is None:
            return False
        server.stopped, server.leaving = False, True
        self.after(0.012, lambda: mps.exited(server))
        return True

    def _resume(self, pid: int) -> None:
        for mps in self.daemons.values():
            server = mps.servers.get(pid)
            if mps.never_resumes:
                continue
            if server is not None:
                server.stopped = False
            if pid == mps.control:
                mps.stopped = False

    def _server_lost(self, proc: Proc) -> None:
        """Its server has gone under it: most programs end with the error."""
        if not proc.stays and not proc.stopped and proc.pid in self.procs:
            self.after(0.2, lambda: self.ends(proc))

    # --- what users do ------------------------------------------------------------------------------------------------

    def client(self, uid: int, pid: int | None = None, **how: bool | int | str) -> Proc:
        proc = Proc(next(self._pids) if pid is None else pid, uid, next(self._starts), **how)  # type: ignore[arg-type]
        self.procs[proc.pid] = proc
        self.came[proc.pid] = self.now
        self.gate.knock(proc)
        return proc

    def relayed(self, uid: int, through: Proc) -> Proc:
        """A process that comes through another one, on that one's server."""
        assert through.server is not None
        proc = Proc(next(self._pids), uid, next(self._starts))
        self.procs[proc.pid] = proc
        self.overlaps = True
        self.daemons[self.gate.way_of(through.key).lane].relayed(through.server, proc)
        return proc

    def ends(self, proc: Proc, *, killed: bool = False) -> None:
        """The process ends. It leaves its server before, unless it is killed."""
        if self.procs.get(proc.pid) is not proc:
            return
        del self.procs[proc.pid]
        proc.dead = True
        passed = proc.key in self.gate.ever
        self._leave(proc)
        self.gate.ended(proc)
        if passed:
            late = 0.0 if killed else LEAVING
            self.after(self.lag + late, lambda: self.feed(inp.ProcessEnded(self.now, proc.pid, proc.start)))

    def detaches(self, proc: Proc) -> None:
        """It lets go of its server and lives on."""
        self._leave(proc)

    def _leave(self, proc: Proc) -> None:
        mps = next((one for one in self.daemons.values() if proc.server in one.servers.values()), self.mps)
        mps.leave(proc)

    def comes_back(self, proc: Proc) -> None:
        if self.procs.get(proc.pid) is proc and proc.server is None:
            self.gate.knock(proc)

    def reload(self, text: str) -> None:
        self.text, self.policy = text, self._policy(text)
        if self.policy.sharing == "per-user":  # users of another way work on until they end
            self.together = self.overlaps = True
        self.feed(inp.PolicyChanged(self.now, self.policy))

    def know(self, *uids: int) -> None:
        """Whom the name service knows now."""
        self.identities = {uid: Identity(uid, NAMES[uid]) for uid in uids}
        self.feed(inp.PeopleKnown(self.now, dict(self.identities)))

    # --- time ---------------------------------------------------------------------------------------------------------

    def after(self, delay: float, what: Callable[[], object]) -> None:
        self.clock.after(delay, what)

    def run(self, seconds: float) -> None:
        end, clock = self.now + seconds, self.clock
        for _ in range(200_000):
            coming = clock.queue[0][0] if clock.queue else float("inf")
            deadline = self.core.deadline() if self.core is not None else None
            wake = float("inf") if deadline is None else deadline + 0.001
            if min(coming, wake) > end:
                clock.now = end
                return
            clock.now = max(clock.now, min(coming, wake))
            if coming <= wake:
                heapq.heappop(clock.queue)[2]()
            else:
                assert self.core is not None
                self.ticks += 1
                self._carry(self.core.tick(self.now))
        raise AssertionError("the engine never comes to rest")

    # --- questions ----------------------------------------------------------------------------------------------------

    def actions(self, *kinds: type) -> list[Any]:
        """Those that were enforced; what the gate was told, by the messages."""
        found = (one.message if isinstance(one, act.TellGate) else one for _, one in self.done if one.enforce)
        return [one for one in found if isinstance(one, kinds)]

    def times(self, kind: type) -> list[float]:
        return [at for at, action in self.done if isinstance(action, kind) and action.enforce]

    def reports(self, kind: str) -> list[act.Report]:
        return [a for _, a in self.done if isinstance(a, act.Report) and a.kind == kind]

    def times_of_reports(self, kind: str) -> list[float]:
        return [at for at, action in self.done if isinstance(action, act.Report) and action.kind == kind]

    def happened(self, kind: type) -> list[tr.Transition]:
        return [one for one in self.told if isinstance(one, kind)]

    def turns(self) -> list[int]:
        return [one.uid for one in self.told if isinstance(one, tr.TurnBegan)]

    def limits(self, uid: int) -> Limits:
        return self.policy.rules(Identity(uid, NAMES[uid])).limits((H200,))

    def given(self, proc: Proc) -> list[Limits]:
        return [one.limits for one in self.gate.given if one.pid == proc.pid]

    def working(self, proc: Proc) -> bool:
        return proc.server is not None and proc.made > 0 and proc.pid in self.procs


def all_of(procs: Iterable[Proc], stage: Stage) -> bool:
    return all(stage.working(proc) for proc in procs)
