"""What announces itself by nothing and is looked at from time to time: stopped processes, idle clients, the public
socket, logs that have gone, a full disk, daemons of others, processes outside MPS, the compute mode."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from mpsagent.agent import bypass
from mpsagent.agent.executor import mps_environment
from mpsagent.agent.recorder import FORGET
from mpsagent.core import inputs as inp
from mpsagent.system import devices as gpus
from mpsagent.system.control_search import foreign
from mpsagent.system.processes import start_time, stopped
from mpsagent.system.threads import in_thread

if TYPE_CHECKING:
    from mpsagent.agent.host import Agent

DISK_EVERY = 10.0
FOREIGN_EVERY, FOREIGN_AGAIN = 30.0, 3.0
"""Seconds between two looks for daemons of others; sooner while there is one."""
CPU_EVERY = 5.0
"""Seconds between two readings of the CPU time of clients."""
BLIND = "faults and server ends are not seen meanwhile"


class Observer:
    """The looks of one agent; :meth:`once` every second."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._disk_at = self._foreign_at = self._survey_at = self._cpu_at = float("-inf")
        self._disk_busy = self._foreign_busy = self._survey_busy = False
        self._idle: dict[int, float] = {}
        self._other: int | None = None

    def once(self) -> list[inp.Input]:
        """One round, without waiting for anything; what the engine should know of it."""
        agent = self._agent
        now, state = agent.clock.now(), agent.state
        self._gate(now)
        self._logs(now)
        agent.bypass.drop_ended()
        agent.conditions.set("bypass", agent.bypass.trouble(), now, bypass.advice(agent.policy.pipe_directory))
        agent.conditions.expire(now)
        if self._other is not None and start_time(self._other) is None:
            self._other = None
            agent.conditions.set("other daemon", None, now)
        if not self._survey_busy and now >= self._survey_at and (state.clients or state.held):
            self.survey()
        if not self._foreign_busy and now >= self._foreign_at:
            self._foreign_at, self._foreign_busy = now + FOREIGN_EVERY, True
            agent.spawn(self._foreign())
        return [self._processes(now)]

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
        return inp.ProcessesSeen(now, found, dict(self._idle))

    def _gate(self, now: float) -> None:
        agent, path = self._agent, self._agent.policy.pipe_directory
        do = "clients are held, and served as the gate was told last; see the gate's own log"
        agent.conditions.set("gate", agent.gate.link.problem, now, do)
        there = os.path.lexists(f"{path}/control")
        what = f"{path}/control has gone: who starts now runs outside MPS, without limits"
        do = "systemctl restart mpsagent-gate.socket mpsagent-gate (or restart the gate's keeper)"
        agent.conditions.set("public directory", None if there else what, now, do)

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
            running = agent.supervisor.running
            own = [running.pid] if running is not None else []
            found = await foreign(agent.policy.pipe_directory, own, agent.policy.control_program)
        except (OSError, TimeoutError):
            return
        finally:
            self._foreign_busy = False
        serving = [one for one in found if one.public]
        if serving:
            self._foreign_at = agent.clock.now() + FOREIGN_AGAIN
        what = "; ".join(one.text() for one in serving) or None
        do = " && ".join(one.command() for one in serving)
        agent.conditions.set("foreign daemon", what, agent.clock.now(), do)

    # --- the GPUs -----------------------------------------------------------------------------------------------------

    def survey(self) -> None:
        """Look at what computes on our GPUs, aside."""
        self._survey_busy = True
        self._survey_at = self._agent.clock.now() + bypass.EVERY
        self._agent.spawn(self._survey())

    async def _survey(self) -> None:
        try:
            with suppress(OSError, ValueError, TimeoutError):  # of the simulator's files
                await self._outsiders()
                await self._modes()
        finally:
            self._survey_busy = False
            self._survey_at = self._agent.clock.now() + bypass.EVERY

    async def _outsiders(self) -> None:
        agent, file = self._agent, self._agent.settings.devices_file
        if file is None:
            listed = await gpus.compute_processes(mps_environment(agent.policy, agent.where))
        else:
            listed = await in_thread(gpus.simulated_processes, file, deadline=5.0)
        if isinstance(listed, str):  # the device search says it too, and tries again
            return
        state = agent.state
        known = {*state.servers, *state.clients, *(held.peer.pid for held in state.held.values())}
        for one in agent.bypass.take(listed, [device.uuid for device in agent.devices], known):
            agent.record("bypass", agent.clock.now(), pid=one.pid, uid=one.uid, device=one.device, memory=one.memory,
                         text=f"process {one.pid} of user {one.uid} computes on {one.device} outside MPS")  # fmt: skip

    async def _modes(self) -> None:
        agent, file = self._agent, self._agent.settings.devices_file
        wanted, what = agent.policy.compute_mode, None
        if wanted is not None:
            if file is None:
                modes = await gpus.compute_modes(mps_environment(agent.policy, agent.where))
            else:
                modes = await in_thread(gpus.simulated_modes, file, deadline=5.0)
            ours = [device.uuid for device in agent.devices]
            what = None if isinstance(modes, str) else bypass.mode_trouble(wanted, modes, ours)
        number = {"default": "DEFAULT", "exclusive-process": "EXCLUSIVE_PROCESS"}.get(wanted or "", "MODE")
        do = f"nvidia-smi -i GPU -c {number}; the agent never sets it"
        agent.conditions.set("compute mode", what, agent.clock.now(), do)
