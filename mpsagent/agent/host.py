"""One instance: what logs, gate, kernel and people say goes into the engine, and its actions are carried out.

One asyncio loop, one thread. What may block for long sits in threads or processes of :mod:`mpsagent.system`. What the
gate needs to know is said at once: clients wait for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpsagent.agent import gpus, policies, saved
from mpsagent.agent.bypass import Bypass, Inside
from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.clock import SteadyClock, until_next
from mpsagent.agent.conditions import Conditions, note_conditions, note_daemon
from mpsagent.agent.executor import mps_environment
from mpsagent.agent.gate_side import GateSide
from mpsagent.agent.journaling import Telling
from mpsagent.agent.lane import Lane, MakeSupervisor
from mpsagent.agent.lifted_limits import Lifted
from mpsagent.agent.observer import Observer
from mpsagent.agent.people import People
from mpsagent.agent.recorder import FORGET, Recorder
from mpsagent.agent.records import UNSERVED_A_MINUTE, Worth, action_record
from mpsagent.agent.settings import Settings
from mpsagent.agent.showing import Showing
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import use
from mpsagent.core.coordinator import Core, Step
from mpsagent.core.model import SEEN_EVERY, Key, State
from mpsagent.core.transitions import (
    ClientConnected,
    ClientEnded,
    ClientHeld,
    ClientWaiting,
    Transition,
    UserPaused,
    UserResumed,
    transition_fields,
)
from mpsagent.linux.lock import AlreadyLocked
from mpsagent.linux.proc import start_time
from mpsagent.mps.limits import Device
from mpsagent.policy import apart
from mpsagent.policy.policy import Policy
from mpsagent.system import directories
from mpsagent.system.freezer import Freezer
from mpsagent.system.gate_link import GateLink
from mpsagent.system.gpu_files import GpuFiles
from mpsagent.system.names import Names
from mpsagent.system.store import Store, StorePart
from mpsagent.system.terminal import Terminals
from mpsagent.wire.link import Admissions

TICK = SEEN_EVERY
"""Seconds between two looks of the observer."""
STOOD = 2.5
"""Seconds without a decision after which the agent has stood still: it is stopped, or its machine was."""
MOST_PENDING = 256
"""Actions under way at most; more than that are an internal fault, and are reported as one."""
GPU_WAIT = 3.0
"""Seconds for which the start waits for the GPUs to be known when no agent has found them before."""
GPU_MOMENT = 0.5
"""Seconds for which a start of the control daemon waits for them, so that the first client's limits are of these."""
GPU_AGAIN = 30.0
"""Seconds until a driver that does not answer is asked again."""
UNMADE = 10.0
"""Seconds for which the failure to make a user's lane is shown; it is tried again before that."""


