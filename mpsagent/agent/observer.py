"""What announces itself by nothing and is looked at from time to time: stopped processes, idle clients, the public
socket, logs that have gone, a full disk, daemons of others, processes outside MPS, the compute mode."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mpsagent.agent import bypass
from mpsagent.agent.recorder import FORGET
from mpsagent.core import inputs as inp
from mpsagent.system import devices as gpus
from mpsagent.system.control_search import foreign
from mpsagent.system.nvml import ComputeProcess
from mpsagent.system.processes import start_time, stopped
from mpsagent.system.threads import in_thread

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent

DISK_EVERY = 10.0
FOREIGN_EVERY, FOREIGN_AGAIN = 30.0, 3.0
"""Seconds between two looks for daemons of others; sooner while there is one."""
CPU_EVERY = 5.0
"""Seconds between two readings of the CPU time of clients."""
FRESH, FRESH_CLIENT = 5.0, 1.0
"""Seconds for which what the GPUs have said is good enough for who asks; while there is a client that came later."""
MEMORY_EVERY = 1.5
"""Seconds after which it is looked again what clients with a memory limit use; with a round each second that is every
other one, so who is beyond it is found within 3 s."""
BLIND = "faults and server ends are not seen meanwhile"


class Observer:
    """The looks of one agent; :meth:`once` every second."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._disk_at = self._foreign_at = self._survey_at = self._cpu_at = float("-inf")
        self._disk_busy = self._foreign_busy = self._survey_busy = False
        self._outside_busy = self._outside_again = False
        self._idle: dict[int, float] = {}
        self._other: int | None = None
        self.modes: dict[str, str] = {}
        """Compute modes by UUID, as they were seen last."""
        self._memory: dict[int, int] = {}
        self._memory_at = self._looked_at = float("-inf")
        self._surveying: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[None] | None = None

    def once(self) -> list[inp.Input]:
        """One round, without waiting for anything; what the engine should know of it."""
        agent = self._agent
        now, state = agent.clock.now(), agent.state
        first = agent is agent.node.agents[0]  # what is the machine's is looked at for all
        if first:
            self._gate(now)
        self._logs(now)
        if agent.bypass.due(now):
            agent.node.gpus.processes.forget()
            self.outside()
        agent.conditions.set("bypass", agent.bypass.trouble(), now, bypass.advice(agent.policy.pipe_directory))
        agent.unlimited.look()
        do = "MPS cannot prevent it (docs/security.md): mpsagent-cli client terminate PID, or the policy's over_limits"
        agent.conditions.set("over limits", agent.unlimited.trouble(), now, do)
        agent.conditions.expire(now)
        if self._other is not None and start_time(self._other) is None:
            self._other = None
            agent.conditions.set("other daemon", None, now)
        busy = state.clients or state.held or any(one.state.clients for one in agent.node.apart.of(agent))
        due = min(self._survey_at, self._memory_at + FRESH) if self._memory_counts() else self._survey_at
        if not self._survey_busy and now >= due and (busy or agent.bypass.found):
            self.survey()
        limited = any(client.most_memory for client in state.clients.values())
        idle = self._listing is None or self._listing.done()
        if limited and idle and now >= self._memory_at + MEMORY_EVERY:
            self._listing = agent.spawn(self._weigh())
        if first and not self._foreign_busy and now >= self._foreign_at:
            self._foreign_at, self._foreign_busy = now + FOREIGN_EVERY, True
            agent.spawn(self._foreign())
        return [self._processes(now)]

    def _memory_counts(self) -> bool:
        """Whether the present user can be paused for another one depends on how much memory is in use."""
        view = self._agent.core.view()
        return view.turn is not None and view.turn.contested is not None and view.may_pause(view.turn.uid)

    def other_daemon(self, pid: int) -> None:
        """Lines of another control daemon stand in our logs. Said for as long as that runs, or for a while."""
        self._other = pid
        now, directory = self._agent.clock.now(), self._agent.policy.log_directory
        what = f"another control daemon (process {pid}) writes into the same log files"
        do = f"give it a log directory of its own; {directory} is this instance's"
        self._agent.conditions.set("other daemon", what, now, do, until=now + FORGET)

    def _processes(self, now: float) -> inp.ProcessesSeen:
        agent, state = self._agent, self._agent.state
        pids = [*state.servers, *([state.control.pid] if state.control is not None else [])]
        pids += [held.peer.pid for held in state.held.values() if held.handing is not None]
        found = frozenset(pid for pid in pids if stopped(pid)) | agent.clients.stopped()
        if now >= self._cpu_at + CPU_EVERY:
            self._cpu_at = now
            view = agent.core.view()
            matters = [c.pid for c in state.clients.values()
                       if state.held and view.rules(c.uid).idle_timeout is not None]  # fmt: skip
            self._idle = dict(agent.clients.idle_since(matters, now))
        frozen = [client.pid for client in state.clients.values() if client.frozen is not None]
        agent.clients.forget_idle(frozen)
        for pid in frozen:
            self._idle.pop(pid, None)
        return inp.ProcessesSeen(now, found, dict(self._idle), dict(agent.unlimited.found))

    def _gate(self, now: float) -> None:
        agent, path = self._agent, self._agent.policy.pipe_directory
        do = "clients are held, and served as the gate was told last; see the gate's own log"
        agent.conditions.set("gate", agent.gate.link.problem, now, do)
        there = os.path.lexists(f"{path}/control")
        what = f"{path}/control has gone: who starts now runs outside MPS, without limits"
        do = "the agent has systemd make it again, or the gate's keeper does; if not, see the journal or gate.log"
        agent.conditions.set("public directory", None if there else what, now, do)
        # one that another control daemon serves is left to it until that has gone
        missing = not there or agent.gate.link.problem is not None
        agent.node.keeper.look(missing=missing and "foreign daemon" not in agent.conditions.topics())

    def _logs(self, now: float) -> None:
        agent = self._agent
        running = agent.supervisor.running is not None
        for name, follower in agent.logs.followers.items():
            gone = running and follower.missing and agent.up_since is not None and now > agent.up_since + 3.0
            what = f"{follower.path} has gone while MPS runs; MPS never opens it again"
            do = f"{BLIND}, unless the agent has the old file open still; when all is idle: mpsagent-cli restart"
            agent.conditions.set(f"{name}.log missing", what if gone else None, now, do)
        if running and now >= self._disk_at + DISK_EVERY and not self._disk_busy:
            self._disk_at, self._disk_busy = now, True
            agent.spawn(self._disk())

    async def _disk(self) -> None:
        agent, path = self._agent, self._agent.policy.log_directory
        try:
            found = await in_thread(os.statvfs, path, deadline=5.0)
            full = found.f_bavail == 0 and found.f_blocks > 0
            what = f"{path}: the disk is full, so MPS cannot write its logs" if full else None
        except TimeoutError:
            what = f"{path}: the file system does not answer"
        except OSError:  # it is not there: said elsewhere
            what = None
        finally:
            self._disk_busy = False
        agent.conditions.set("log disk", what, agent.clock.now(), BLIND)

    async def _foreign(self) -> None:
        """Daemons of others are named and left alone."""
        agent = self._agent
        try:
            running = [one.supervisor.running for one in agent.node.agents]
            own = [one.pid for one in running if one is not None]
            found = await foreign(agent.policy.pipe_directory, own, agent.policy.control_program)
        except (OSError, TimeoutError):
            return
        finally:
            self._foreign_busy = False
        now, place = agent.clock.now(), Path(agent.settings.run_directory, "instances")
        known = {one.name for one in agent.node.agents} | agent.node.apart.going
        left = [(one, name) for one in found if (name := one.of_instance(place)) is not None and name not in known]
        serving = [one for one in found if one.public]
        if serving or left:
            self._foreign_at = now + FOREIGN_AGAIN
        what = "; ".join(one.text() for one in serving) or None
        do = " && ".join(one.command() for one in serving)
        agent.conditions.set("foreign daemon", what, now, do)
        what = "; ".join(f'control daemon {one.pid} of an instance "{name}"' for one, name in left)
        what = f"the policy has these no more, and they run on with their clients: {what}" if left else None
        do = f"when those clients have ended: {' && '.join(one.command() for one, _ in left)}"
        agent.conditions.set("daemon left", what, now, do)

    # --- the GPUs -----------------------------------------------------------------------------------------------------

    def survey(self) -> None:
        """Look at what computes on our GPUs, and at their compute modes, aside."""
        self._survey_busy, self._looked_at = True, self._agent.clock.now()
        self._surveying = self._agent.spawn(self._survey())

    def memory(self) -> Mapping[int, int]:
        """Bytes of device memory by pid, of those who were clients already when it was last looked; empty when that is
        long ago."""
        now, state = self._agent.clock.now(), self._agent.state
        if now > self._memory_at + 2 * bypass.EVERY:
            return {}
        return {
            pid: size for pid, size in self._memory.items()
            if (client := state.clients.get(pid)) is not None and client.since <= self._memory_at
        }  # fmt: skip

    async def look_again(self, most: float) -> None:
        """A person asks: look again, unless that was just done, and wait ``most`` seconds for it. While no client is
        there it is looked at once a minute, and only for who asks: an idle node stays idle."""
        clients = self._agent.state.clients.values()
        later = any(client.since > self._memory_at for client in clients)
        due = self._looked_at + (FRESH_CLIENT if later else FRESH if clients else bypass.EVERY)
        if not self._survey_busy and self._agent.clock.now() > due:
            self.survey()
        if most and self._survey_busy and self._surveying is not None:
            await asyncio.wait({self._surveying}, timeout=most)

    async def _survey(self) -> None:
        try:
            if self._agent.policy.user is None:
                await self._gpus()
            await self._processes_on_gpus()
        finally:
            self._survey_busy = False
            # at the same moments for all instances, so that the GPUs are asked once
            self._survey_at = (self._agent.clock.now() // bypass.EVERY + 1) * bypass.EVERY

    def outside(self) -> None:
        """A GPU has been opened: look who is outside MPS, aside."""
        if self._outside_busy:
            self._outside_again = True
            return
        self._outside_busy = True
        self._agent.spawn(self._outside())

    async def _outside(self) -> None:
        try:
            await self._processes_on_gpus()
        finally:
            self._outside_busy = False
        if self._outside_again:
            self._outside_again = False
            self.outside()

    async def _processes_on_gpus(self) -> None:
        """Those outside MPS, and the memory of all."""
        agent, listed = self._agent, await self._listed()
        if listed is None or agent.policy.user is not None:
            return  # the template looks for all
        for one in await agent.bypass.look(listed):
            seen = one.seen
            agent.record(
                "bypass", agent.clock.now(), pid=seen.pid, uid=seen.uid, device=seen.device, memory=seen.memory,
                command=one.facts.command, began=one.facts.began, reason=one.why,
                text=f"process {seen.pid} of user {seen.uid} computes on {seen.device} outside MPS: {one.why}",
            )  # fmt: skip

    async def _weigh(self) -> None:
        await self._listed()

    async def _listed(self) -> tuple[ComputeProcess, ...] | None:
        """What computes on the GPUs, and with how much memory; None: NVML does not say."""
        agent = self._agent
        listed = await agent.node.gpus.processes()
        if isinstance(listed, str):  # it is asked again, and said
            return None
        self._memory, self._memory_at = gpus.memory_by_pid(listed), agent.clock.now()
        agent.take([inp.MemorySeen(self._memory_at, gpus.memory_by_device(listed))])
        return listed

    async def _gpus(self) -> None:
        """The GPUs themselves, and their compute modes."""
        agent, seen = self._agent, self._agent.node.gpus
        await seen.look()
        now = agent.clock.now()
        self.modes = {uuid: one.mode for uuid, one in seen.seen.items() if one.mode is not None}
        do = "memory in use, compute modes and programs outside MPS are not known meanwhile; it is asked again"
        agent.conditions.set("nvml", seen.problem, now, do)
        do = "see dmesg for Xid events; a GPU that is lost needs a reset or a reboot"
        agent.conditions.set("gpu lost", seen.lost(), now, do)
        wanted = agent.policy.compute_mode
        what = bypass.mode_trouble(wanted, self.modes, [device.uuid for device in agent.devices])
        number = {"default": "DEFAULT", "exclusive-process": "EXCLUSIVE_PROCESS"}.get(wanted, "MODE")
        do = f"it was changed, or not set when the control daemon started: nvidia-smi -i GPU -c {number}"
        agent.conditions.set("compute mode", what, now, do)
