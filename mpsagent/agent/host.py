"""The agent: what the logs, the gate, the kernel and people say goes into the engine, and its actions are carried out.

One asyncio loop, one thread. What may block for long sits in threads or processes of :mod:`mpsagent.system`. What the
gate needs to know is said at once: clients wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from mpsagent.agent import gpus, kept, policies, startup
from mpsagent.agent.bypass import Bypass
from mpsagent.agent.clients import Clients
from mpsagent.agent.conditions import note_conditions
from mpsagent.agent.executor import Executor, mps_environment
from mpsagent.agent.gate_keeper import GateKeeper
from mpsagent.agent.gate_side import GateSide
from mpsagent.agent.log_side import LogSide
from mpsagent.agent.observer import Observer
from mpsagent.agent.people import People
from mpsagent.agent.recorder import FORGET, Recorder, log
from mpsagent.agent.records import QUIET, UNKNOWN_A_MINUTE, Sparingly, action_record, worth_a_record
from mpsagent.agent.settings import Settings
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.engine import Core, Step
from mpsagent.core.model import State
from mpsagent.core.transitions import ClientWaiting, ServerReady, Transition, transition_fields
from mpsagent.core.view import View
from mpsagent.mps.limits import Device
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy
from mpsagent.system import directories, lock
from mpsagent.system.control import ControlSupervisor
from mpsagent.system.frontend import FrontEnd
from mpsagent.system.history import History
from mpsagent.system.names import Names
from mpsagent.system.policy_warnings import warnings
from mpsagent.system.store import Store

TICK = 1.0
"""Seconds between two looks of the observer."""
MOST_PENDING = 256
"""Actions under way at most; more than that are a fault of ours, and said to be one."""
GPU_WAIT = 3.0
"""Seconds for which the start waits for the GPUs to be known when no agent has found them before."""
MakeSupervisor = Callable[[Policy, directories.Directories, Callable[[int], None]], ControlSupervisor]


class Agent(Recorder):
    """One instance of MPS under one policy. Everything public here is for the interfaces; times are of ``clock``."""

    def __init__(self, settings: Settings, history: History, names: Names, store: Store) -> None:
        super().__init__(history)
        self.settings = settings
        self.store = store
        self.inherited = history.newest
        """Number of the last record of the agent before."""
        self.started = self.clock.now()
        self.core = Core()
        self.policy_errors: tuple[PolicyError, ...] = ()
        self.policy_loaded: float | None = None
        self.counts: Counter[str] = Counter()
        self.last_switch: float | None = None
        self.up_since: float | None = None
        self.ready = False
        self.stopping = False
        self.names = names
        self.people = People(names, self._soon)
        self.clients = Clients(self._client_ended)
        self.bypass = Bypass()
        self.where: directories.Directories
        self.supervisor: ControlSupervisor
        self.executor: Executor
        self.gate = GateSide(self)
        self.logs = LogSide(self)
        self.keeper = GateKeeper(self)
        self.observer = Observer(self)
        self._closing = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._pending = 0
        self._loading = asyncio.Lock()
        self._unknown = Sparingly(UNKNOWN_A_MINUTE)
        self._checking = False

    @property
    def state(self) -> State:
        return self.core.state

    @property
    def policy(self) -> Policy:
        return self.core.state.policy

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs, as far as they are known."""
        return () if self.state.devices == gpus.UNKNOWN else self.state.devices

    @property
    def socket_path(self) -> str:
        """Of the control daemon."""
        return f"{self.where.hidden}/control"

    def name_of(self, uid: int) -> str | None:
        known = self.people.known.get(uid)
        return None if known is None else known.name

    def view(self) -> View:
        return self.core.view()

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, make_supervisor: MakeSupervisor) -> None:
        """Read the policy, take over or prepare, read the logs, reach the gate. Returns when the agent is at work.
        Raises AlreadyLocked when another agent is, DirectoryRefused or OSError where the directories are of no use."""
        asyncio.get_running_loop().set_exception_handler(self.loop_failed)
        earlier = self.gate.earlier = self.store.load()
        for text in self.store.notes:
            log.warning("store", text=text)
        await self._first_policy()
        policy = self.policy
        self.where = directories.directories(
            policy.instance, policy.pipe_directory, policy.log_directory, self.settings.run_directory
        )
        self._lock()
        front_end = FrontEnd(policy.control_program, mps_environment(policy, self.where))
        self._closing.callback(front_end.close)
        self.supervisor = make_supervisor(policy, self.where, self._control_gone)
        self._closing.callback(self.supervisor.close)
        self.executor = Executor(
            policy, self.where, front_end, self.supervisor, self.gate.link, self.clients, self.clock, self.take,
            lambda: self.core.state,
        )  # fmt: skip
        known = gpus.remembered(self.settings, policy.devices)
        self.absorb([inp.DevicesFound(self.clock.now(), known or gpus.UNKNOWN)])
        looking = self.spawn(startup.find_devices(self))
        await self.keeper.start()
        await startup.adopt(self)
        for name, (position, parser) in (await startup.read_logs(self)).items():
            await self.logs.follow(name, position, parser)
        self.absorb(kept.drain(earlier, self.clock.now()))
        if not known:
            await asyncio.wait({looking}, timeout=GPU_WAIT)
        self.ready = True
        self.gate.link.start()
        self.spawn(self._tick())
        self.observer.survey()
        self._check_policy()
        self._decide()

    def _lock(self) -> None:
        """One agent looks after an instance."""
        try:
            directories.prepare_hidden(self.where)
        except (directories.DirectoryRefused, OSError) as error:
            self.conditions.set("directories", str(error), self.clock.now())
            return
        held = lock.take(f"{self.where.home}/agent.lock", f"the control daemon of {self.policy.pipe_directory}")
        self._closing.callback(os.close, held)

    async def end(self) -> None:
        """Let go of everything. MPS and the gate run on, unless the policy says otherwise (``agent.on_stop``)."""
        if self.ready and self.policy.on_stop == "quit" and self.supervisor.running is not None:
            timeout = max(1, round(self.policy.stop_timeout))
            quit_it = act.QuitControl(timeout=timeout, reason="the agent is being stopped", rule="agent.on_stop")
            done = await self.executor.perform(quit_it)
            self.record("control.quit", done.at, ok=done.ok, text=done.text)
        self.stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.logs.close()
        self.gate.link.close()
        self.keeper.close()
        self.clients.close()
        self.people.close()
        self._closing.close()
        self.store.close()
        self.history.close()

    def use_devices(self, found: tuple[Device, ...]) -> None:
        self.take([inp.DevicesFound(self.clock.now(), found)])
        if self.ready:
            self._check_policy()

    # --- the policy ---------------------------------------------------------------------------------------------------

    async def _first_policy(self) -> None:
        begun = await policies.start(self.settings)
        now = self.clock.now()
        self.absorb([inp.PolicyChanged(now, begun.policy)])
        self.policy_errors = begun.errors
        if begun.errors:
            self._policy_rejected(begun.errors, begun.kept, now)
        else:
            self.policy_loaded = now
            self.record("policy.loaded", now, digest=begun.policy.digest, files=list(begun.policy.sources))

    async def load_policy(self) -> tuple[PolicyError, ...]:
        """Read the policy files anew. A bad policy never replaces a good one."""
        async with self._loading:
            policy, errors = await policies.read(self.settings)
        now = self.clock.now()
        self.policy_errors = errors
        if policy is None:
            self._policy_rejected(errors, "the policy from before stays in force", now)
            return errors
        self.conditions.set("policy", None, now)
        policy, left = policies.keep_fixed(self.policy, policy)
        self.conditions.set("restart", left, now, "systemctl restart mpsagent")
        self.policy_loaded = now
        self.record("policy.loaded", now, digest=policy.digest, files=list(policy.sources))
        self.executor.policy = policy
        self.people.refresh()
        self.take([inp.PolicyChanged(now, policy)])
        self.observer.survey()
        self._check_policy()
        return ()

    def _check_policy(self) -> None:
        """Aside: the name service is asked, and it may hang."""
        if not self._checking:
            self._checking = True
            self.spawn(self._warn())

    async def _warn(self) -> None:
        """What of the policy is surely not meant on this machine; it stays in force all the same."""
        policy = None
        while policy is not self.policy:  # another one may be loaded meanwhile
            policy = self.policy
            found = await warnings(policy, self.devices)
        self._checking = False
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        what = f"in the policy: {found[0]}{more}" if found else None
        self.conditions.set("policy warnings", what, self.clock.now(), "mpsagent-cli policy check shows all")

    def _policy_rejected(self, errors: Sequence[PolicyError], kept: str, now: float) -> None:
        what = f"{errors[0]} ({len(errors)} mistake{'s' if len(errors) > 1 else ''}; {kept})"
        self.conditions.set("policy", what, now, "mpsagent-cli policy check")
        self.record("policy.rejected", now, errors=[str(error) for error in errors[:20]], kept=kept)

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _client_ended(self, pid: int, start: int) -> None:
        self.take([inp.ProcessEnded(self.clock.now(), pid, start)])

    def _control_gone(self, pid: int) -> None:
        now = self.clock.now()
        self.up_since = None
        self.take([inp.ControlGone(now, pid)])

    async def _tick(self) -> None:
        while not self.stopping:
            await asyncio.sleep(TICK)
            try:
                self.take(self.observer.once())
                if self.state.silent_since is not None and not self.executor.busy:
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
            self._carry_out(self.core.receive_all(events, now), now)
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
            self._carry_out(self.core.tick(now), now)
        except Exception as error:
            self.failed("deciding failed", error)
            self._wake_at(now + TICK)

    def _carry_out(self, step: Step, now: float) -> None:
        """The gate first: it is told at once, and what it answers comes through the link."""
        outcomes: list[act.Done] = []
        for action in step.actions:
            if isinstance(action, act.SetAdmissions | act.RefuseConnection | act.ReleaseClient):
                self.counts[type(action).__name__] += 1
                outcomes.append(self.executor.tell_gate(action))
                if not isinstance(action, QUIET):
                    self.record("action", now, action=type(action).__name__, **action_record(action, self.policy))
            else:
                self._dispatch(action, now)
        for one in step.transitions:
            self.write_down(one, now)
        uids = set(self.state.queue()) | set(self.state.users())
        if self.people.meet(uids):
            self._soon()
        self.people.keep(uids)
        self.gate.keep()
        deadline = self.core.deadline()
        self._wake_at(deadline)
        if any(not one.ok or not isinstance(one.action, act.SetAdmissions) for one in outcomes):
            asyncio.get_running_loop().call_soon(self.take, outcomes)

    def _wake_at(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None and not self.stopping:
            delay = max(0.0, deadline - self.clock.now()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(delay, self._decide)

    def _dispatch(self, action: act.Action, now: float) -> None:
        self.counts[type(action).__name__] += 1
        if isinstance(action, act.Report):
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
        number = self.record("action", self.clock.now(), action=type(action).__name__, **fields)
        try:
            done = await self.executor.perform(action)
        finally:
            self._pending -= 1
        self.record("action.done", done.at, action=type(action).__name__, begun=number, ok=done.ok, text=done.text,
                    **fields)  # fmt: skip
        if isinstance(action, act.StartControl) and done.ok:
            self.conditions.set("adopted", None, done.at)
            self.up_since = done.at
        self.take([done])
        self._note_conditions()

    def _note_conditions(self) -> None:
        now, executor = self.clock.now(), self.executor
        self.conditions.set("front-end", executor.front_end_problem, now, "is the NVIDIA driver installed?")
        self.conditions.set("control daemon", executor.start_problem, now, "see mpsagent-cli events")
        if executor.multiuser_problem is not None:
            what = f"{executor.multiuser_problem}, so each turn has a server of its own"
            self.conditions.set("shared server", what, now, 'set server = "own" in [instance.NAME]')
        note_conditions(self.conditions, self.core, now)
        self.conditions.set("store", self.store.problem, now, "a drain and who is being ended do not outlive the agent")

    # --- on record ---

    def write_down(self, one: Transition, now: float) -> None:
        self.counts[one.kind] += 1
        if isinstance(one, ServerReady):
            self.last_switch = one.at
        if isinstance(one, ClientWaiting) and not self.gate.is_new(one):
            return  # an earlier agent wrote it down
        if worth_a_record(one, self._unknown, now):
            self.record(one.kind, one.at, **transition_fields(one))
