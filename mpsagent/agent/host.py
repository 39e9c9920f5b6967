"""The agent: what the logs, the gate, the kernel and people say goes into the engine, and its actions are carried out.

One asyncio loop, one thread. What may block for long sits in threads or processes of :mod:`mpsagent.system`. What the
gate needs to know is said at once: clients wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC
from pathlib import Path
from typing import Any

from mpsagent.agent import gpus, policies, saved
from mpsagent.agent.bypass import Bypass, Inside
from mpsagent.agent.catch_up import Caught, catch_up, child_of, foreign
from mpsagent.agent.clients import Clients
from mpsagent.agent.clock import SteadyClock, until_next
from mpsagent.agent.conditions import note_conditions
from mpsagent.agent.executor import Executor, control_runs, mps_environment
from mpsagent.agent.gate_side import GateSide
from mpsagent.agent.journaling import Telling
from mpsagent.agent.lifted_limits import Lifted
from mpsagent.agent.log_side import LogSide
from mpsagent.agent.observer import Observer
from mpsagent.agent.page import Showing
from mpsagent.agent.people import People
from mpsagent.agent.recorder import FORGET, Recorder, log
from mpsagent.agent.records import UNSERVED_A_MINUTE, Worth, action_record
from mpsagent.agent.settings import Settings
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import use
from mpsagent.core.engine import Core, Step
from mpsagent.core.model import Held, State
from mpsagent.core.transitions import (
    ClientConnected,
    ClientEnded,
    ClientWaiting,
    Transition,
    UserPaused,
    UserResumed,
    transition_fields,
)
from mpsagent.core.view import View
from mpsagent.mps.events import Line
from mpsagent.mps.limits import Device
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.policy import Policy
from mpsagent.system import control_search, directories, lock
from mpsagent.system.control import ControlSupervisor, ProblemKind, Running
from mpsagent.system.frontend import FrontEnd
from mpsagent.system.gate_link import GateLink
from mpsagent.system.logfiles import Position
from mpsagent.system.names import Names
from mpsagent.system.store import Part, Store
from mpsagent.system.terminal import Terminals
from mpsagent.wire.link import Admissions

TICK = 1.0
"""Seconds between two looks of the observer."""
STOOD = 2.5
"""Seconds without a decision after which the agent has stood still: it is stopped, or its machine was."""
MOST_PENDING = 256
"""Actions under way at most; more than that are a fault of ours, and said to be one."""
GPU_WAIT = 3.0
"""Seconds for which the start waits for the GPUs to be known when no agent has found them before."""
GPU_AGAIN = 30.0
"""Seconds until a driver that does not answer is asked again."""
MakeSupervisor = Callable[[Policy, directories.Directories, Callable[[int], None]], ControlSupervisor]


class Agent(Recorder):
    """One instance of MPS under one policy. Everything public here is for the api and orders; times are of ``clock``.

    ``link`` leads to the gate, and is that of all instances. ``inside`` says what is inside MPS, of all instances.
    It looks after its GPUs, too; of a user apart the section's instance does. ``named`` says whether records say which
    instance they are about. ``since``: who came before that an agent before has told of;
    None: there was none. ``decided`` is called after each of its decisions, ``found`` with the GPUs when they are
    known."""

    def __init__(
        self,
        policy: Policy,
        *,
        settings: Settings,
        shown: Showing,
        telling: Telling,
        clock: SteadyClock,
        store: Store | Part,
        names: Names,
        link: GateLink,
        seen: gpus.Gpus,
        make_supervisor: MakeSupervisor,
        since: float | None,
        named: Callable[[], bool],
        inside: Callable[[], Collection[Inside]],
        decided: Callable[[Agent], None],
        found: Callable[[Agent, tuple[Device, ...]], None],
    ) -> None:
        super().__init__(shown, telling, clock)
        self.name = policy.instance
        self.settings = settings
        self.store = store
        self.names = names
        self.core = Core()
        self.up_since: float | None = None
        """Since when the control daemon runs."""
        self.ready = False
        self.stopping = False
        machine = self._machine = policy.user is None
        self._since = since
        self._named, self._decided, self._found = named, decided, found
        self.where = directories.directories(
            policy.instance, policy.pipe_directory, policy.log_directory, settings.run_directory
        )
        self.people = People(names, self._soon)
        self.clients = Clients(self._client_ended)
        self._front_end = FrontEnd(policy.control_program, mps_environment(policy, self.where))
        self.supervisor = make_supervisor(policy, self.where, self._control_gone)
        self.executor = Executor(
            self.where, self._front_end, self.supervisor, link, self.clients, clock, self.take,
            lambda: self.core.state, Terminals(unit=settings.supervise == "systemd"),
        )  # fmt: skip
        self.gate = GateSide(
            self.core, clock, self.clients, self.people, store, since, self.take
        )  # fmt: skip
        self.bypass = Bypass(self, lambda: self.core.state, names, inside, lambda: link.synced)
        lifted = Lifted(lambda: self.core.state, self.spawn)
        self.observer = Observer(
            self, self.core, self.clients, self.bypass, lifted, seen, inside, self.take, machine=machine
        )
        self.logs = LogSide(lambda: self.core.state, clock, self.conditions, self._logged, self.observer.other_daemon)
        self._held: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._decided_at = float("-inf")
        self._pending = 0
        self._worth = Worth()
        self.absorb([inp.PolicyChanged(clock.now(), policy)])

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def policy(self) -> Policy:
        return self.core.state.policy

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs, as far as they are known."""
        return gpus.known(self.state.devices)

    @property
    def socket_path(self) -> str:
        """Of the control daemon."""
        return f"{self.where.hidden}/control"

    @property
    def inside(self) -> Inside:
        """What is inside MPS by this instance."""
        running = self.supervisor.running
        return Inside(None if running is None else running.pid, self.state, self.clients)

    @property
    def at_rest(self) -> bool:
        """Nothing is under way, and no control daemon runs."""
        return self.ready and not self._pending and self.supervisor.running is None

    def name_of(self, uid: int) -> str | None:
        known = self.people.known.get(uid) or self.names.known(uid)
        return None if known is None else known.name

    def view(self) -> View:
        return self.core.view()

    def record(self, kind: str, at: float, **fields: object) -> int:
        return super().record(kind, at, **({"instance": self.name, **fields} if self._named() else fields))

    # --- start and stop -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take hold of the directories. Raises AlreadyLocked when another agent has."""
        self._lock()
        self.executor.freezer.thaw_all()  # of an agent that was killed: the turns freeze again who is paused
        known = gpus.remembered(self.settings, self.policy.devices)
        self.absorb([inp.DevicesFound(self.clock.now(), known or gpus.UNKNOWN)])

    async def begin(self, earlier: dict[str, Any] | None) -> None:
        """Take over or start, read the logs, go to work. ``earlier``: what the agent before has kept of this instance;
        None: there was none. Raises OSError where the directories are of no use."""
        self.gate.take_up(earlier)
        earlier = earlier or {}
        looking = self.spawn(self._find_devices()) if self._machine else None
        await self._adopt()
        for name, (position, parser) in (await self._read_logs()).items():
            await self.logs.follow(name, position, parser)
        self.absorb([*saved.drain(earlier, self.clock.now()), *saved.leases(earlier, self.clock.now())])
        self._forget_drain()
        if looking is not None and not self.devices:
            await asyncio.wait({looking}, timeout=GPU_WAIT)
        self.ready = True
        came: dict[tuple[int, int], Held] = {}
        for held in self.state.held.values():  # while it was being made, as for a user apart who is the first
            came.setdefault(held.process, held)
        for process, held in came.items():
            if not held.of_client:
                waiting = ClientWaiting(held.since, process[0], held.uid, held.connection)
                self.write_down(waiting, self.clock.now())
        self.spawn(self._tick())
        self.observer.survey()
        self._decide()

    async def _adopt(self) -> None:
        """Take over our own control daemon that runs already, and name the daemons of others."""
        await self._end_orphans()
        found = await self.supervisor.adopt()
        now = self.clock.now()
        if isinstance(found, Running):
            self.up_since = now
            self.absorb([control_runs(found, self.where, now)])
            self.record("control.adopted", now, pid=found.pid, how=found.how)
            what = _differs(found, self.where.log, self.policy.devices)
            self.conditions.set("adopted", what, now, "when no client works: mpsagent-cli restart")
        elif found.kind is ProblemKind.UNSAFE:
            self.conditions.set("control daemon", found.text, now, do=" && ".join(found.commands))
            self.record("control.unsafe", now, text=found.text, commands=list(found.commands))

    async def _end_orphans(self) -> None:
        for pid in await control_search.end_orphans(self.where.hidden, self.policy.control_program):
            log.warning("server", text=f"server {pid} has outlived its control daemon: killed")

    async def _read_logs(self) -> dict[str, tuple[Position | None, LogParser]]:
        """The state from the logs, and what happened while no agent was there. Returns, for each log, how far it has
        been read and by which parser."""
        paths = f"{self.where.log}/control.log", f"{self.where.log}/server.log"
        control, server = LogParser("control", UTC), LogParser("server", UTC)
        running = self.supervisor.running
        if running is None:
            caught = Caught([], _end(paths[0]), _end(paths[1]))
        else:
            control.daemon = running.pid
            control.ours = server.ours = child_of(control.daemon)
            caught = await asyncio.to_thread(catch_up, *paths, control, server, self.socket_path)
            if caught.passed_over:
                text = f"{caught.passed_over} bytes of the logs were not read: rotate them (logrotate)"
                log.warning("logs", text=text)
            now = self.clock.now()  # lines from before the wall clock was set back are of the future
            happened = self.absorb([one if one.at <= now else one._replace(at=now) for one in caught.events])
            if self._since is not None:
                self.shown.found(self.name, happened)
        return {"server": (caught.server, server), "control": (caught.control, control)}

    async def _find_devices(self) -> None:
        """Ask for the GPUs, again and again until there is an answer."""
        while not self.stopping:
            visible = self.policy.devices
            found = await gpus.find(self.settings, mps_environment(self.policy, self.where), visible)
            now = self.clock.now()
            if not isinstance(found, str):
                self.conditions.set("devices", None, now)
                gpus.remember(self.settings, visible, found)
                self._found(self, found)
                return
            lesser = "those found last are taken" if self.devices else "clients get less than their policy until then"
            do = f"see nvidia-smi; memory limits and multiprocessors are counted by the GPUs, {lesser}"
            self.conditions.set("devices", found, now, do)
            await asyncio.sleep(GPU_AGAIN)

    def _lock(self) -> None:
        """One agent looks after an instance."""
        try:
            directories.prepare_hidden(self.where)
        except (directories.DirectoryRefused, OSError) as error:
            self.conditions.set("directories", str(error), self.clock.now())
            return
        self._held = lock.take(f"{self.where.home}/agent.lock", f"the control daemon of {self.policy.pipe_directory}")

    async def end(self) -> None:
        """Let go of everything. MPS and the gate run on, unless the policy says otherwise (``agent.on_stop``)."""
        if self.ready and self.policy.on_stop == "quit" and self.supervisor.running is not None:
            timeout = max(1, round(self.policy.stop_timeout))
            quit_it = act.QuitControl(timeout=timeout, reason="the agent is being stopped", rule="agent.on_stop")
            done = await self.executor.perform(quit_it)
            self.record("control.quit", done.at, ok=done.ok, text=done.text)
        for one in use.owed(self.state, self.clock.now()):
            self.record(one.kind, one.at, **transition_fields(one))
        self.stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.logs.close()
        self.executor.freezer.thaw_all()
        self.clients.close()
        self.people.close()
        self.bypass.close()
        self.supervisor.close()
        self._front_end.close()
        if self._held is not None:
            os.close(self._held)

    def use_policy(self, policy: Policy | None) -> str | None:
        """Another policy; None: it has this instance no more. What of it has to wait until the agent is started
        again, in words."""
        if policy is None:
            return f"{self.name} goes on as it is"
        policy, left = policies.keep_fixed(self.policy, policy)
        self.people.refresh()
        self.take([inp.PolicyChanged(self.clock.now(), policy)])
        self.observer.survey()
        return left

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _client_ended(self, pid: int, start: int) -> None:
        self.executor.freezer.forget(pid, start)
        self.gate.process_ended(pid, start)

    def _control_gone(self, pid: int) -> None:
        now = self.clock.now()
        self.up_since = None
        self.spawn(self._end_orphans())
        self.conditions.set("adopted", None, now)
        self.take([inp.ControlGone(now, pid)])
        self._forget_drain()

    def _forget_drain(self) -> None:
        """One for a restart ends with the control daemon."""
        if self.state.drain is None and self.store.get("drain") is not None:
            self.store.put("drain", None)

    def _logged(self, name: str, events: list[Line]) -> None:
        """A log says this."""
        if name == "control" and events:
            self.executor.heard(events[-1].at)
        self.take([event for event in events if not foreign(event, self.socket_path)])

    async def _tick(self) -> None:
        while not self.stopping:
            await asyncio.sleep(until_next(TICK))
            try:
                self.take(self.observer.once(self.logs.followers.values(), self.up_since))
                if self.state.lane.silent_since is not None and not self.executor.busy:
                    self.spawn(self.executor.listen())
                self._note_conditions()
            except Exception as error:
                self.failed("looking around failed", error)

    # --- deciding -----------------------------------------------------------------------------------------------------

    def absorb(self, events: Sequence[inp.Input]) -> list[Transition]:
        """Take in what happened before this agent was at work: no decision, no record."""
        return self.core.absorb(events)

    def take(self, events: Sequence[inp.Input | act.Done]) -> None:
        """Whatever goes wrong here, it is tried again: an agent that no longer decides protects no one."""
        if self.stopping:
            return
        if not self.ready:
            self.core.absorb([event for event in events if not isinstance(event, act.Done)])
            return
        now = self.clock.now()
        try:
            self._carry_out(self.core.receive_all([*self._seen_again(now), *events], now), now)
            self.shown.changed()
        except Exception as error:
            self.failed("deciding failed", error)
            self._wake_at(now + TICK)

    def _soon(self) -> None:
        """A name has become known."""
        if self.ready and not self.stopping and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._people_known)

    def _people_known(self) -> None:
        self._scheduled = False
        self.take([inp.PeopleKnown(self.clock.now(), self.people.known)])

    def _decide(self) -> None:
        now = self.clock.now()
        try:
            seen = self._seen_again(now)
            self._carry_out(self.core.receive_all(seen, now) if seen else self.core.tick(now), now)
            self.shown.changed()
        except Exception as error:
            self.failed("deciding failed", error)
            self._wake_at(now + TICK)

    def _seen_again(self, now: float) -> list[inp.Input]:
        """Who was seen stopped before the agent stood still may go on now."""
        stood, self._decided_at = now > self._decided_at + STOOD, now
        return [self.observer.processes(now)] if stood else []

    def _carry_out(self, step: Step, now: float) -> None:
        """The gate first: it is told at once. What came of it is on record as transitions."""
        for rule, error in step.mistakes:
            self.failed(f"{rule} failed, everything else goes on", error)
        outcomes: list[act.Done] = []
        for action in step.actions:
            if isinstance(action, act.TellGate):
                done = self.executor.tell_gate(action)
                if not (done.ok and isinstance(action.message, Admissions)):
                    outcomes.append(done)
            else:
                self._dispatch(action, now)
        for one in step.transitions:
            self.write_down(one, now)
        if any(isinstance(one, ClientConnected | ClientEnded | UserPaused | UserResumed) for one in step.transitions):
            self.observer.look_at_work()
        uids = dict.fromkeys((*self.state.held.users(), *self.state.users()))  # who came first is asked about first
        if self.people.meet(uids):
            self._soon()
        self.people.keep(uids)
        self._decided(self)
        self.gate.keep()
        deadline = self.core.deadline()
        self._wake_at(deadline)
        if outcomes:
            asyncio.get_running_loop().call_soon(self.take, outcomes)

    def _wake_at(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None and not self.stopping:
            delay = max(0.0, deadline - self.clock.now()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self._decide)

    def _dispatch(self, action: act.Action, now: float) -> None:
        if isinstance(action, act.Report):
            if self._worth_it(action, now):
                self.record(action.kind, now, **action_record(action, self.policy))
            return
        if self._pending >= MOST_PENDING:
            what = f"{MOST_PENDING} actions are under way; {type(action).__name__} was dropped"
            self.conditions.set("actions", what, now, "please report it with the journal", until=now + FORGET)
            done = act.Done(now, action, False, "too many actions are under way")
            asyncio.get_running_loop().call_soon(self.take, [done])
            return
        self._pending += 1
        self.spawn(self._perform(action))

    async def _perform(self, action: act.Action) -> None:
        fields = action_record(action, self.policy)
        # Who is paused is on record as a user; 48 processes each 20 s would wash everything else away.
        quiet = isinstance(action, act.Freeze | act.Thaw)
        number = 0
        if not quiet:
            number = self.record("action", self.clock.now(), action=type(action).__name__, **fields)
        try:
            done = await self.executor.perform(action)
        finally:
            self._pending -= 1
        kind = "action.done" if done.ok else "action.failed"
        if not (quiet and done.ok):
            self.record(kind, done.at, action=type(action).__name__, begun=number, ok=done.ok, text=done.text, **fields)
        if isinstance(action, act.StartControl) and done.ok:
            self.conditions.set("adopted", None, done.at)
            self.up_since = done.at
        self.take([done])
        self._note_conditions()

    def _note_conditions(self) -> None:
        now, executor = self.clock.now(), self.executor
        self.conditions.set("front-end", executor.front_end_problem, now, "is the NVIDIA driver installed?")
        self.conditions.set("control daemon", executor.start_problem, now, "see mpsagent-cli events")
        problem = executor.multiuser_problem
        what = None if problem is None else f"{problem}, so each turn has a server of its own"
        self.conditions.set("shared server", what, now, 'set server = "own" in [instance.NAME]')
        note_conditions(self.conditions, self.core, now)
        self.conditions.set("store", self.store.problem, now, "a drain and who is being ended do not outlive the agent")

    # --- on record ---

    def write_down(self, one: Transition, now: float) -> None:
        if isinstance(one, ClientWaiting) and not self.gate.is_new(one):
            return  # the api knows whether an earlier agent has written it down
        if self._worth_it(one, now):
            self.record(one.kind, one.at, **transition_fields(one))

    def _worth_it(self, one: Transition | act.Report, now: float) -> bool:
        if self._worth.may(one, now):
            return True
        if (uid := self._worth.flood(one, now)) is not None:
            self.record("user.flood", now, uid=uid, most=UNSERVED_A_MINUTE)
        return False


def _differs(found: Running, log_directory: str, devices: Sequence[str]) -> str | None:
    """What of the policy's instance the daemon was not started with: it takes hold when that is started again."""
    wrong = []
    if os.path.realpath(found.log_directory) != os.path.realpath(log_directory):
        wrong.append(f"writes its logs to {found.log_directory}, not to {log_directory}, so faults are not seen")
    if (found.devices or "") != ",".join(devices):
        meant = ", ".join(devices) or "all GPUs"
        wrong.append(f"serves {found.devices or 'all GPUs'}, and the policy says {meant}")
    return f"control daemon {found.pid}, which runs already, {'; it '.join(wrong)}" if wrong else None


def _end(path: str) -> Position | None:
    """Where a log ends now: no daemon runs, so what it says is over."""
    with suppress(OSError):
        status = Path(path).stat()
        return Position(status.st_ino, status.st_size)
    return None
