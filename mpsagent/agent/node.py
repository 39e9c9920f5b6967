"""The whole agent: the policy, the link to the gate, and an :class:`Agent` for each instance of MPS.

Instances share nothing but these: a fault, a hang or a restart of one does not touch the others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpsagent.agent import gpus, policies, saved
from mpsagent.agent.acting import Acting
from mpsagent.agent.api_side import ApiSide
from mpsagent.agent.clock import SteadyClock, until_next
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.executor import mps_environment
from mpsagent.agent.gate_keeper import GateKeeper
from mpsagent.agent.host import Agent
from mpsagent.agent.journaling import Telling, log
from mpsagent.agent.lane import MakeSupervisor
from mpsagent.agent.people import People
from mpsagent.agent.placing import Placing
from mpsagent.agent.recorder import Recorder
from mpsagent.agent.settings import Settings
from mpsagent.agent.showing import Showing
from mpsagent.core.model import Key
from mpsagent.core.view import View
from mpsagent.core.waiting import waiting
from mpsagent.linux.listen import administrators_path, orders_path
from mpsagent.linux.threads import in_thread
from mpsagent.mps.gpus import GpusSeen
from mpsagent.mps.limits import Device
from mpsagent.policy.instances import (
    environment,
    instances,
    needs_devices,
    needs_modes,
    with_own_directories,
    without_section,
)
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy
from mpsagent.snapshot.condition import Condition
from mpsagent.snapshot.page import InstancePage, Page
from mpsagent.system import container_device
from mpsagent.system.control_search import foreign
from mpsagent.system.device_watch import BLIND, DeviceWatch
from mpsagent.system.directories import Directories, refusal, unusable
from mpsagent.system.gate_units import sockets_again
from mpsagent.system.names import Names
from mpsagent.system.store import Store, StorePart
from mpsagent.wire.codec import MOST_INSTANCES

LOOK = 1.0
GPU_WAIT = 1.0
"""Seconds that who asks for clients waits for the GPUs to say what memory each uses."""
FOLLOW_UP = 1.2
"""Seconds after a GPU was opened at which a context should be there."""
FOREIGN_EVERY, FOREIGN_AGAIN = 30.0, 3.0
"""Seconds between two looks for daemons of others; sooner while there is one."""
HOPELESS = {
    "control daemon", "control daemon failed", "front-end", "directories", "gate directory", "public directory taken",
}  # fmt: skip
"""Topics of conditions that a person has to see to before users can be let in."""


class Node(Recorder):
    """``agents``: one for each instance, in the policy's order. Times are of ``clock``."""

    def __init__(self, settings: Settings, names: Names, store: Store) -> None:
        self.api = ApiSide(settings)
        shown = Showing(self.api.connect, self.page, self._look_again)
        people = People(names, lambda: self.placing.again())
        super().__init__(shown, Telling(names), SteadyClock(), people)
        self.settings = settings
        self.store = store
        self.names = names
        self.inherited = False
        """There was an agent before."""
        self.started = self.clock.now()
        self.moved = 0.0
        """Seconds by which the wall clock was set since its start."""
        self.policy = Policy()
        self.policy_errors: tuple[PolicyError, ...] = ()
        self.policy_loaded: float | None = None
        self.agents: list[Agent] = []
        self.single = True
        """There is one instance and no user's lane so far, and nothing needs to say which."""
        self.first = self.policy.instance
        """The name of the first one."""
        self.own = False
        """Each instance has a public directory of its own, from the agent's start on."""
        self.listens: frozenset[str] = frozenset()
        """Sockets for orders that systemd has passed."""
        self.stopping = False
        self.make_supervisor: MakeSupervisor
        self.placing = Placing(
            self.agents, settings.gate_link, clock=self.clock, conditions=self.conditions, people=self.people,
            record=self.record, how=lambda: self.policy.placement, own=lambda: self.own,
        )  # fmt: skip
        self.keeper = GateKeeper(
            self, settings, lambda: self.where, lambda: self.environment, lambda: self.placing.gate
        )  # fmt: skip
        self.gpus = gpus.Gpus(settings, self._mps, self.clock)
        self.acting = Acting(
            self.agents, clock=self.clock, name=self.people.name, names=names, store=store, written=self.shown.written,
            settings=settings, load=self.load_policy, each_of=self.each_of,
        )  # fmt: skip
        self._watch: DeviceWatch | None = None
        self._follow_up: asyncio.TimerHandle | None = None
        self._machine: tuple[Device, ...] = ()
        self._exclusive: frozenset[str] = frozenset()
        """GPUs in EXCLUSIVE_PROCESS mode, by UUID, as far as they are known."""
        self._loading = asyncio.Lock()
        self._foreign_at, self._foreign_busy = float("-inf"), False

    @property
    def where(self) -> Directories:
        """Of the first instance."""
        return self.agents[0].where

    def _mps(self) -> dict[str, str]:
        if not self.agents:  # the GPUs are asked before it is known which instances there are
            return dict(os.environ)
        first = self.agents[0]
        return mps_environment(first.policy, first.where)

    @property
    def environment(self) -> dict[str, str]:
        """What users' programs need, who name no instance."""
        return environment([agent.policy for agent in (self.agents[:1] if self.own else self.agents)])

    def environment_of(self, name: str) -> dict[str, str]:
        """What programs need that are for this instance. Where all share one directory that is the same."""
        agent = next((one for one in self.agents if one.name == name), None)
        return environment([agent.policy]) if self.own and agent is not None else self.environment

    # --- start and stop -----------------------------------------------------------------------------------------------

    async def start(self, make_supervisor: MakeSupervisor) -> None:
        """Read the policy, take over or prepare, read the logs, reach the gate. Returns when the agent is at work.
        Raises AlreadyLocked when another agent is, DirectoryRefused or OSError where the directories are of no use, or
        the instances cannot be known."""
        asyncio.get_running_loop().set_exception_handler(self.loop_failed)
        earlier = self.store.load()
        for text in self.store.notes:
            log.warning("store", text=text)
        self.inherited = bool(earlier)
        kept = earlier.pop(saved.CLOCK, None)
        if not self.clock.same_boot(kept):
            earlier = {key: value for key, value in earlier.items() if key.rpartition("/")[2] not in saved.OF_BOOT}
        self.moved = self.clock.carry_on(kept)
        if self.moved:
            earlier = saved.moved(earlier, self.moved)
            for key, value in earlier.items():
                self.store.put(key, value)
        self.store.put(saved.CLOCK, self.clock.kept())
        await self._first_policy()
        self.make_supervisor = make_supervisor
        found = await self._instances()
        self.single, self.first = len(found) == 1, found[0].instance
        self.agents += [self._make(policy) for policy in found]
        for agent in self.agents:
            agent.prepare()
        await self.keeper.start()
        kept = [self._earlier(earlier, agent) for agent in self.agents]
        self.store.put(saved.LEASES, self._leases(earlier) or None)
        self.store.put(saved.INSTANCE, self.first if self.single else None)
        for agent in self.agents if not self.single else ():
            agent.store.put(saved.LEASES, None)
        await asyncio.gather(*(agent.begin(one) for agent, one in zip(self.agents, kept, strict=True)))
        self.shown.start(self.started)
        self.placing.link.start()
        await self._install_device()
        self._watch = DeviceWatch(self.settings.device_directory, self._gpu_opened, lambda: self.gpus.nvml.asking)
        self.spawn(self._look())

    def _make(self, policy: Policy) -> Agent:
        return Agent(
            policy,
            settings=self.settings,
            shown=self.shown,
            telling=self.telling,
            clock=self.clock,
            store=self.store if self.single else StorePart(self.store, policy.instance),
            names=self.names,
            link=self.placing.link,
            seen=self.gpus,
            make_supervisor=self.make_supervisor,
            since=self.started if self.inherited else None,
            named=lambda: not self.single,
            inside=lambda: [each for one in self.agents for each in one.inside],
            decided=self._decided,
            changed=self._lanes_changed,
            room=self._room,
        )

    def _decided(self, agent: Agent) -> None:
        """An instance has decided."""
        if len(self.agents) > 1 and not (agent.state.clients or agent.state.held):
            self.placing.idle()

    def _lanes_changed(self) -> None:
        self.single = self.single and all(len(one.lanes) == 1 for one in self.agents)
        self.placing.name_all()

    def _room(self) -> str | None:
        """Why there may be no further lane."""
        count = sum(len(one.lanes) + len(one.going) for one in self.agents)
        return f"there are {MOST_INSTANCES} control daemons already" if count >= MOST_INSTANCES else None

    async def _instances(self) -> Sequence[Policy]:
        """A policy for each instance. Raises OSError when that depends on GPUs that cannot be found."""
        if needs_modes(self.policy):
            self._exclusive = await gpus.exclusive(self.settings, self.gpus)
        if needs_devices(self.policy) or self._exclusive:
            found = await gpus.find(self.settings, os.environ)
            self._machine = gpus.remembered(self.settings, ()) if isinstance(found, str) else found
            if isinstance(found, str) and not self._machine:
                why = 'devices = ["each"]' if needs_devices(self.policy) else "a GPU in EXCLUSIVE_PROCESS mode"
                raise OSError(f"{why} needs the GPUs, and they cannot be found: {found}")
            gpus.remember(self.settings, (), self._machine)
        made = instances(self.policy, self._machine, self._exclusive)
        if not made:
            raise OSError('devices = ["each"], and there is no GPU; see nvidia-smi -L')
        self.own = self.policy.placement == "by-directory"
        return with_own_directories(made, self.settings.run_directory) if self.own else made

    def _earlier(self, everything: dict[str, Any], agent: Agent) -> dict[str, Any]:
        """Return what the agent before has kept of an instance. An agent that looked after a single instance did not
        name it: then it is moved, because a value that stays behind comes back one day (seen: a drain that had been
        over for long). Leases and a drain of the whole node hold at instances that are new, too."""
        prefix, alone = f"{agent.name}/", len(self.agents) == 1
        mine = {key.removeprefix(prefix): value for key, value in everything.items() if key.startswith(prefix)}
        plain = {key: value for key, value in everything.items() if "/" not in key and key not in saved.OF_NODE}
        names = [one.name for one in self.agents]
        only = everything.get(saved.INSTANCE)
        heir = only if only in names else names[0]
        here, there = (plain, mine) if alone else (mine, plain if agent.name == heir else {})
        for key, value in there.items():
            self.store.put(f"{prefix}{key}" if alone else key, None)
            if not here:
                agent.store.put(key, value)
        found = here or there
        drained = everything.get(saved.DRAINED) or plain.get("drain")
        if not found and not alone and drained:
            agent.store.put("drain", drained)
            found = {"drain": drained}
        return {**found, saved.LEASES: self._leases(everything)}

    def _leases(self, everything: dict[str, Any]) -> Any:
        """Return the leases that the agent before has kept: once, or in an earlier version with each instance."""
        each = (everything.get(f"{one.name}/{saved.LEASES}") for one in self.agents)
        return next((rows for rows in (everything.get(saved.LEASES), *each) if rows), [])

    async def end(self) -> None:
        """Let go of everything. MPS and the gate run on, unless the policy says otherwise (``agent.on_stop``)."""
        await asyncio.gather(*(agent.end() for agent in self.agents))
        self.stopping = True
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.placing.close()
        self.keeper.close()
        if self._watch is not None:
            self._watch.close()
        if self._follow_up is not None:
            self._follow_up.cancel()
        self.gpus.nvml.close()
        self.people.close()
        self.store.close()
        await self.shown.close()
        await self.api.close()
        self.telling.close()

    def _gpu_opened(self) -> None:
        """Who computes outside MPS is looked at now, and again when its context should be made."""
        if self._follow_up is not None:
            self._follow_up.cancel()
        self._look_outside()
        self._follow_up = asyncio.get_running_loop().call_later(FOLLOW_UP, self._look_outside)

    def _look_outside(self) -> None:
        self.gpus.processes.forget()
        for agent in self.agents:
            agent.observer.outside()

    # --- what is wrong ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while not self.stopping:
            await asyncio.sleep(until_next(LOOK))
            try:
                self._look_around(self.clock.now())
            except Exception as error:
                self.failed("a regular look at the node failed", error)

    def _look_around(self, now: float) -> None:
        self.conditions.expire(now)
        self._look_at_modes(now)
        self.shown.changed()
        self._look_at_api(now)
        self._look_at_opens(now)
        self._look_at_gate(now)
        self._look_at_sockets(now)
        if not self._foreign_busy and now >= self._foreign_at:
            self._foreign_at, self._foreign_busy = now + FOREIGN_EVERY, True
            self.spawn(self._look_for_others())
        unplaced = self.placing.unplaced
        what = f"{unplaced} connections wait until the name service says whose they are" if unplaced else None
        self.conditions.set(
            "names", what, now, "make getent passwd UID answer: the policy says by name where a user belongs"
        )

    def _look_at_modes(self, now: float) -> None:
        """A GPU that has come to EXCLUSIVE_PROCESS mode, or has left it, is shared in another way from now on."""
        shut = self.gpus.exclusive(self._exclusive)
        if shut == self._exclusive or not needs_modes(self.policy):
            return
        self._exclusive = shut
        if not self._machine:
            self._machine = next((agent.devices for agent in self.agents if not agent.policy.devices), ())
        gpus.remember_exclusive(self.settings, shut)
        self.conditions.set("restart", self._use(self.policy), now, "systemctl restart mpsagent")

    def _look_at_api(self, now: float) -> None:
        lost = f", {self.shown.lost} lost" if self.shown.lost else ""
        away = f"the api is away: {self.shown.away} ({len(self.shown.kept)} records wait{lost})"
        do = "it is started again by itself; see journalctl -u mpsagent-api"
        self.conditions.set("api", None if self.shown.away is None else away, now, do)

    def _look_at_gate(self, now: float) -> None:
        path, problem = f"{self.where.public}/control", self.placing.link.problem
        do = "clients are held, or served by what the agent told the gate last; see the gate's own log"
        if self.settings.supervise == "systemd":
            do = "clients are held; systemctl start mpsagent-gate, and see journalctl -u mpsagent-gate"
        self.conditions.set("gate", problem, now, do)
        wrong, opens = unusable(path, users=True) or ("", "")
        there = not wrong or opens != ""
        what = f"{wrong}: programs that start now run outside MPS, without limits"
        do = "systemd, or else the gate's parent process, makes it again; if not, see the journal or gate.log"
        self.conditions.set("public directory", what if wrong else None, now, opens or do)
        self.conditions.set("public directory refused", refusal(self.where.public), now)
        what = f"{path}_privileged has gone: root's front-ends come to {path}, where users can delay them"
        do = "the gate's parent process makes it again; if not, see gate.log"
        if self.settings.supervise == "systemd":
            do = "systemctl stop mpsagent-gate-privileged.socket; systemctl restart mpsagent-gate"
        gone = there and problem is None and not os.path.lexists(f"{path}_privileged")
        self.conditions.set("privileged socket", what if gone else None, now, do, sure=False)
        # one that another control daemon serves is left to it until that has gone
        missing = not there or problem is not None
        self.keeper.look(missing=missing and "foreign daemon" not in self.conditions.topics())

    def _look_at_sockets(self, now: float) -> None:
        """A process that listens does not notice that its socket's file is gone, and no connection comes any more."""
        orders, admin = (str(of(Path(self.settings.socket))) for of in (orders_path, administrators_path))
        again = sockets_again() if self.settings.supervise == "systemd" else "start the agent again"
        for path, sure, so in (
            (orders, True, "users cannot end their own clients"),
            (admin, False, f"administrators' orders come to {orders}, where users can delay them"),
        ):
            wrong, do = unusable(path, users=path == orders) or ("", "")
            if not wrong and self.listens and path not in self.listens:
                wrong = f"no process listens on {path}"
            self.conditions.set(f"socket {path}", f"{wrong}: {so}" if wrong else None, now, do or again, sure=sure)

    async def _look_for_others(self) -> None:
        """Daemons of others are named and left alone."""
        try:
            own = [one.daemon for agent in self.agents for one in agent.inside if one.daemon is not None]
            found = await foreign(self.where.public, own, self.agents[0].policy.control_daemon_path)
        except (OSError, TimeoutError):
            return
        finally:
            self._foreign_busy = False
        now, place = self.clock.now(), Path(self.settings.run_directory, "instances")
        known = {lane.name for one in self.agents for lane in one.lanes.values()}
        known = known.union(*(one.going for one in self.agents))
        left = [(one, name) for one in found if (name := one.of_instance(place)) is not None and name not in known]
        serving = [one for one in found if one.public]
        if serving or left:
            self._foreign_at = now + FOREIGN_AGAIN
        what = "; ".join(one.text() for one in serving) or None
        do = " && ".join(one.command() for one in serving)
        self.conditions.set("foreign daemon", what, now, do)
        what = "; ".join(f'control daemon {one.pid} of an instance "{name}"' for one, name in left)
        what = (
            f"the policy no longer has the instances of these, which run on with their clients: {what}"
            if left
            else None
        )
        do = f"when those clients have ended: {' && '.join(one.command() for one, _ in left)}"
        self.conditions.set("daemon left", what, now, do)

    def _look_at_opens(self, now: float) -> None:
        if self._watch is not None:
            self._watch.look()
            do = f"programs outside MPS are looked for every {BLIND} s instead; see fs.inotify.max_user_instances"
            self.conditions.set("gpu opens", self._watch.problem, now, do)

    # --- what the api shows -------------------------------------------------------------------------------------------

    def page(self) -> Page:
        """The page for the api. Its users are those who have to do with MPS now."""
        self._look_at_api(self.clock.now())  # it has come since the last look
        nvml, seen = self.gpus.nvml, self.gpus
        names = dict(self.people.known) | {uid: who for one in self.agents for uid, who in one.people.known.items()}
        return Page(
            os.getpid(), self.started, self.clock.at(0.0), self.moved, self._instances_shown(),
            self.all_conditions(), self.policy, self.policy_loaded, [str(one) for one in self.policy_errors],
            self.environment, names, self.single, self.first, () if self.single else self.placing.places(),
            GpusSeen(seen.seen, dict(nvml.xids), dict(nvml.xids_seen), seen.at, seen.problem),
        )  # fmt: skip

    def _instances_shown(self) -> list[InstancePage]:
        """Each instance, and then each user's lane."""
        users = [(agent, key) for agent in self.agents for key in agent.core.engines if key is not None]
        return [self._shown(agent, key) for agent, key in (*((agent, None) for agent in self.agents), *users)]

    def _shown(self, agent: Agent, key: Key) -> InstancePage:
        view, limits = agent.core.view(key), agent.core.engines[key].memories.limits
        memory = agent.observer.memory()
        return InstancePage(
            view.name, replace(view, remembered={}),
            {pid: pid not in limits.differs for pid in limits.seen}, bool(agent.devices),
            {pid: size for pid, size in memory.items() if pid in view.state.clients},
            tuple(agent.bypass.found.values()) if key is None else (), self.environment_of(agent.name),
            waiting(view, agent.clock.now()),
        )  # fmt: skip

    async def _look_again(self) -> None:
        """Somebody asks how much memory is in use."""
        await asyncio.gather(*(agent.observer.look_again(GPU_WAIT) for agent in self.agents))

    # --- what is wrong, in sum ----------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        """Who comes now is served or held at every instance, but where only a person can help."""
        return all(
            self._hopeless(one) or all(self._serves(one.core.view(key)) for key in one.core.engines)
            for one in self.agents
        )

    def _serves(self, view: View) -> bool:
        """The control daemon runs, and the gate has its table."""
        gate = view.state.gate
        if gate is None or not gate.synced or not view.settled:
            return False
        return view.control_alive or view.state.drain is not None or not view.wanted

    def _hopeless(self, agent: Agent) -> bool:
        return not HOPELESS.isdisjoint([*agent.conditions.topics(), *self.conditions.topics()])

    def all_conditions(self) -> tuple[Condition, ...]:
        """Of the agent and all instances; what several of them say is said once."""
        found: dict[tuple[str, str], Condition] = {}
        every: list[tuple[tuple[str, ...], Conditions]] = [((), self.conditions)]
        every += [
            (() if self.single else (lane.name,), lane.conditions)
            for agent in self.agents for lane in agent.lanes.values()
        ]  # fmt: skip
        for where, conditions in every:
            for one in conditions.all():
                first = found.setdefault((one.what, one.do), one)
                found[one.what, one.do] = replace(first, where=(*first.where, *where))
        return tuple(sorted(found.values(), key=lambda one: one.since or 0.0))

    # --- the policy ---------------------------------------------------------------------------------------------------

    async def _first_policy(self) -> None:
        begun = await policies.start(self.settings)
        now = self.clock.now()
        self.policy = begun.policy
        self.policy_errors = begun.errors
        if begun.errors:
            self._policy_rejected(begun.errors, begun.kept, now)
        else:
            self.policy_loaded = now
            self.record("policy.loaded", now, digest=begun.policy.digest, files=list(begun.policy.sources))

    async def load_policy(self) -> policies.Loaded:
        """Read the policy files anew. A bad policy never replaces a good one."""
        async with self._loading:
            policy, errors = await policies.read(self.settings)
        now = self.clock.now()
        self.policy_errors = errors
        if policy is None:
            self._policy_rejected(errors, "the policy from before stays in force", now)
            return policies.Loaded(self.policy, errors, None)
        self.conditions.set("policy", None, now)
        self.policy_loaded, self.policy = now, policy
        self.record("policy.loaded", now, digest=policy.digest, files=list(policy.sources))
        later = self._use(policy)
        self.conditions.set("restart", later, now, "systemctl restart mpsagent")
        self._look_at_modes(now)
        self.people.refresh()
        self.placing.again()
        await self._install_device()
        return policies.Loaded(policy, (), later)

    async def _install_device(self) -> None:
        """Containers find the gate by a file that the policy names."""
        path = self.policy.cdi_file
        if path is not None:
            wanted = container_device.text(self.where.public, self.environment)
            try:
                what = await in_thread(container_device.install, path, wanted, deadline=5.0)
            except TimeoutError:
                what = f"{path} cannot be written within 5 s"
            if what is not None:
                what = f"containers do not find MPS: {what}"
            do = "make its directory, which mpsagent.service must be able to write; then mpsagent-cli reload"
            self.conditions.set("container device", what, self.clock.now(), do)
        else:
            self.conditions.set("container device", None, self.clock.now())

    def _use(self, policy: Policy) -> str | None:
        """Each instance goes by it from now on. What has to wait until the agent is started again, in words."""
        fresh = self.each_of(policy)
        left: list[str | None] = []
        for agent in self.agents:
            if (one := fresh.pop(agent.name, None)) is None:
                one = without_section(policy, agent.policy)
                left.append(f"{agent.name} removed: its settings stay until mpsagent is restarted")
            left.append(agent.use_policy(one))
        if fresh:
            left.append(f"{', '.join(fresh)} added: takes effect when mpsagent is restarted")
        if self.own is not (policy.placement == "by-directory"):
            left.append(f'placement = "{policy.placement}" takes effect when mpsagent is restarted')
        return "; ".join(dict.fromkeys(one for one in left if one is not None)) or None

    def each_of(self, policy: Policy) -> dict[str, Policy]:
        """What a policy says of each instance, by the names that they have now."""
        made = instances(policy, self._machine, self._exclusive)
        if self.own:
            made = with_own_directories(made, self.settings.run_directory)
        fresh = {one.instance: one for one in made}
        if len(self.agents) == len(fresh) == 1:  # a name that changed is among what waits
            return {self.agents[0].name: next(iter(fresh.values()))}
        return fresh

    def _policy_rejected(self, errors: Sequence[PolicyError], kept: str, now: float) -> None:
        what = f"{errors[0]} ({len(errors)} mistake{'s' if len(errors) > 1 else ''}; {kept})"
        self.conditions.set("policy", what, now, "mpsagent-cli policy check")
        first = str(errors[0]._replace(hint=""))  # the journal has a line for it
        self.record("policy.rejected", now, first=first, errors=[str(error) for error in errors[:20]], kept=kept)