class Agent(Recorder):
    """One instance of MPS under one policy. Everything public here is for the api and orders; times are of ``clock``.

    ``link`` leads to the gate, and is that of all instances. ``inside`` says what is inside MPS, of all instances.
    ``named`` says whether records say which instance they are about. ``since``: connections from before that time an
    earlier agent has recorded; None: there was none. ``decided`` is called after each of its decisions, ``changed``
    when a user's lane has come or gone, ``room`` says why there may be no further one."""

    def __init__(
        self,
        policy: Policy,
        *,
        settings: Settings,
        shown: Showing,
        telling: Telling,
        clock: SteadyClock,
        store: Store | StorePart,
        names: Names,
        link: GateLink,
        seen: gpus.Gpus,
        make_supervisor: MakeSupervisor,
        since: float | None,
        named: Callable[[], bool],
        inside: Callable[[], Collection[Inside]],
        decided: Callable[[Agent], None],
        changed: Callable[[], None],
        room: Callable[[], str | None],
    ) -> None:
        super().__init__(shown, telling, clock, People(names, self._soon))
        self.name = policy.instance
        self.settings = settings
        self.store = store
        self.names = names
        self.core = Core()
        self.ready = False
        self.stopping = False
        self.going: dict[str, None] = {}
        """Names of users' lanes that are being taken away."""
        self._since = since
        self._named, self._decided, self._changed, self._room = named, decided, changed, room
        self._link, self._make_supervisor = link, make_supervisor
        self._terminals = Terminals(unit=settings.supervise == "systemd")
        self.clients = ClientProcesses(self._client_ended)
        self.freezer = Freezer(f"{settings.run_directory}/instances/{self.name}/frozen")
        self.gate = GateSide(
            self.core, clock, self.clients, self.people, store, since, self.take
        )  # fmt: skip
        self.bypass = Bypass(
            clock, self.record, self.spawn, lambda: self.core.state, names, inside, lambda: link.synced, self.clients,
            start_time(os.getpid()) if since is None else None,
        )  # fmt: skip
        lifted = Lifted(lambda: self.core.state, self.spawn)
        self.observer = Observer(self, self.core, self.clients, self.bypass, lifted, seen, inside, self.take)
        self._looking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._decided_at = float("-inf")
        self._pending = 0
        self._worth = Worth()
        self.absorb([inp.PolicyChanged(clock.now(), policy)])
        self.lanes: dict[Key, Lane] = {None: self._lane(None, self.conditions)}

    def _lane(self, key: Key, conditions: Conditions) -> Lane:
        return Lane(
            key, self.policy, self.settings.run_directory, core=self.core, clock=self.clock, conditions=conditions,
            record=partial(self.record, lane=key), spawn=self.spawn, take=self.take, link=self._link,
            clients=self.clients, freezer=self.freezer, terminals=self._terminals,
            gpu_files=GpuFiles(self.settings.device_directory),
            make_supervisor=self._make_supervisor,
        )  # fmt: skip

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
    def where(self) -> directories.Directories:
        return self.lanes[None].where

    @property
    def inside(self) -> list[Inside]:
        """Return the processes that are inside MPS by this instance."""
        return [lane.inside for lane in self.lanes.values()]

    def record(self, kind: str, at: float, **fields: object) -> int:
        """``lane`` among the fields: the user whose lane it is about."""
        lane = fields.pop("lane", None)
        name = apart.daemon_name(self.name, lane if isinstance(lane, int) else None)
        return super().record(kind, at, **({"instance": name, **fields} if self._named() else fields))

    # --- start and stop -----------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Take hold of the directories. Raises AlreadyLocked when another agent has."""
        try:
            self.lanes[None].prepare()
        except (directories.DirectoryRefused, OSError) as error:
            self.conditions.set("directories", str(error), self.clock.now())
        self.freezer.thaw_all()  # of an agent that was killed: the turns freeze again who is paused
        known = gpus.remembered(self.settings, self.policy.devices)
        self.absorb([inp.DevicesFound(self.clock.now(), known or gpus.UNKNOWN)])

    async def begin(self, earlier: dict[str, Any] | None) -> None:
        """Take over or start, read the logs, go to work. ``earlier``: what the agent before has kept of this instance;
        None: there was none. Raises OSError where the directories are of no use."""
        self.gate.take_up(earlier)
        earlier = earlier or {}
        looking = self._look_for_devices()
        await self._begin(self.lanes[None])
        await asyncio.gather(*map(self._made, apart.users(self.name, self._left())))
        now = self.clock.now()
        self.absorb([*saved.drain(earlier, now), *saved.leases(earlier, now), *saved.extended(earlier, now)])
        self._forget_drain()
        if not self.devices:
            await asyncio.wait({looking}, timeout=GPU_WAIT)
        self.ready = True
        self.spawn(self._tick())
        self.observer.survey()
        self._decide()

    def _left(self) -> list[str]:
        """Directories of instances and lanes that there are."""
        place = Path(self.settings.run_directory, "instances")
        return sorted(path.name for path in place.iterdir()) if place.is_dir() else []

    async def _begin(self, lane: Lane, *first: inp.Input) -> None:
        """Take over the control daemon that runs there, and its logs."""
        found = await lane.adopt()
        events, caught = await lane.read_logs()
        happened = self.absorb([*first, *lane.of([*found, *events])])
        for one in happened if self.ready else ():
            self.write_down(one, self.clock.now())
        if self._since is not None and not self.ready:
            self.shown.found(lane.name, happened)
        await lane.follow(caught)

    # --- lanes of users -----------------------------------------------------------------------------------------------

    async def _make(self, uid: int) -> None:
        """Raises OSError, AlreadyLocked, DirectoryRefused."""
        if (why := self._room()) is not None:
            raise OSError(why)
        lane = self._lane(uid, Conditions())
        try:
            lane.prepare()
            self.lanes[uid] = lane
            self._changed()
            await self._begin(lane, inp.DaemonOpened(self.clock.now(), uid))
        except (Exception, asyncio.CancelledError):  # not GeneratorExit: nothing can be awaited then
            self.lanes.pop(uid, None)
            self.absorb([inp.DaemonClosed(self.clock.now(), uid)])
            await lane.end()
            raise

    async def _made(self, uid: int) -> str | None:
        """Make a user's lane, or return the reason for which it cannot be made."""
        try:
            await self._make(uid)
        except Exception as error:
            if not isinstance(error, OSError | AlreadyLocked | directories.DirectoryRefused):
                self.failed("a user's lane could not be made", error)
            now, what = self.clock.now(), f"user {uid} gets no control daemon: {error}"
            self.conditions.set("apart", what, now, "it is tried again by itself", until=now + UNMADE)
            return str(error)
        return None

    async def _open(self, action: act.OpenDaemon) -> None:
        known = "apart" in self.conditions.topics()
        why = await self._made(action.uid)
        now = self.clock.now()
        if why is not None and not known:
            self.record("action.failed", now, action="OpenDaemon", text=why, **action_record(action, self.policy))
        self.take([act.Done(now, action, why is None, why or "")])

    async def _close(self, action: act.CloseDaemon) -> None:
        lane = self.lanes.pop(action.uid)
        self.going[lane.name] = None
        try:
            self._changed()
            await lane.end()
            await lane.end_orphans()  # they are known by the directory
            await lane.supervisor.forget()
            lane.clean(self.settings.run_directory)
        finally:
            del self.going[lane.name]
            self.take([act.Done(self.clock.now(), action, True)])

    # --- start and stop -----------------------------------------------------------------------------------------------

    def _look_for_devices(self) -> asyncio.Task[None]:
        """Ask for the GPUs, unless that is under way."""
        if self._looking is None or self._looking.done():
            self._looking = self.spawn(self._find_devices())
        return self._looking

    async def _devices_again(self) -> None:
        """Ask for the GPUs before a control daemon is started: they may be other ones than before, or be divided in
        another way. While another daemon of this instance holds them they are the same."""
        if all(lane.supervisor.running is None for lane in self.lanes.values()):
            await asyncio.wait({self._look_for_devices()}, timeout=GPU_MOMENT)

    async def _find_devices(self) -> None:
        """Ask for the GPUs, again and again until there is an answer; none where there were some is not an answer."""
        while not self.stopping:
            visible = self.policy.devices
            found = await gpus.find(self.settings, mps_environment(self.policy, self.where), visible)
            now = self.clock.now()
            if not found and self.devices:
                found = "none of the GPUs of this instance is there any more"
            if not isinstance(found, str):
                self.conditions.set("devices", None, now)
                if found != self.devices:
                    gpus.remember(self.settings, visible, found)
                self.take([inp.DevicesFound(now, found)])
                return
            lesser = "the GPUs found last count" if self.devices else "clients get less than their policy until then"
            do = f"see nvidia-smi; memory limits and multiprocessors depend on the GPUs: {lesser}"
            self.conditions.set("devices", found, now, do)
            await asyncio.sleep(GPU_AGAIN)

    async def end(self) -> None:
        """Let go of everything. MPS and the gate run on, unless the policy says otherwise (``agent.on_stop``)."""
        lanes = list(self.lanes.values())
        if self.ready and self.policy.on_stop == "quit":
            timeout = max(1, round(self.policy.kill_grace))
            await asyncio.gather(*(lane.quit(timeout) for lane in lanes if lane.supervisor.running is not None))
        for one in use.owed(self.state, self.clock.now()):
            self._write(one)
        self.stopping = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for lane in lanes:
            await lane.end()
        self.freezer.thaw_all()
        self.clients.close()
        self.people.close()
        self.bypass.close()

    def use_policy(self, policy: Policy) -> str | None:
        """Another policy. What of it has to wait until the agent is started again, in words."""
        policy, left = policies.keep_fixed(self.policy, policy)
        self.people.refresh()
        self.take([inp.PolicyChanged(self.clock.now(), policy)])
        self.observer.survey()
        return left

    # --- what comes in ------------------------------------------------------------------------------------------------

    def _client_ended(self, pid: int, start: int, lives: bool) -> None:
        self.freezer.forget(pid, start)
        self.gate.process_ended(pid, start, lives)

    def _forget_drain(self) -> None:
        """Forget a drain for a restart: it ends with the control daemon."""
        if self.store.get("drain") is not None and all(one.state.drain is None for one in self.core.engines.values()):
            self.store.put("drain", None)

    async def _tick(self) -> None:
        while not self.stopping:
            await asyncio.sleep(until_next(TICK))
            try:
                self._meet()
                self.take(self.observer.once())
                for lane in list(self.lanes.values()):
                    lane.look()
                self._note_conditions()
            except Exception as error:
                self.failed("a regular look at the node failed", error)

    # --- deciding -----------------------------------------------------------------------------------------------------

    def absorb(self, events: Sequence[inp.Input]) -> list[Transition]:
        """Take in events from before this agent was at work: no decision, no record."""
        return self.core.absorb(events)

    def take(self, events: Sequence[inp.Input | act.Done]) -> None:
        """Decide on new events; before the start is over, only take them in."""
        if self.stopping:
            return
        if self.ready:
            self._decide(events)
        else:
            self.core.absorb([event for event in events if not isinstance(event, act.Done)])

    def _soon(self) -> None:
        """A name has become known."""
        if self.ready and not self.stopping and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._people_known)

    def _meet(self, *, only_new: bool = False) -> None:
        """Ask for the names of the present users. New answers about the others are taken in each second."""
        owners = [*self.core.engines, *(one.uid for one in self.state.servers.values())]
        # the names of the first users are asked for first
        uids = dict.fromkeys((*self.state.held.users(), *self.state.users(), *filter(None, owners)))
        known = self.people.known
        if self.people.meet([uid for uid in uids if uid not in known] if only_new else uids):
            self._soon()
        self.people.keep(uids)

    def _people_known(self) -> None:
        self._scheduled = False
        self.take([])

    def _new_names(self, now: float) -> list[inp.Input]:
        """Return the users' names if the engine has others, whoever asked for them."""
        return [] if self.state.identities == self.people.known else [inp.PeopleKnown(now, self.people.known)]

    def _decide(self, events: Sequence[inp.Input | act.Done] = ()) -> None:
        """Whatever goes wrong here, it is tried again: an agent that no longer decides protects no one."""
        now = self.clock.now()
        try:
            events = [*self._seen_again(now), *self._new_names(now), *events]
            self._carry_out(self.core.receive_all(events, now) if events else self.core.tick(now), now)
            self.shown.changed()
        except Exception as error:
            self.failed("deciding failed", error)
            self._wake_at(now + TICK)

    def _seen_again(self, now: float) -> list[inp.Input]:
        """Return the processes as seen now, if the agent stood still: stopped processes may have been resumed."""
        stood, self._decided_at = now > self._decided_at + STOOD, now
        return [self.observer.processes(now)] if stood else []

    def _carry_out(self, step: Step, now: float) -> None:
        """Carry out a step, with the gate first, at once. Its results are on record as transitions."""
        for rule, error in step.mistakes:
            self.failed(f"{rule} failed, everything else goes on", error)
        outcomes: list[act.Done] = []
        for action in step.actions:
            if isinstance(action, act.TellGate):
                done = self.lanes[None].executor.tell_gate(action)
                if not (done.ok and isinstance(action.message, Admissions)):
                    outcomes.append(done)
            else:
                self._dispatch(action, now)
        for one in step.transitions:
            self.write_down(one, now)
        if any(isinstance(one, ClientConnected | ClientEnded | UserPaused | UserResumed) for one in step.transitions):
            self.observer.look_at_work()
        self._meet(only_new=True)
        self._decided(self)
        self.gate.keep()
        self._forget_drain()
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
                self.record(action.kind, now, lane=action.daemon, **action_record(action, self.policy))
            return
        if isinstance(action, act.OpenDaemon | act.CloseDaemon):
            self.spawn(self._open(action) if isinstance(action, act.OpenDaemon) else self._close(action))
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
        fields, lane = {**action_record(action, self.policy), "lane": action.daemon}, self.lanes.get(action.daemon)
        # A pause is on record for the user; 48 processes each 20 s would wash everything else away.
        quiet = isinstance(action, act.Freeze | act.Thaw)
        number = 0
        if not quiet:
            number = self.record("action", self.clock.now(), action=type(action).__name__, **fields)
        try:
            if lane is None:
                done = act.Done(self.clock.now(), action, False, "its control daemon is not there any more")
            else:
                if isinstance(action, act.StartControl):
                    await self._devices_again()
                done = await lane.executor.perform(action)
        finally:
            self._pending -= 1
        kind = "action.done" if done.ok else "action.failed"
        if not (quiet and done.ok):
            self.record(kind, done.at, action=type(action).__name__, begun=number, ok=done.ok, text=done.text, **fields)
        if isinstance(action, act.StartControl) and done.ok and lane is not None:
            lane.started(done.at)
            self.conditions.set("directories", None, done.at)
        self.take([done])
        self._note_conditions()

    def _note_conditions(self) -> None:
        now = self.clock.now()
        note_conditions(self.conditions, self.core, now)
        for key, lane in self.lanes.items():
            lane.note_conditions()
            if key is not None and key in self.core.engines:
                note_daemon(lane.conditions, self.core, key, now)
        self.conditions.set("store", self.store.problem, now, "a drain and who is being ended do not outlive the agent")

    # --- on record ---

    def write_down(self, one: Transition, now: float) -> None:
        if isinstance(one, ClientWaiting | ClientHeld) and not self.gate.is_new(one):
            return  # the api knows whether an earlier agent has written it down
        if self._worth_it(one, now):
            self._write(one)

    def _write(self, one: Transition) -> None:
        self.record(one.kind, one.at, lane=one.daemon, **transition_fields(one))

    def _worth_it(self, one: Transition | act.Report, now: float) -> bool:
        if self._worth.may(one, now):
            return True
        if (uid := self._worth.flood(one, now)) is not None:
            self.record("user.flood", now, uid=uid, most=UNSERVED_A_MINUTE)
        return False
