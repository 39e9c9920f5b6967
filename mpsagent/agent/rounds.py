"""What announces itself by nothing and is looked at from time to time: stopped processes, the pipe directory's mode and
socket, logs that have gone, a full disk, processes outside MPS, the compute mode."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from mpsagent.agent import bypass
from mpsagent.agent.adoption import started_at
from mpsagent.agent.catch_up import settled
from mpsagent.agent.performer import mps_environment
from mpsagent.system import devices as gpus
from mpsagent.system import pipedir
from mpsagent.system.threads import in_thread

if TYPE_CHECKING:
    from mpsagent.agent.loop import Agent

SETTLE = 3.0
"""Seconds in which a daemon should have written its first line."""
DISK_EVERY = 10.0
BLIND = "nobody can be armed for meanwhile, so new users get the floor's limits"


class Rounds:
    """The looks of one agent; :meth:`once` every second."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._unsettled: float | None = None
        self._disk_at = float("-inf")
        self._disk_busy = False
        self._survey_at = float("-inf")
        self._survey_busy = False

    def once(self) -> bool:
        """One round, without waiting for anything. True when something has changed that decisions look at."""
        agent = self._agent
        now, running = agent.clock.now(), agent.supervisor.running
        control = running.process if running is not None else None
        pids = [*agent.state.servers, *([control.pid] if control is not None else [])]
        changed = agent.processes.look(pids, control, agent.idle_matters(), now)
        changed |= self._directory(now) | self._settle(now)
        self._logs(now)
        self.will()
        agent.bypass.drop_ended()
        here = agent.policy.pipe_directory
        agent.troubles.set("bypass", agent.bypass.trouble(), now, bypass.advice(here))
        full = "more processes wait or work than can be followed (1024); the newest are not"
        do = "mpsagent-cli queue says whose they are"
        agent.troubles.set("processes", full if agent.processes.overflow else None, now, do)
        agent.troubles.expire(now)
        if not self._survey_busy and now >= self._survey_at and (agent.world().holder() or agent.state.waiting):
            self.survey()
        return changed

    def will(self) -> None:
        """See that somebody sets the floor if the agent dies."""
        agent = self._agent
        what = agent.performer.keep_will(agent.world().limits_enforced)
        do = "without it a user may get another's limits while no agent runs; is the machine short of processes?"
        agent.troubles.set("last will", what, agent.clock.now(), do)

    def _directory(self, now: float) -> bool:
        """The mode of the pipe directory, and whether the daemon's socket is in it."""
        agent = self._agent
        running, path = agent.supervisor.running, agent.policy.pipe_directory
        there = running is None or pipedir.reachable(path)
        since = None if there else now if agent.unreachable_since is None else agent.unreachable_since
        door = running is not None and (not there or pipedir.is_open(path))
        changed = (since, door) != (agent.unreachable_since, agent.door_open)
        agent.unreachable_since, agent.door_open = since, door
        pid = running.pid if running is not None else 0
        what = f"{path}/control has gone: nobody reaches control daemon {pid}, new CUDA programs run outside MPS"
        do = "MPS is started anew when those at work have ended; to do it now: mpsagent-cli restart"
        agent.troubles.set("pipe directory", None if there else what, now, do)
        return changed

    def _settle(self, now: float) -> bool:
        """A daemon that runs and of whose start the log says nothing: known by its process alone."""
        agent = self._agent
        running, control = agent.supervisor.running, agent.state.control
        if running is None or (control is not None and control.pid == running.pid):
            self._unsettled = None
            return False
        if self._unsettled is None:
            self._unsettled = now
        if now < self._unsettled + SETTLE:
            return False
        agent.state = settled(agent.state, (running.pid, started_at(running.process)), agent.socket_path, now)
        agent.record("control.unannounced", now, pid=running.pid, text="its start is not in control.log")
        return True

    def _logs(self, now: float) -> None:
        agent = self._agent
        running = agent.supervisor.running is not None
        for name, follower in agent.followers.items():
            what = f"{follower.path} has gone while MPS runs; MPS never opens it again"
            gone = running and follower.missing and self._unsettled is None
            do = f"{BLIND}, unless the agent has the old file open still; when nobody works: mpsagent-cli restart"
            agent.troubles.set(f"{name}.log missing", what if gone else None, now, do)
        if running and now >= self._disk_at + DISK_EVERY and not self._disk_busy:
            self._disk_at, self._disk_busy = now, True
            agent.spawn(self._disk())

    async def _disk(self) -> None:
        agent, path = self._agent, self._agent.policy.log_directory
        try:
            found = await in_thread(os.statvfs, path, deadline=5.0)
            full = found.f_bavail == 0 and found.f_blocks > 0
            what = f"{path}: the disk is full, so MPS cannot write down who comes" if full else None
        except TimeoutError:
            what = f"{path}: the file system does not answer"
        except OSError:  # it is not there: said elsewhere
            what = None
        finally:
            self._disk_busy = False
        agent.troubles.set("log disk", what, agent.clock.now(), BLIND)

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
            listed = await gpus.compute_processes(mps_environment(agent.policy))
        else:
            listed = await in_thread(gpus.simulated_processes, file, deadline=5.0)
        if isinstance(listed, str):  # the device search says it too, and tries again
            return
        state = agent.state
        known = {*state.servers, *state.clients, *(w.pid for w in state.waiting)}
        for one in agent.bypass.take(listed, [device.uuid for device in agent.devices], known):
            agent.record("bypass", agent.clock.now(), pid=one.pid, uid=one.uid, device=one.device, memory=one.memory,
                         text=f"process {one.pid} of user {one.uid} computes on {one.device} outside MPS")  # fmt: skip

    async def _modes(self) -> None:
        agent, file = self._agent, self._agent.settings.devices_file
        wanted, what = agent.policy.compute_mode, None
        if wanted is not None:
            if file is None:
                modes = await gpus.compute_modes(mps_environment(agent.policy))
            else:
                modes = await in_thread(gpus.simulated_modes, file, deadline=5.0)
            ours = [device.uuid for device in agent.devices]
            what = None if isinstance(modes, str) else bypass.mode_trouble(wanted, modes, ours)
        number = {"default": "DEFAULT", "exclusive-process": "EXCLUSIVE_PROCESS"}.get(wanted or "", "MODE")
        do = f"nvidia-smi -i GPU -c {number}; the agent never sets it"
        agent.troubles.set("compute mode", what, agent.clock.now(), do)
