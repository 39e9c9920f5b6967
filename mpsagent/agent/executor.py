"""Carries actions out and says how each ended. It decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable

from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.clock import SteadyClock
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.ladder import SETTLE
from mpsagent.core.model import State
from mpsagent.core.words import named
from mpsagent.linux.proc import ids
from mpsagent.linux.processes import TICKS, Process, parent
from mpsagent.mps import commands
from mpsagent.policy.policy import Policy
from mpsagent.system import directories
from mpsagent.system.control import ControlSupervisor, ProblemKind, Running
from mpsagent.system.freezer import Freezer
from mpsagent.system.frontend import AnswerStatus, FrontEndQueue, Reply
from mpsagent.system.gate_link import GateLink
from mpsagent.system.gpu_files import GpuFiles
from mpsagent.system.hooks import run_hook
from mpsagent.system.terminal import Terminals
from mpsagent.wire import codec, link

RESUME_EVERY = 0.1
"""Seconds between two looks whether a client that is asked to end is stopped."""
BUSY_FIRST, BUSY_MOST = 0.002, 0.5
"""Seconds until a command that was turned away is sent again, doubling, and until it is given up: the daemon listens to
one front-end at a time (X25), and the gate's own sessions last a millisecond."""
SHORT = 2.0
"""Seconds for a question that is only asked to hear whether the daemon answers again."""


