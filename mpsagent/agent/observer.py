"""What sends no event and is looked at from time to time, of one instance: stopped processes, idle
clients, processes outside MPS, the compute mode."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mpsagent.agent import bypass, lifted_limits
from mpsagent.agent.bypass import Bypass, Inside
from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.gpus import Gpus, known
from mpsagent.agent.lifted_limits import Lifted
from mpsagent.agent.recorder import Recorder
from mpsagent.core import inputs as inp
from mpsagent.core.coordinator import Core
from mpsagent.linux.processes import stopped
from mpsagent.mps.gpus import ComputeProcess
from mpsagent.system import devices as gpus

CPU_EVERY = 5.0
"""Seconds between two readings of the CPU time of clients."""
FRESH, FRESH_CLIENT = 5.0, 1.0
"""Seconds for which what the GPUs have said is good enough for who asks; while there is a client that came later."""
MEMORY_EVERY = 1.5
"""Seconds after which it is looked again what clients with a memory limit use; with a round each second that is every
other one, so who is beyond it is found within 3 s."""
WORK_EVERY, WORK_SOON = 15.0, 3.0
"""Seconds between two looks at what the GPUs have done, and until the first one after a user has come; at once when
users come and go, or a client has ended."""


class Observer:
    """:meth:`once` every second. ``inside``: of all instances."""

    def __init__(
        self,
        recorder: Recorder,
        core: Core,
        clients: ClientProcesses,
        outsiders: Bypass,
        lifts: Lifted,
        seen: Gpus,
        inside: Callable[[], Collection[Inside]],
        take: Callable[[list[inp.Input]], None],
    ) -> None:
        self._recorder, self._clock, self._conditions = recorder, recorder.clock, recorder.conditions
        self._core = core
        self._clients = clients
        self._bypass, self._lifted = outsiders, lifts
        self._gpus = seen
        self._inside = inside
        self._take = take
        self._survey_at = self._cpu_at = float("-inf")
        self._survey_busy = False
        self._outside_busy = self._outside_again = False
        self._idle: dict[int, float] = {}
        self._memory: dict[int, int] = {}
        self._memory_at = self._looked_at = float("-inf")
        self._surveying: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[Any] | None = None
        self._working: asyncio.Task[None] | None = None
        self._work_at = self._work_again = float("-inf")
        self._workers: frozenset[int] = frozenset()

    def once(self) -> list[inp.Input]:
        """One round, without waiting for anything; what the engine should know of it."""
        now, state, conditions = self._clock.now(), self._core.state, self._conditions
        if self._bypass.due(now):
            self._gpus.processes.forget()
            self.outside()
        conditions.set("bypass", self._bypass.trouble(), now, bypass.advice(state.policy.pipe_directory))
        self._lifted.look()
        do = "MPS cannot prevent it (docs/security.md): mpsagent-cli terminate PID, or on_limit_exceeded"
        conditions.set("over limits", lifted_limits.trouble(self._core.view()), now, do)
        self._clients.hold_again()
        count = self._clients.unheld
        what = f"{count} clients are held by no descriptor, because none is free: no limit, turn or order reaches them"
        conditions.set("unheld clients", what if count else None, now, "raise LimitNOFILE= of mpsagent.service")
        conditions.expire(now)
        busy = state.held or any(one.state.clients for one in self._inside())
        due = min(self._survey_at, self._memory_at + FRESH) if self._memory_counts() else self._survey_at
        if not self._survey_busy and now >= due and (busy or self._bypass.found):
            self.survey()
        limited = any(client.most_memory for client in state.clients.values())
        idle = self._listing is None or self._listing.done()
        if limited and idle and now >= self._memory_at + MEMORY_EVERY:
            self._listing = self._recorder.spawn(self._listed())
        self.look_at_work()
        return [self.processes(now)]

    def _memory_counts(self) -> bool:
        """Whether the present user can be paused for another one depends on how much memory is in use."""
        view = self._core.view()
        return view.turn is not None and view.turn.contested is not None and view.may_pause(view.turn.uid)

    def processes(self, now: float) -> inp.ProcessesSeen:
        """Who is stopped, and whose client computes nothing."""
        state = self._core.state
        controls = (one.state.control for one in self._core.engines.values())
        pids = [*state.servers, *(control.pid for control in controls if control is not None)]
        pids += [] if state.gate is None else [state.gate.pid]
        pids += [held.peer.pid for held in state.held.values() if held.handing is not None]
        found = frozenset(pid for pid in pids if stopped(pid)) | self._clients.stopped()
        if now >= self._cpu_at + CPU_EVERY:
            self._cpu_at = now
            view = self._core.view()
            timed = [(c.pid, view.rules(c.uid)) for c in state.clients.values()] if state.held else []
            matters = [pid for pid, rules in timed if rules.idle_timeout is not None and rules.idle_by == "cpu"]
            self._idle = {pid: now - since for pid, since in self._clients.idle_since(matters, now).items()}
        frozen = [client.pid for client in state.clients.values() if client.frozen is not None]
        self._clients.forget_idle(frozen)
        for pid in frozen:
            self._idle.pop(pid, None)
        return inp.ProcessesSeen(now, found, dict(self._idle), dict(self._lifted.found))

    def look_at_work(self) -> None:
        """What the GPUs have done, aside: at the same moments for all instances, and when users come and go."""
        now, state = self._clock.now(), self._core.state
        workers = frozenset(one.uid for one in state.clients.values() if one.frozen is None and one.detached is None)
        idle = now >= self._work_again and (self._working is None or self._working.done())
        due = now >= self._work_at and (workers or self._work_at < 0)  # and once at first
        if idle and (state.parted or workers != self._workers or due):
            soon = now + WORK_SOON if workers - self._workers else float("inf")
            self._workers, self._work_at = workers, min(soon, (now // WORK_EVERY + 1) * WORK_EVERY)
            self._working = self._recorder.spawn(self._worked())

    async def _worked(self) -> None:
        found = await self._gpus.work()
        if found is None:  # said elsewhere; each try may start a helper
            self._work_again = self._clock.now() + WORK_EVERY
        else:
            self._take([found])

    # --- the GPUs -----------------------------------------------------------------------------------------------------

    @property
    def gpus_serve(self) -> bool:
        """False if a GPU of this instance is lost, as far as NVML has said."""
        return self._gpus.serves(self._core.state.devices)

    def survey(self) -> None:
        """Look at what computes on our GPUs, and at their compute modes, aside."""
        self._survey_busy, self._looked_at = True, self._clock.now()
        self._surveying = self._recorder.spawn(self._survey())

    def memory(self) -> Mapping[int, int]:
        """Bytes of device memory by pid, of those who were clients already when it was last looked; empty when that is
        long ago."""
        now, state = self._clock.now(), self._core.state
        if now > self._memory_at + 2 * bypass.EVERY:
            return {}
        return {
            pid: size for pid, size in self._memory.items()
            if (client := state.clients.get(pid)) is not None and client.since <= self._memory_at
        }  # fmt: skip

    async def look_again(self, most: float) -> None:
        """A person asks: look again, unless that was just done, and wait ``most`` seconds for it. While no client is
        there it is looked at once a minute, and only for who asks: an idle node stays idle."""
        clients = self._core.state.clients.values()
        later = any(client.since > self._memory_at for client in clients)
        due = self._looked_at + (FRESH_CLIENT if later else FRESH if clients else bypass.EVERY)
        if not self._survey_busy and self._clock.now() > due:
            self.survey()
        if most and self._survey_busy and self._surveying is not None:
            await asyncio.wait({self._surveying}, timeout=most)

    async def _survey(self) -> None:
        try:
            await self._look_at_gpus()
            await self._processes_on_gpus()
        finally:
            self._survey_busy = False
            # at the same moments for all instances, so that the GPUs are asked once
            self._survey_at = (self._clock.now() // bypass.EVERY + 1) * bypass.EVERY

    def outside(self) -> None:
        """A GPU has been opened: look who is outside MPS, aside."""
        if self._outside_busy:
            self._outside_again = True
            return
        self._outside_busy = True
        self._recorder.spawn(self._outside())

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
        listed = await self._listed()
        if listed is None:
            return
        for one in await self._bypass.look(listed):
            seen = one.seen
            self._recorder.record(
                "outside_mps", self._clock.now(), pid=seen.pid, uid=seen.uid, device=seen.device, memory=seen.memory,
                command=one.facts.command, began=one.facts.began, reason=one.why,
                text=f"process {seen.pid} of user {seen.uid} computes on {seen.device} outside MPS: {one.why}",
            )  # fmt: skip

    async def _listed(self) -> tuple[ComputeProcess, ...] | None:
        """What computes on the GPUs, and with how much memory; None: NVML does not say."""
        listed = await self._gpus.processes()
        if isinstance(listed, str):  # it is asked again, and said
            return None
        found, self._memory_at = gpus.memory_by_device(listed), self._clock.now()
        self._memory = {pid: sum(sizes.values()) for pid, sizes in found.items()}
        self._take([inp.MemorySeen(self._memory_at, found)])
        return listed

    async def _look_at_gpus(self) -> None:
        """The GPUs themselves, and their compute modes."""
        seen, state, conditions = self._gpus, self._core.state, self._conditions
        await seen.look()
        now = self._clock.now()
        do = "memory in use, compute modes and programs outside MPS are not known meanwhile; it is asked again"
        conditions.set("nvml", seen.problem, now, do)
        do = "see dmesg for Xid events; a GPU that is lost needs a reset or a reboot"
        conditions.set("gpu lost", seen.lost(), now, do)
        wanted = state.policy.compute_mode
        what = bypass.mode_trouble(wanted, seen.modes, [device.uuid for device in known(state.devices)])
        number = {"default": "DEFAULT", "exclusive-process": "EXCLUSIVE_PROCESS"}.get(wanted, "MODE")
        do = f"it was changed, or not set when the control daemon started: nvidia-smi -i GPU -c {number}"
        conditions.set("compute mode", what, now, do)
        for topic, what in bypass.mode_doubts(seen.modes, known(state.devices)):
            conditions.set(topic, what, now, sure=False)
