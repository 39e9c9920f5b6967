"""The agent: what the logs, the gate, the kernel and people say goes into the engine, and its actions are carried out.

One asyncio loop, one thread. What may block for long sits in threads or processes of :mod:`mpsagent.system`. What the
gate needs to know is said at once: clients wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mpsagent.agent import gpus, kept, policies, startup
from mpsagent.agent.bypass import Bypass
from mpsagent.agent.clients import Clients
from mpsagent.agent.conditions import note_conditions
from mpsagent.agent.executor import Executor, mps_environment
from mpsagent.agent.gate_side import GateSide
from mpsagent.agent.log_side import LogSide
from mpsagent.agent.observer import Observer
from mpsagent.agent.people import People
from mpsagent.agent.recorder import FORGET, Recorder
from mpsagent.agent.records import UNSERVED_A_MINUTE, Worth, action_record
from mpsagent.agent.unlimited import Unlimited
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core.engine import Core, Step
from mpsagent.core.model import State
from mpsagent.core.transitions import ClientWaiting, ServerReady, Transition, transition_fields
from mpsagent.core.view import View
from mpsagent.mps.limits import Device
from mpsagent.policy import apart
from mpsagent.policy.policy import Policy
from mpsagent.system import directories, lock
from mpsagent.system.control import ControlSupervisor
from mpsagent.system.frontend import FrontEnd
from mpsagent.system.store import Part

if TYPE_CHECKING:
    from mpsagent.agent.node import Node

TICK = 1.0
"""Seconds between two looks of the observer."""
MOST_PENDING = 256
"""Actions under way at most; more than that are a fault of ours, and said to be one."""
GPU_WAIT = 3.0
"""Seconds for which the start waits for the GPUs to be known when no agent has found them before."""
MakeSupervisor = Callable[[Policy, directories.Directories, Callable[[int], None]], ControlSupervisor]


class Agent(Recorder):
    """One instance of MPS under one policy. Everything public here is for the interfaces; times are of ``clock``."""

    def __init__(self, node: Node, policy: Policy) -> None:
        super().__init__(node.history, node.telling)
        self.node = node
        self.name = policy.instance
        self.clock = node.clock
        self.settings = node.settings
        self.store = node.store if node.single else Part(node.store, self.name)
        self.inherited = node.inherited
        self.started = node.started
        self.core = Core()
        self.counts: Counter[str] = Counter()
        self.last_switch: float | None = None
        self.up_since: float | None = None
        self.ready = False
        self.stopping = False
        self.names = node.names
        self.people = People(node.names, self._soon)
        self.clients = Clients(self._client_ended)
        self.bypass = Bypass(self)
        self.unlimited = Unlimited(self)
        self.where: directories.Directories
        self.supervisor: ControlSupervisor
        self.executor: Executor
        self.gate = GateSide(self)
        self.logs = LogSide(self)
        self.observer = Observer(self)
        self._closing = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._pending = 0
        self._worth = Worth()
        self.absorb([inp.PolicyChanged(self.clock.now(), policy)])

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

    @property
    def family(self) -> str:
        """The name by which people know it: users' instances apart have that of their template."""
        return apart.family(self.policy)

    @property
    def at_rest(self) -> bool:
        """Nothing is under way, and no control daemon runs."""
        return self.ready and not self._pending and self.supervisor.running is None

    def name_of(self, uid: int) -> str | None:
        known = self.people.known.get(uid) or self.names.known(uid)
        return None if known is None else known.name

    def view(self) -> View:
        return self.core.view()

    def is_mine(self, record: Mapping[str, Any]) -> bool:
        """Whether a record of the history is about this instance."""
        return self.node.single or self.name in (record.get("instance", self.node.first), record.get("before"))

    def is_of_family(self, record: Mapping[str, Any]) -> bool:
        """Whether it is about this instance, or, where this is a template, about one of its users'."""
        user = apart.split(str(record.get("instance"))) if self.policy.sharing == "apart" else None
        return self.is_mine(record) or (user is not None and user[0] == self.name)

    def record(self, kind: str, at: float, **fields: object) -> int:
        return super().record(kind, at, **(fields if self.node.single else {"instance": self.name, **fields}))

    # --- start and stop -----------------------------------------------------------------------------------------------

    def prepare(self, make_supervisor: MakeSupervisor) -> None:
        """Take hold of the directories. Raises AlreadyLocked when another agent has."""
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
        self.executor.freezer.thaw_all()  # of an agent that was killed: the turns freeze again who is paused
        known = gpus.remembered(self.settings, policy.devices)
        self.absorb([inp.DevicesFound(self.clock.now(), known or gpus.UNKNOWN)])
        self._known = bool(known)

    async def begin(self, earlier: dict[str, Any] | None) -> None:
        """Take over or start, read the logs, go to work. ``earlier``: what the agent before has kept of this instance;
        None: there was none. Raises OSError where the directories are of no use."""
        self.gate.earlier, earlier = earlier, earlier or {}
        alone = self.policy.user is None
        looking = self.spawn(startup.find_devices(self)) if alone else None
        await startup.adopt(self)
        for name, (position, parser) in (await startup.read_logs(self)).items():
            await self.logs.follow(name, position, parser)
        self.absorb([*kept.drain(earlier, self.clock.now()), *kept.leases(earlier, self.clock.now())])
        self._forget_drain()
        if looking is not None and not self._known:
            await asyncio.wait({looking}, timeout=GPU_WAIT)
        self.ready = True
        self.spawn(self._tick())
        self.observer.survey()
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
        self.executor.freezer.thaw_all()
        self.clients.close()
        self.people.close()
        self.bypass.close()
        self._closing.close()

    def use_devices(self, found: tuple[Device, ...]) -> None:
        for one in (self, *self.node.apart.of(self)):
            one.take([inp.DevicesFound(self.clock.now(), found)])
        if self.ready:
            self.node.check_policy()

    def use_policy(self, policy: Policy | None) -> str | None:
        """Another policy; None: it has this instance no more. What of it has to wait until the agent is started
        again, in words."""
        if policy is None:
            return f"{self.name} goes on as it is"
        policy, left = policies.keep_fixed(self.policy, policy)
        self.executor.policy = policy
        self.people.refresh()
        self.take([inp.PolicyChanged(self.clock.now(), policy)])
        self.observer.survey()
        return left

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _client_ended(self, pid: int, start: int) -> None:
        self.executor.freezer.forget(pid, start)
        self.take([inp.ProcessEnded(self.clock.now(), pid, start)])

    def _control_gone(self, pid: int) -> None:
        now = self.clock.now()
        self.up_since = None
        self.spawn(startup.end_orphans(self))
        self.conditions.set("adopted", None, now)
        self.take([inp.ControlGone(now, pid)])
        self._forget_drain()

    def _forget_drain(self) -> None:
        """One for a restart ends with the control daemon."""
        if self.state.drain is None and self.store.get("drain") is not None:
            self.store.put("drain", None)

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
        """The gate first: it is told at once. What came of it is on record as transitions."""
        for rule, error in step.mistakes:
            self.failed(f"{rule} failed, everything else goes on", error)
        outcomes: list[act.Done] = []
        for action in step.actions:
            if isinstance(action, act.ToGate):
                self.counts[type(action).__name__] += 1
                outcomes.append(self.executor.tell_gate(action))
            else:
                self._dispatch(action, now)
        for one in step.transitions:
            self.write_down(one, now)
        uids = dict.fromkeys((*self.state.queue(), *self.state.users()))  # who came first is asked about first
        if self.people.meet(uids):
            self._soon()
        self.people.keep(uids)
        if not uids and not self.node.single:
            self.node.placing.idle()
        if self.state.held and self.policy.sharing == "apart" and self.policy.user is None:
            self.node.apart.soon()
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

    def show(self, one: Transition | act.Action | None) -> None:
        """To who watches: the metrics. A mistake there is none of the decisions' business."""
        node = self.node
        paused = self.core.memories.turns.suspended
        template = self if self.policy.user is None else node.find(self.family) or self
        for watch in node.watchers:
            try:
                watch(self.family, one, lambda: [uid for uid in node.apart.users(template) if uid not in paused])
            except Exception as error:
                self.failed("counting for the metrics failed", error)

    def _dispatch(self, action: act.Action, now: float) -> None:
        self.counts[type(action).__name__] += 1
        self.show(action)
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
        self.counts[one.kind] += 1
        self.show(one)
        if isinstance(one, ServerReady):
            self.last_switch = one.at
        if isinstance(one, ClientWaiting) and not self.gate.is_new(one):
            return  # an earlier agent wrote it down
        if self._worth_it(one, now):
            self.record(one.kind, one.at, **transition_fields(one))

    def _worth_it(self, one: Transition | act.Report, now: float) -> bool:
        if self._worth.may(one, now):
            return True
        if (uid := self._worth.flood(one, now)) is not None:
            self.record("user.flood", now, uid=uid, most=UNSERVED_A_MINUTE)
        return False
