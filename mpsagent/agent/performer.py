"""Carries actions out with the hands and says how each ended. It decides nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mpsagent.agent.adoption import Claim, take_over
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.senses import Processes
from mpsagent.core import actions as act
from mpsagent.mps import commands as replies
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy.policy import Policy
from mpsagent.system import pipedir
from mpsagent.system.connections import peer_of
from mpsagent.system.control import ControlSupervisor, Running, TroubleKind
from mpsagent.system.floor_file import FloorFile
from mpsagent.system.frontend import FrontEnd, Reply, Status
from mpsagent.system.hooks import run_hook
from mpsagent.system.last_will import LastWill
from mpsagent.system.other_front_ends import other_front_ends
from mpsagent.system.processes import Process, parent, start_time
from mpsagent.system.spawn import find_program
from mpsagent.system.threads import in_thread

RESUME_EVERY = 0.1
"""Seconds between two looks whether a client that is asked to end is stopped."""
BUSY_FIRST, BUSY_MOST = 0.002, 0.5
"""Seconds until a command that was turned away is sent again, doubling, and until it is given up."""
SHORT = 2.0
"""Seconds for a question that is only asked to hear whether the daemon answers again."""


class TurnedAway(Exception):
    """The control daemon listens to another front-end, or to nobody because of a ``quit``."""


class Performer:
    """One instance's hands. ``tell(events)`` takes facts that an answer brought; ``policy`` may be replaced."""

    def __init__(
        self,
        policy: Policy,
        front_end: FrontEnd,
        supervisor: ControlSupervisor,
        processes: Processes,
        clock: SteadyClock,
        claim: Claim,
        tell: Callable[[list[ev.Event]], None],
        floor_file: FloorFile | None = None,
    ) -> None:
        self.policy = policy
        self.devices: tuple[Device, ...] = ()
        self.floor = Limits()
        self.known_servers: Callable[[], Mapping[int, int | None]] = dict
        self.known_clients: Callable[[int], Iterable[int]] = lambda server: ()
        self.silent_since: float | None = None
        self.front_end_trouble: str | None = None
        self.turned_away_since: float | None = None
        self.left_open: str | None = None
        """Why we are turned away, once that has lasted."""
        self._cut_off = False
        """The run of the front-end that is under way may be cut off, with some of its commands heard."""
        self._front_end = front_end
        self._will = LastWill(front_end.environment)
        self._floor_file = floor_file
        self._supervisor = supervisor
        self._processes = processes
        self._clock = clock
        self.claim = claim
        self._tell = tell

    def heard(self, at: float) -> None:
        """The control daemon has written to its log: it is not silent."""
        if self.silent_since is not None and at > self.silent_since:
            self.silent_since = None

    async def perform(self, action: act.Action) -> act.Outcome:
        """Do it, and say how it went. Never raises."""
        if not action.enforce:
            return self._outcome(action, True, "not enforced: only reported")
        try:
            ok, text = await self._do(action)
        except TurnedAway as away:
            return act.Outcome(self._clock.now(), action, False, str(away), heard=False)
        except Exception as error:
            ok, text = False, f"{type(error).__name__}: {error}"
        return self._outcome(action, ok, text)

    def _outcome(self, action: act.Action, ok: bool, text: str) -> act.Outcome:
        return act.Outcome(self._clock.now(), action, ok, text)

    async def _do(self, action: act.Action) -> tuple[bool, str]:
        match action:
            case act.Report():
                return True, ""
            case act.SetDefaults():
                return await self._set_defaults(action)
            case act.SetServerLimits():
                return await self._set_server_limits(action)
            case act.StartServer():
                return _taken(await self._ask(replies.start_server(action.uid)))
            case act.ShutdownServer():
                return _taken(await self._ask(replies.shutdown_server(action.server, action.force), urgent=True))
            case act.TerminateClient():
                return await self._terminate(action)
            case act.QuitControl():
                return await self._quit(action)
            case act.Reconcile():
                return await self._reconcile(action)
            case act.SignalClient():
                return self._signal(action)
            case act.Resume():
                return self._to_ours(action.pid, signal.SIGCONT)
            case act.KillServer():
                problem = self._would_hurt(action.server) if action.before_ready else None
                return (False, problem) if problem else self._to_ours(action.server, signal.SIGKILL)
            case act.KillControl():
                problem = self._supervisor.kill()
                return problem is None, problem or ""
            case act.StartControl():
                return await self._start()
            case act.OpenDoor():
                pipedir.open_door(self.policy.pipe_directory)
                return True, ""
            case act.RunHook():
                ended = await run_hook(action.program, action.subject, deadline=action.deadline)
                said = ended.problem or ended.err or ended.out
                return ended.code == 0, " ".join(said.split())[:300]
        return False, f"nobody knows how to do {type(action).__name__}"

    # --- by the front-end ---------------------------------------------------------------------------------------------

    async def _ask(
        self,
        commands: list[str],
        *,
        deadline: float | None = None,
        urgent: bool = False,
        may_block: bool = False,
        patient: bool = True,
    ) -> Reply:
        """One run of the front-end; keeps account of whether the daemon answers. ``may_block``: a command that is known
        to make it wait says nothing about that. ``patient``: when turned away, try again for a moment."""
        asked = self._clock.now()
        limit = self.policy.hang_control if deadline is None else deadline
        reply, pause = await self._run(commands, limit, urgent), BUSY_FIRST
        while patient and reply.status is Status.BUSY and self._clock.now() < asked + BUSY_MOST:
            await asyncio.sleep(pause)
            reply, pause = await self._run(commands, limit, urgent), 2 * pause
        if reply.status is Status.SILENT and not may_block:
            self.silent_since = asked if self.silent_since is None else self.silent_since
        elif reply.status in (Status.ANSWERED, Status.BUSY, Status.NO_DAEMON):
            self.silent_since = None
        if reply.status in (Status.MISSING, Status.FAILED):
            said, program = " ".join(reply.err.split())[:300] or str(reply.status), self.policy.control_program
            self.front_end_trouble = said if program in said else f"{program}: {said}"
        elif reply.status is not Status.REFUSED_QUEUE:
            self.front_end_trouble = None
        if reply.status is not Status.BUSY:
            self.turned_away_since = self.left_open = None
        elif self.turned_away_since is None:
            self.turned_away_since = asked
        return reply

    async def _run(self, commands: list[str], deadline: float, urgent: bool) -> Reply:
        """One run, and whether it was heard at all."""
        last = commands[0].startswith("quit")  # it hears nothing more
        sent = commands if last else [*commands, replies.PROOF]
        reply = await self._front_end.run(sent, deadline=deadline, urgent=urgent)
        if not reply.ok or last:
            return reply
        answers = replies.proven(reply.out)
        if answers is not None:
            return reply._replace(out=answers)
        if not reply.out.strip():
            return reply._replace(status=Status.BUSY)
        return reply._replace(status=Status.FAILED, err=f"it printed what is no answer: {reply.out[:100]!a}")

    async def see_who_is_there(self) -> None:
        """Once we have been turned away for a while: why, for a person."""
        since = self.turned_away_since
        if since is None or self._clock.now() < since + BUSY_MOST:
            return
        try:
            found = await in_thread(other_front_ends, self.policy.control_program, deadline=SHORT)
        except (OSError, TimeoutError):
            found = []
        if self.turned_away_since is not None:
            what = "the control daemon takes no command: a `quit` waits for clients, or a front-end is left open"
            who = ", ".join(f"process {pid} of user {uid}" for pid, uid in found)
            self.left_open = f"{what}: {who}" if who else what

    def keep_will(self, enforced: bool) -> str | None:
        """What becomes of the defaults when the agent dies: the floor. None, or what is wrong. The helper is the first
        to do it; systemd does it again when all of the agent's processes have ended, the helper among them."""
        ordinals = [device.ordinal for device in self.devices]
        commands = replies.set_defaults(self.floor, ordinals) if enforced else []
        if self._floor_file is not None:
            problem = self._floor_file.keep(self.policy.pipe_directory, commands)
            if problem is not None:
                return problem
        program = find_program(self.policy.control_program, self._front_end.environment)
        if program is None:  # the front-end's own trouble
            return None
        if self._will.write(program, commands):
            return None
        return "no helper process could be started to set the floor if the agent dies"

    def close(self) -> None:
        self._will.close()

    async def listen(self) -> None:
        """One cheap question while the daemon is silent or turns us away: its answer is the end of that."""
        await self._ask(replies.server_list(), deadline=SHORT, patient=False)

    async def _set_defaults(self, action: act.SetDefaults) -> tuple[bool, str]:
        ordinals = [device.ordinal for device in self.devices]
        reply = await self._ask(replies.set_defaults(action.limits, ordinals), urgent=True, patient=False)
        cut_off, self._cut_off = self._cut_off, False
        if reply.status is Status.BUSY and not cut_off:
            raise TurnedAway(_why(reply))  # what is wanted may be something else by now
        if not reply.ok:
            return False, _why(reply)
        problem = replies.check_defaults(action.limits, reply.out, ordinals)
        return problem is None, problem or f"confirmed in {reply.seconds * 1000:.1f} ms"

    async def _set_server_limits(self, action: act.SetServerLimits) -> tuple[bool, str]:
        ordinals = [device.ordinal for device in self.devices]
        reply = await self._ask(replies.set_server_limits(action.server, action.limits, ordinals))
        if not reply.ok:
            return False, _why(reply)
        problem = replies.check_server_limits(action.server, action.limits, reply.out, ordinals)
        return problem is None, problem or ""

    async def _terminate(self, action: act.TerminateClient) -> tuple[bool, str]:
        """A stopped client is resumed first: it cannot answer, the daemon would wait for it, and ending it unanswered
        is a fault for its neighbours (conformance scenario X13)."""
        commands = replies.terminate_client(action.server, action.pid)
        asking = asyncio.ensure_future(self._ask(commands, deadline=action.deadline, may_block=True))
        try:
            while not asking.done():  # again and again: it may stop, or be stopped, after the first look
                held = self._processes.get(action.pid)
                if held is not None and held.stopped():
                    held.send(signal.SIGCONT)
                await asyncio.wait({asking}, timeout=RESUME_EVERY)
        finally:
            asking.cancel()
        reply = asking.result()
        if not reply.ok:
            return False, _why(reply)
        refusal = replies.parse_terminate(reply.out)
        return refusal is None, refusal.text if refusal else "client termination succeeded"

    async def _quit(self, action: act.QuitControl) -> tuple[bool, str]:
        deadline = action.timeout + self.policy.hang_quit
        reply = await self._ask(replies.quit_command(action.timeout), deadline=deadline, may_block=True)
        return _taken(reply)

    async def _reconcile(self, action: act.Reconcile) -> tuple[bool, str]:
        commands = replies.server_list()
        before = self.known_servers()
        reply = await self._ask(commands, deadline=self.policy.hang_control)
        if not reply.ok:
            return False, _why(reply)
        now, listed = self._clock.now(), set(replies.parse_server_list(reply.out))
        facts: list[ev.Event] = []
        known = self.known_servers()
        # Only what was so before and after the question: a server may come or go while it is asked.
        for pid in set(before) & set(known) - listed:
            facts.append(ev.ServerExited(now, pid, -1))
        fresh = []
        for pid in sorted(listed - set(before) - set(known)):
            uid = _owner(pid)
            if uid is not None:
                facts += [ev.ServerStarting(now, pid, uid), ev.ServerReady(now, pid), *await self._limits_of(pid)]
                fresh.append(pid)
        for pid in (*action.servers, *fresh):
            facts += await self._examine(pid)
        if facts:
            self._tell(facts)
        changed = [fact for fact in facts if not isinstance(fact, ev.ServerStatusSeen)]
        return True, f"corrected: {changed}" if changed else ""

    async def _limits_of(self, server: int) -> list[ev.Event]:
        """The limits of a server whose log does not say them."""
        ordinals = [device.ordinal for device in self.devices]
        reply = await self._ask(replies.server_limits(server, ordinals))
        limits = replies.parse_limits(reply.out, ordinals) if reply.ok else None
        if limits is None:
            return []
        now = self._clock.now()
        memory = [ev.MemorySet(now, server, device, size) for device, size in limits.memory.items()]
        return [ev.ThreadsSet(now, server, limits.threads), *memory, ev.ServerStarted(now, server)]

    async def _examine(self, server: int) -> list[ev.Event]:
        """A server's status and clients, where MPS says otherwise than the logs did. (`ps` is never asked: it prints
        other people's command names into control.log; conformance scenario X2.)"""
        before = set(self.known_clients(server))
        reply = await self._ask([*replies.server_status(server), *replies.client_list(server)])
        if not reply.ok or replies.refusal(reply.out) is not None:
            return []
        now, (status, _, rest) = self._clock.now(), reply.out.partition("\n")
        facts: list[ev.Event] = []
        word = replies.parse_status(status)
        if word is not None:
            facts.append(ev.ServerStatusSeen(now, server, word))
        listed, known = set(replies.parse_client_list(rest)), set(self.known_clients(server))
        facts += [ev.ClientDisconnected(now, server, pid) for pid in before & known - listed]
        for pid in listed - before - known:
            uid = _owner(pid)
            if uid is not None:
                facts += [ev.ClientAdmitted(now, pid, uid), ev.ContextConnected(now, server, pid, 1)]
        return facts

    # --- by signals ---------------------------------------------------------------------------------------------------

    def _signal(self, action: act.SignalClient) -> tuple[bool, str]:
        held = self._processes.get(action.pid)
        if held is None:
            return False, f"process {action.pid} has already ended"
        if (held.uid, held.started) != (action.uid, action.start):
            return False, f"pid {action.pid} is another process now; nothing was sent"
        problem = held.send(action.signal)
        return problem is None, problem or ""

    def _would_hurt(self, server: int) -> str | None:
        """The control daemon has a fault: when a server ends that was never Ready, it closes its descriptor 0, which
        from the second time on may be anybody's connection (scenario X28). None, or whose it would be."""
        running = self._supervisor.running
        if running is None:
            return "no control daemon is running"
        try:
            peer = peer_of(running.pid, 0)
        except OSError as error:
            return f"whose connection the control daemon would close with it cannot be told: {error.strerror}"
        if peer and parent(peer) == os.getpid():  # our own front-end: what it was to set is set again
            self._cut_off = True
            return None
        whose = f"process {peer}" if peer else "a process in a pid namespace that cannot be seen from here"
        hurt = f"the control daemon would close the connection of {whose} with it"
        return None if peer in (None, server) else hurt

    def _to_ours(self, pid: int, number: signal.Signals) -> tuple[bool, str]:
        running = self._supervisor.running
        held = running.process if running is not None and running.pid == pid else self._processes.get(pid)
        own = None if held is not None else Process.open(pid)  # a server is held only when it has become its user
        try:
            if (held := held or own) is None:
                return False, f"process {pid} has already ended"
            # A server's pid is from control.log, where a hostile process name can put lines of its own (scenario X2).
            # While the pidfd is held, the number in /proc is this very process's.
            if running is None or (pid != running.pid and parent(pid) != running.pid):
                return False, f"process {pid} is no child of the control daemon: nothing was sent"
            problem = held.send(number)
            return problem is None, problem or ""
        finally:
            if own is not None:
                own.close()

    # --- the control daemon -------------------------------------------------------------------------------------------

    async def _start(self) -> tuple[bool, str]:
        """Directories, door shut, daemon with the floor's percentage from its first moment (recording 07). One that
        somebody has started meanwhile is taken over; the door of one that cannot be is not touched."""
        found = await take_over(self._supervisor, self.policy)
        if isinstance(found, Running):
            return True, f"control daemon {found.pid} runs already ({found.how}); taken over"
        if found.kind is TroubleKind.UNSAFE:
            return False, " ".join([found.text, *found.commands])
        directory = self.policy.pipe_directory
        pipedir.prepare(directory)
        self.claim.renew(directory)
        pipedir.prepare_log_directory(self.policy.log_directory)
        pipedir.shut_door(directory)
        started = await self._supervisor.start(mps_environment(self.policy), self.floor.threads)
        if not isinstance(started, Running):
            return False, " ".join([started.text, *started.commands])
        return True, f"control daemon {started.pid} runs"


def mps_environment(policy: Policy) -> dict[str, str]:
    """What the control daemon and its front-end get to see. The time zone is ours: its log has no other sign of it."""
    found = {
        name: value
        for name, value in os.environ.items()
        if name in ("PATH", "LD_LIBRARY_PATH", "TZ", "HOME", "LANG") or name.startswith("MPSSIM_")
    }
    found["CUDA_MPS_PIPE_DIRECTORY"] = policy.pipe_directory
    found["CUDA_MPS_LOG_DIRECTORY"] = policy.log_directory
    if policy.devices:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(policy.devices)
    return found


def _why(reply: Reply) -> str:
    return f"{reply.status}: {reply.err.strip()[:300]}" if reply.err.strip() else str(reply.status)


def _taken(reply: Reply) -> tuple[bool, str]:
    """A command that answers nothing when all is well; refusals come as text, with exit status 0."""
    if not reply.ok:
        return False, _why(reply)
    refusal = replies.refusal(reply.out)
    return refusal is None, refusal.text if refusal else ""


def _owner(pid: int) -> int | None:
    """The user of a server that MPS lists: servers run as their user."""
    if start_time(pid) is None:
        return None
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None
