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
from datetime import UTC
from typing import Any

from mpsagent.agent import gpus, kept, missed, policies, startup
from mpsagent.agent.bypass import Bypass
from mpsagent.agent.catch_up import foreign
from mpsagent.agent.clients import Clients
from mpsagent.agent.conditions import note_conditions
from mpsagent.agent.executor import Executor, mps_environment
from mpsagent.agent.gate_keeper import GateKeeper
from mpsagent.agent.gate_messages import to_input
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
from mpsagent.gate import link
from mpsagent.mps.limits import Device
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy
from mpsagent.system import directories, lock
from mpsagent.system.control import ControlSupervisor
from mpsagent.system.frontend import FrontEnd
from mpsagent.system.gate_link import GateLink
from mpsagent.system.history import History
from mpsagent.system.logfiles import Chunk, LogFollower, Position, at_position
from mpsagent.system.names import Names
from mpsagent.system.policy_warnings import warnings
from mpsagent.system.processes import Process
from mpsagent.system.store import Store

TICK = 1.0
"""Seconds between two looks of the observer."""
KEPT_PARSERS = 4
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
        self.followers: dict[str, LogFollower] = {}
        self.where: directories.Directories
        self.supervisor: ControlSupervisor
        self.executor: Executor
        self.gate = GateLink(settings.gate_link, self._from_gate, lost=self._gate_lost)
        self.keeper = GateKeeper(self)
        self._parsers: dict[tuple[str, int], LogParser] = {}
        """By log and inode: after a rename the old file may go on beside the new one."""
        self._at_start: dict[str, tuple[int, int]] = {}
        self._observer = Observer(self)
        self._closing = ExitStack()
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._pending = 0
        self._loading = asyncio.Lock()
        self._unknown = Sparingly(UNKNOWN_A_MINUTE)
        self._kept: dict[str, Any] | None = None
        """What an earlier agent remembered, until the gate has said who lives."""
        self._told: list[inp.Input] | None = None
        """What the gate has said since its hello; it is taken together, so that no decision rests on a part of it."""
        self._open = missed.open_ends(history.since(0, history.newest))
        self._checking = False
        self._daemons: set[int] = set()
        """The pids of our control daemons: an earlier one's last lines may come late."""

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
        self._kept = self.store.load()
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
            policy, self.where, front_end, self.supervisor, self.gate, self.clients, self.clock, self.take,
            lambda: self.core.state,
        )  # fmt: skip
        known = gpus.remembered(self.settings, policy.devices)
        self.absorb([inp.DevicesFound(self.clock.now(), known or gpus.UNKNOWN)])
        looking = self.spawn(startup.find_devices(self))
        await self.keeper.start()
        await startup.adopt(self)
        for name, (position, parser) in (await startup.read_logs(self)).items():
            await self._follow(name, position, parser)
        self.absorb(kept.drain(self._kept, self.clock.now()))
        if not known:
            await asyncio.wait({looking}, timeout=GPU_WAIT)
        self.ready = True
        self.gate.start()
        self.spawn(self._tick())
        self._observer.survey()
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

    async def _follow(self, name: str, position: Position | None, parser: LogParser) -> None:
        """From where the log was read to, with the parser that knows how its last line began."""
        if position is not None:
            self._parsers[name, position.inode] = parser
            self._at_start[name] = (position.inode, position.offset)
        follower = self.followers[name] = LogFollower(
            f"{self.policy.log_directory}/{name}.log",
            lambda chunk: self._read(name, chunk),
            on_problem=lambda text: self._log_problem(name, text),
            first=None if position is None else at_position(position),
        )
        await follower.start()

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
        for follower in self.followers.values():
            follower.close()
        self.gate.close()
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
        self._observer.survey()
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

    def _read(self, name: str, chunk: Chunk) -> None:
        parser = self._parsers.get((name, chunk.inode))
        if parser is None or (chunk.fresh and self._at_start.pop(name, None) != (chunk.inode, chunk.offset)):
            parser = LogParser("control" if name == "control" else "server", UTC)
            for old in [key for key in self._parsers if key[0] == name][:-KEPT_PARSERS]:
                del self._parsers[old]
            self._parsers[name, chunk.inode] = parser
        control = self.state.control
        parser.daemon = control.pid if control is not None and control.proven else None
        parser.ours = None
        if parser.daemon is not None:
            self._daemons.add(parser.daemon)
            parser.ours = startup.child_of(parser.daemon)
        events = parser.feed(chunk.data, self.clock.shift())
        if name == "control" and events:
            self.executor.heard(events[-1].at)
        self.counts["log lines"] += len(events)
        events = [event for event in events if not foreign(event, self.socket_path)]
        if parser.other is not None and parser.other not in self._daemons:
            self._observer.other_daemon(parser.other)
        parser.other = None
        self.take(events)

    def _from_gate(self, message: link.FromGate, process: Process | None) -> None:
        now = self.clock.now()
        match message:
            case link.Hello():
                self.clients.forget_waiting()
                self._told = []
            case link.Knock():
                self.clients.came(message.connection, process)
            case link.Known():
                if process is not None and self.clients.get(message.pid, message.start) is None:
                    self.clients.known(process)
                elif process is not None:
                    process.close()
            case link.Left():
                self.clients.left(message.connection)
            case link.Passed():
                if not self.clients.passed(message.connection, message.pid, message.start):
                    self._soon_ended(message.pid)
            case link.Failed():
                if message.lost:
                    self.clients.left(message.connection)
            case _:
                pass
        events: list[inp.Input] = [to_input(message, now)]
        if isinstance(message, link.Knock | link.Known) and self.people.meet([message.uid]):
            events.insert(0, inp.PeopleKnown(now, self.people.known))
        if self._told is None:
            self.take(events)
            return
        self._told += events
        if isinstance(message, link.Synced):
            self._synced(now)

    def _synced(self, now: float) -> None:
        """The gate has said everything. What an earlier agent has begun goes on from here."""
        told, self._told = self._told or [], None
        first, self._kept = self._kept, None
        if first is None:
            self.take(told)
            return
        kept.take_up_turn(self.core, first, told)
        self.take([*told, kept.ending(first, now)])
        for one in missed.missed(self._open, self.state, told, now) if self.inherited else ():
            self.counts["missed"] += 1
            self._write_down(one, now)
        self._keep()

    def _soon_ended(self, pid: int) -> None:
        """It passed, and ended before its pidfd could be held."""
        asyncio.get_running_loop().call_soon(lambda: self.take([inp.ProcessEnded(self.clock.now(), pid)]))

    def _gate_lost(self, why: str) -> None:
        self._told = None
        self.clients.forget_waiting()
        now = self.clock.now()
        self.conditions.set("gate", why, now, "it comes back by itself; who waits is held by its keeper")
        self.take([inp.GateLost(now)])

    def _client_ended(self, pid: int, start: int) -> None:
        self.take([inp.ProcessEnded(self.clock.now(), pid, start)])

    def _control_gone(self, pid: int) -> None:
        now = self.clock.now()
        self.up_since = None
        self.take([inp.ControlGone(now, pid)])

    def _log_problem(self, name: str, text: str | None) -> None:
        do = "what happens in MPS is not seen until it can be read"
        self.conditions.set(f"{name}.log", text, self.clock.now(), do)

    async def _tick(self) -> None:
        while not self.stopping:
            await asyncio.sleep(TICK)
            try:
                self.take(self._observer.once())
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
            self._write_down(one, now)
        uids = set(self.state.queue()) | set(self.state.users())
        if self.people.meet(uids):
            self._soon()
        self.people.keep(uids)
        self._keep()
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

    def _keep(self) -> None:
        """On disk. Not before the gate has said who lives: what the earlier agent kept still counts then."""
        if self._kept is None:
            self.store.put("ending", kept.ending_rows(self.core))
            self.store.put("turn", kept.turn_row(self.core))
            self.store.put("served", kept.served_rows(self.core))

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

    def _write_down(self, one: Transition, now: float) -> None:
        self.counts[one.kind] += 1
        if isinstance(one, ServerReady):
            self.last_switch = one.at
        if isinstance(one, ClientWaiting) and not missed.is_new(self._open, one):
            return  # an earlier agent wrote it down
        if worth_a_record(one, self._unknown, now):
            self.record(one.kind, one.at, **transition_fields(one))