class Executor:
    """The actions of one lane. ``tell(inputs)`` takes the inputs from an answer of MPS; ``state()`` is the engine's, of
    this lane."""

    def __init__(
        self,
        where: directories.Directories,
        front_end: FrontEndQueue,
        supervisor: ControlSupervisor,
        gate: GateLink,
        clients: ClientProcesses,
        clock: SteadyClock,
        tell: Callable[[list[inp.Input]], None],
        state: Callable[[], State],
        freezer: Freezer,
        terminals: Terminals,
        gpu_files: GpuFiles,
    ) -> None:
        self._gpu_files = gpu_files
        self._freezer = freezer
        self.front_end_problem: str | None = None
        self.start_problem: str | None = None
        self.multiuser_problem: str | None = None
        """The reason for which each turn has its own server though the policy wants a shared one."""
        self._heard = float("-inf")
        """When the control daemon last wrote to its log."""
        self._where = where
        self._front_end = front_end
        self._supervisor = supervisor
        self._gate = gate
        self._clients = clients
        self._clock = clock
        self._tell = tell
        self._terminals = terminals
        self._state = state

    async def perform(self, action: act.Action) -> act.Done:
        """Perform the action, and return its result. Never raise."""
        if not action.enforce:
            return act.Done(self._clock.now(), action, True, "not enforced: only reported")
        held, began = False, self._clock.now()
        try:
            if isinstance(action, act.TerminateClient):
                ok, text, held = await self._terminate(action)
            else:
                ok, text = await self._do(action)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {error}"
        now = self._clock.now()
        return act.Done(now, action, ok, text, held, now - began if isinstance(action, act.TerminateClient) else 0.0)

    def tell_gate(self, action: act.TellGate) -> act.Done:
        try:
            ok = self._gate.send(action.message)
        except codec.LinkError as error:  # too long
            return act.Done(self._clock.now(), action, False, str(error))
        return act.Done(self._clock.now(), action, ok, "" if ok else self._gate.problem or "the gate does not read")

    async def _do(self, action: act.Action) -> tuple[bool, str]:
        match action:
            case act.ShutdownServer():
                return _taken(await self._ask(commands.shutdown_server(action.server, action.force), urgent=True))
            case act.QuitControl():
                return await self._quit(action)
            case act.Reconcile():
                return await self._reconcile(action)
            case act.SignalClient() | act.WarnClient():
                return self._signal(action)
            case act.Freeze() | act.Thaw():
                return await self._freeze(action)
            case act.SignalHeld():
                held = self._clients.waiting(action.connection, action.start)
                held = held or self._clients.get(action.pid, action.start)
                problem = held.send(action.signal) if held is not None else f"process {action.pid} has ended"
                return problem is None, problem or ""
            case act.Resume():
                return self._to_ours(action.pid, signal.SIGCONT)
            case act.KillServer():
                return self._to_ours(action.server, signal.SIGKILL)
            case act.KillControl():
                problem = self._supervisor.kill()
                return problem is None, problem or ""
            case act.StartControl():
                return await self._start(action)
            case act.Tell():
                known = self._state().identities
                text = named(action.reason, lambda uid: known[uid].name if uid in known else None)
                problem = await self._terminals.tell(action.uid, action.pid, action.start, text, files=action.files)
                return problem is None, problem or ""
            case act.RunHook():
                ended = await run_hook(action.program, action.subject, deadline=action.deadline)
                said = ended.problem or ended.err or ended.out
                return ended.code == 0, " ".join(said.split())[:300]
        return False, f"the agent does not know how to do {type(action).__name__}"

    # --- by the front-end ---------------------------------------------------------------------------------------------

    async def _ask(
        self,
        batch: list[str],
        *,
        deadline: float | None = None,
        urgent: bool = False,
        may_block: bool = False,
        patient: bool = True,
    ) -> Reply:
        """Open a session with the control daemon, and keep account of its answers. ``may_block``: a command that is
        known to make it wait does not count there. ``patient``: when turned away, try again for a moment."""
        asked = self._clock.now()
        limit = self._state().policy.hang_control if deadline is None else deadline
        reply, pause = await self._front_end.run(batch, deadline=limit, urgent=urgent), BUSY_FIRST
        while patient and reply.status is AnswerStatus.BUSY and self._clock.now() < asked + BUSY_MOST:
            await asyncio.sleep(pause)
            reply, pause = await self._front_end.run(batch, deadline=limit, urgent=urgent), 2 * pause
        control = self._state().control
        # Its process lives, and its socket has gone from the hidden directory: no client and no front-end can reach it.
        lost = reply.status is AnswerStatus.NO_DAEMON and control is not None and control.quitting is None
        if lost or (reply.status is AnswerStatus.SILENT and not may_block):
            # on a busy machine the question itself may be late, and others be answered meanwhile
            self._silence(max(asked, self._heard), True)
        elif reply.status in (AnswerStatus.ANSWERED, AnswerStatus.BUSY, AnswerStatus.NO_DAEMON):
            self._silence(self._clock.now(), False)
        if reply.status is AnswerStatus.FAILED:
            self.front_end_problem = " ".join(reply.err.split())[:300]
        elif reply.status is not AnswerStatus.REFUSED_QUEUE:
            self.front_end_problem = None
        return reply

    def _silence(self, at: float, silent: bool) -> None:
        if silent or self._state().silent_since is not None:
            self._tell([inp.DaemonSilent(at, silent)])

    def heard(self, at: float) -> None:
        """The control daemon has written to its log: it is not silent. A name in it can forge a line's time."""
        self._heard = min(at, self._clock.now())
        since = self._state().silent_since
        if since is not None and at > since:
            self._silence(at, False)

    async def listen(self) -> None:
        """Send a cheap question while the daemon is silent: its answer is the end of the silence."""
        await self._ask(commands.server_list(), deadline=SHORT, patient=False)

    @property
    def busy(self) -> bool:
        return self._front_end.busy

    async def _terminate(self, action: act.TerminateClient) -> tuple[bool, str, bool]:
        """Return whether MPS has ended the client, its answer, and whether the client's files of the GPU are held. A
        stopped client is resumed first: it cannot answer, the daemon would wait for it, and ending it unanswered is a
        fault for its neighbours (conformance scenario X13)."""
        held = self._clients.get(action.pid, action.start)
        if held is None:
            return False, f"client {action.pid} has already ended", False
        hold, unheld = None, ""
        if action.protect:
            try:
                hold = self._gpu_files.hold(held, action.deadline + SETTLE)
            except OSError as error:
                unheld = f"; its files of the GPU cannot be held: {error.strerror}"
        batch = commands.terminate_client(action.server, action.pid)
        asking = asyncio.ensure_future(self._ask(batch, deadline=action.deadline, may_block=True))
        try:
            while not asking.done():  # again and again: it may stop, or be stopped, after the first look
                if held.stopped():
                    held.send(signal.SIGCONT)
                await asyncio.wait({asking}, timeout=RESUME_EVERY)
        finally:
            asking.cancel()
            if hold is not None:
                hold.end_after(SETTLE)
        reply = asking.result()
        if not reply.ok:
            return False, _why(reply) + unheld, hold is not None
        refusal = commands.not_terminated(reply.out)
        return refusal is None, (refusal or "client termination succeeded") + unheld, hold is not None

    async def _quit(self, action: act.QuitControl) -> tuple[bool, str]:
        deadline = action.timeout + self._state().policy.hang_control
        reply = await self._ask(commands.quit_command(action.timeout), deadline=deadline, may_block=True)
        return _taken(reply)

    async def _reconcile(self, action: act.Reconcile) -> tuple[bool, str]:
        before = frozenset(self._state().servers)
        reply = await self._ask(commands.server_list())
        control = self._state().control
        if reply.status is AnswerStatus.NO_DAEMON and (control is None or control.quitting is not None):
            return True, ""  # it has ended, as it was asked to: a successful restart is not a failure
        if not reply.ok:
            return False, _why(reply)
        listed, now = commands.pids(reply.out), self._clock.now()
        # Only what was so before and after the question: a server may come or go while it is asked.
        known = before & self._state().servers.keys()
        servers = {pid: uid for pid in listed if (uid := _owner(pid)) is not None}
        found: list[inp.Input] = [inp.ServersListed(now, servers, known)]
        fresh = [pid for pid in servers if pid not in before]
        for pid in (*action.servers, *fresh):
            found += await self._examine(pid)
        self._tell(found)
        return True, ""

    def _look(self, pid: int) -> inp.Seen | None:
        process = Process.open(pid)
        if process is None:
            return None
        process.close()
        at_boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        born = at_boot + process.started / TICKS + self._clock.shift()  # as the log would have it; not too late
        return inp.Seen(self._clock.now(), process.uid, process.started, born)

    async def _examine(self, server: int) -> list[inp.Input]:
        """A server's status and clients. (`ps` is never asked: it prints other people's command names into control.log;
        conformance scenario X2.)"""
        asked = self._clock.now()
        reply = await self._ask([*commands.server_status(server), *commands.client_list(server)])
        if not reply.ok or commands.refusal(reply.out) is not None:
            return []
        status, _, rest = reply.out.partition("\n")
        found: list[inp.Input] = []
        word = commands.parse_status(status)
        if word is not None:
            found.append(inp.ServerStatusSeen(asked, server, word))
        pids = frozenset(commands.pids(rest))
        others = pids - self._state().clients.keys()
        seen = {pid: one for pid in others if (one := self._look(pid)) is not None}
        found.append(inp.ClientsListed(asked, server, pids, seen))
        return found

    # --- by signals ---------------------------------------------------------------------------------------------------

    def _signal(self, action: act.SignalClient | act.WarnClient) -> tuple[bool, str]:
        """Send a signal to a process that passed the gate, by the pidfd that was taken there, and to no other. A
        warning would end a process that does not handle it, in the middle of its work."""
        held = self._clients.get(action.pid, action.start)
        if held is None:
            return False, f"client {action.pid} has already ended"
        if held.uid != action.uid:
            return False, f"client {action.pid} is of user {held.uid}, not of {action.uid}: nothing was sent"
        if isinstance(action, act.WarnClient) and not held.handles(action.signal):
            return True, f"nothing was sent: the program does not handle {signal.Signals(action.signal).name}"
        problem = held.send(action.signal)
        if problem is not None and held.is_anothers():
            # its CUDA context went with the program that it was: it must not keep its place for as long as it likes
            self._gate.send(link.Release(action.pid, action.start))
            self._clients.lose(held, lives=True)
        return problem is None, problem or ""

    async def _freeze(self, action: act.Freeze | act.Thaw) -> tuple[bool, str]:
        held = self._clients.get(action.pid, action.start)
        if held is None:
            return False, f"client {action.pid} has already ended"
        problem = await self._freezer.freeze(held) if isinstance(action, act.Freeze) else self._freezer.thaw(held)
        return problem is None, problem or ""

    def _to_ours(self, pid: int, number: signal.Signals) -> tuple[bool, str]:
        """To our control daemon or one of its children. A server's pid is from a log, so the kernel is asked whose
        child it is; while the pidfd is held, the number in /proc is this very process's."""
        running = self._supervisor.running
        if running is None:
            return False, "no control daemon is running"
        if pid == running.pid:
            problem = running.process.send(number)
            return problem is None, problem or ""
        process = Process.open(pid)
        if process is None:
            return False, f"process {pid} has already ended"
        try:
            if parent(pid) != running.pid:
                return False, f"process {pid} is no child of the control daemon: nothing was sent"
            problem = process.send(number)
            return problem is None, problem or ""
        finally:
            process.close()

    # --- the control daemon -------------------------------------------------------------------------------------------

    async def _start(self, action: act.StartControl) -> tuple[bool, str]:
        """A daemon of ours that runs already is taken over; otherwise a new one in the hidden directory, with the
        fail-safe percentage from its first moment (recording 07)."""
        found, asked = await self._supervisor.adopt(), None
        if not isinstance(found, Running):
            asked, self.multiuser_problem = action.multiuser, None
            if found.kind is ProblemKind.UNSAFE:
                return self._not_started(" ".join([found.text, *found.commands]))
            try:
                directories.prepare_hidden(self._where)
                directories.prepare_log(self._where.log)
            except (directories.DirectoryRefused, OSError) as error:
                return self._not_started(str(error))
            policy = self._state().policy
            environment = mps_environment(policy, self._where)
            found = await self._supervisor.start(environment, action.threads, multiuser=action.multiuser)
            if not isinstance(found, Running) and found.kind is ProblemKind.UNSUPPORTED:
                if policy.sharing == "one-server":
                    return self._not_started(f'{found.text}, so sharing = "one-server" is not possible')
                self.multiuser_problem = found.text
                found = await self._supervisor.start(environment, action.threads)
        if not isinstance(found, Running):
            return self._not_started(" ".join([found.text, *found.commands]))
        self.start_problem = None
        self._tell([control_runs(found, self._where, self._clock.now())._replace(asked=asked)])
        return True, f"control daemon {found.pid} runs ({found.how})"

    def _not_started(self, why: str) -> tuple[bool, str]:
        self.start_problem = why
        return False, why


def control_runs(found: Running, where: directories.Directories, now: float) -> inp.ControlRuns:
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - found.process.started / TICKS
    started = min(now, now - age - 1.0)  # a second early rather than late
    return inp.ControlRuns(now, found.pid, started, f"{where.hidden}/control", found.multiuser)


def mps_environment(policy: Policy, where: directories.Directories) -> dict[str, str]:
    """Return the environment of the control daemon and its front-end. The time zone is UTC: the log has no sign of its
    zone, and an hour that comes twice in autumn would be read wrong."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LD_LIBRARY_PATH", "HOME", "LANG") or name.startswith("MPSSIM_")
    }
    found["TZ"] = "UTC"
    found["CUDA_MPS_PROTOCOL_VERSION"] = "2"  # from driver 615 on there is another one, in which the gate cannot speak
    found["CUDA_MPS_PIPE_DIRECTORY"] = where.hidden
    found["CUDA_MPS_LOG_DIRECTORY"] = where.log
    if policy.compute_mode != "unchanged":
        found["MPSAGENT_COMPUTE_MODE"] = policy.compute_mode  # for the unit, see mpsagent-control@.service
    if policy.devices:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(policy.devices)
    return found


def _why(reply: Reply) -> str:
    return f"{reply.status}: {reply.err.strip()[:300]}" if reply.err.strip() else str(reply.status)


def _taken(reply: Reply) -> tuple[bool, str]:
    """A command that answers nothing when all is well; refusals come as text, with exit status 0."""
    if not reply.ok:
        return False, _why(reply)
    refusal = commands.refusal(reply.out)
    return refusal is None, refusal or ""


def _owner(pid: int) -> int | None:
    """The user of a server that MPS lists: servers run as their user."""
    return next(iter(ids(pid, b"Uid:")[1:]), None)
