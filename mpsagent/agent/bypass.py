"""Who computes on our GPUs outside MPS, without limits, and whether the compute mode is the policy's.

A client that cannot reach the control daemon runs without MPS and says nothing. NVML lists it, and the gate has not
seen it. It is looked at when a GPU is opened, and once a minute while clients are there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpsagent.agent import gpus
from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import some
from mpsagent.core.model import State
from mpsagent.core.outside import Facts, Outsider, Sighting, ended, may_have_passed, next_step, outside, reason
from mpsagent.linux import proc
from mpsagent.linux.processes import Process, parent
from mpsagent.linux.threads import in_thread
from mpsagent.mps.gpus import ComputeProcess
from mpsagent.mps.limits import Device
from mpsagent.system import outsider
from mpsagent.system.control import PROGRAM, SERVER
from mpsagent.system.names import Names

EVERY = 60.0
"""Seconds between two looks while a process holds a GPU or waits, whatever is opened."""
SETTLE = 0.3
"""Seconds in which the gate's word about a process may be later than NVML's."""
FACTS = 5.0
"""Seconds for reading /proc of processes; a process that hangs in the kernel may block that indefinitely."""
MOST = 256
"""Processes outside MPS that are known at a time."""


class Inside(NamedTuple):
    """Processes inside MPS by one instance: its control daemon, the engine's clients, those that passed the gate."""

    daemon: int | None
    state: State
    clients: ClientProcesses


class Bypass:
    """Processes outside MPS on the GPUs of one instance, whose ``state`` is the engine's, each held by its pidfd. Each
    process is recorded once. ``inside``: of all instances; ``synced``: whether the gate has reported all; ``clients``:
    of this instance; ``without_records``: start time of this agent if it found no records of an earlier agent."""

    def __init__(
        self,
        clock: SteadyClock,
        record: Callable[..., int],
        spawn: Callable[[Coroutine[Any, Any, Any]], object],
        state: Callable[[], State],
        names: Names,
        inside: Callable[[], Collection[Inside]],
        synced: Callable[[], bool],
        clients: ClientProcesses,
        without_records: int | None = None,
    ) -> None:
        self._clock, self._record, self._spawn = clock, record, spawn
        self._state = state
        self._names = names
        self._instances = inside
        self._synced = synced
        self._clients, self._without_records = clients, without_records
        self._one = asyncio.Lock()
        self._held: dict[int, Process] = {}
        self.found: dict[int, Outsider] = {}
        """Outsiders by pid."""

    async def look(self, listed: Iterable[ComputeProcess]) -> list[Outsider]:
        """Take in the processes ``listed`` by NVML. Return the outsiders that were not known before."""
        async with self._one:
            return await self._look(listed)

    async def _look(self, listed: Iterable[ComputeProcess]) -> list[Outsider]:
        ours = [device.uuid for device in gpus.known(self._state().devices)]
        seen = self._sightings(listed, ours)
        found = {one.pid: one for one in outside(seen, ours, self._inside())}
        for pid in self._held.keys() - found.keys():
            self._forget(pid)
        for pid in self.found.keys() & found.keys():
            self.found[pid] = self.found[pid]._replace(seen=found[pid])
        if self._synced():
            self._end_those_due()
        fresh = [one for pid, one in found.items() if pid not in self._held][: MOST - len(self._held)]
        if not fresh or not self._synced():  # who passed is not known then
            return []
        await asyncio.sleep(SETTLE)
        fresh = [one for one in outside(fresh, ours, self._inside()) if self._hold(one)]
        found_out = zip(fresh, await self._facts(fresh), strict=True)
        new = [self._found(one, facts) for one, facts in found_out if not self._took_up(one, facts)]
        self._end_those_due()
        return new

    def _end_those_due(self) -> None:
        """End the listed processes that are due by the policy; the pidfd shows that each is still the same."""
        now, policy, record = self._clock.now(), self._state().policy, self._record
        for pid, one in list(self.found.items()):
            who = self._names.known(one.seen.uid)
            if who is None and policy.bypass == "terminate" and policy.bypass_exempt:
                self._spawn(self._names.look_up(one.seen.uid))
            ending, number = ended(one, policy, who, now)
            if ending == one.ending:
                continue
            self.found[pid] = one._replace(ending=ending)
            fields = {"pid": pid, "uid": one.seen.uid, "rule": "instance.on_outside_mps", "enforce": policy.enforce}
            if ending is not None and number is None:
                record("outside_mps.warned", now, **fields, ends=ending.due)
            elif ending is not None and number is not None:
                problem = self._held[pid].send(number) if policy.enforce else None
                record("outside_mps.ended", now, **fields, signal=number, text=problem or "")

    def due(self, now: float) -> bool:
        """Something is due for one of them: it has to be looked whether NVML still lists it."""
        policy = self._state().policy
        return any((at := next_step(one, policy)) is not None and now >= at for one in self.found.values())

    def trouble(self) -> str | None:
        if not self.found:
            return None
        who = [f"process {pid} of user {one.seen.uid} on {one.seen.device}, because {one.why}"
               for pid, one in self.found.items()]  # fmt: skip
        return f"computing outside MPS, without limits: {some(who, '; ')}"

    def close(self) -> None:
        for pid in list(self._held):
            self._forget(pid)

    def _inside(self) -> Mapping[int, int | None]:
        """Return the processes that passed the gate, or are MPS itself, in any instance: start time or None by pid."""
        inside: dict[int, int | None] = {}
        for _, state, _ in self._instances():
            for server in state.servers.values():
                inside |= {server.pid: None} | dict.fromkeys(server.attached)
            inside |= {held.peer.pid: held.peer.start for held in (*state.held.values(), *state.never.values())}
            inside |= {pid: client.peer.start for pid, client in state.clients.items()}
        return inside

    def _sightings(self, listed: Iterable[ComputeProcess], ours: Collection[str]) -> list[Sighting]:
        inside = self._inside()
        daemons = {one.daemon for one in self._instances() if one.daemon is not None}
        found = []
        for one in listed:
            if one.device not in ours or (one.pid in inside and inside[one.pid] is None):
                continue
            process = self._held.get(one.pid) or Process.open(one.pid)
            if process is None:
                continue
            others = one.pid in self._held or not (is_server(one.pid) or parent(one.pid) in daemons)
            if others and not (one.mps and self._passed(process)):
                mps = one.mps or is_server_of_user(one.pid)  # its end would hurt its clients
                seen = Sighting(one.pid, process.started, process.uid, one.device, one.memory, mps, one.display)
                found.append(seen)
            if one.pid not in self._held:
                process.close()
        return found

    def _passed(self, process: Process) -> bool:
        """Whether it passed the gate, though it may be no client any more: its server ended, and it lives on with its
        error. A program finds its control daemon once, when it begins, so it is no other one's."""
        pid, start = process.pid, process.started
        return any(one.clients.get(pid, start) is not None for one in self._instances())

    def _hold(self, one: Sighting) -> bool:
        process = Process.open(one.pid, one.uid, one.start)
        if process is None:
            return False
        self._held[one.pid] = process
        process.when_gone(lambda: self._forget(one.pid))
        return True

    def _forget(self, pid: int) -> None:
        self.found.pop(pid, None)
        process = self._held.pop(pid, None)
        if process is not None:
            process.close()

    async def _facts(self, processes: Collection[Sighting]) -> list[Facts]:
        if processes:
            who, public = [(one.pid, one.start) for one in processes], self._state().policy.pipe_directory
            with suppress(TimeoutError, OSError):
                found = await in_thread(outsider.facts, who, public, deadline=FACTS, slots=outsider.LOOKS)
                return [Facts(*shown) for shown in found]
        return [Facts() for _ in processes]

    def _took_up(self, one: Sighting, facts: Facts) -> bool:
        """Take up a process that may have passed the gate, so that this agent and its successors know it as one that
        did. Return False if the process is outside MPS."""
        if not may_have_passed(one, facts, self._state().policy.pipe_directory, self._without_records):
            return False
        process = Process.open(one.pid, one.uid, one.start)
        if process is not None:
            self._clients.known(process)
        self._forget(one.pid)
        return True

    def _found(self, one: Sighting, facts: Facts) -> Outsider:
        policy = self._state().policy
        why = reason(one, facts, policy.pipe_directory, _made(f"{policy.pipe_directory}/control"))
        found = Outsider(one, facts, self._clock.now(), why)
        if one.pid in self._held:  # it may have ended meanwhile
            self.found[one.pid] = found
        return found


def advice(pipe_directory: str) -> str:
    return (
        f"start them again with CUDA_MPS_PIPE_DIRECTORY={pipe_directory} in their environment; with the compute mode "
        "EXCLUSIVE_PROCESS (nvidia-smi -c EXCLUSIVE_PROCESS) such programs fail instead"
    )


def is_server(pid: int) -> bool:
    """Return whether a process is a server of root's control daemon, which may have gone: it runs MPS's server with
    root's group alone (recording 08, G1), which no user gets. A user can run the file with other code in it."""
    return set(proc.ids(pid, b"Gid:")) == {os.getegid()} and _runs(pid, SERVER)


def is_server_of_user(pid: int) -> bool:
    """Return whether a process is a server of a user's own control daemon. It is outside MPS, and its clients, too."""
    daemon = parent(pid)
    return _runs(pid, SERVER) and daemon is not None and _runs(daemon, PROGRAM)


def _runs(pid: int, name: str) -> bool:
    """Return whether a process runs a file of root's with this name."""
    try:
        program = Path(f"/proc/{pid}/exe")
        return program.readlink().name.removesuffix(" (deleted)") == name and program.stat().st_uid == 0
    except OSError:
        return False


def mode_trouble(wanted: str, modes: Mapping[str, str], ours: Iterable[str]) -> str | None:
    """Return the GPUs that are not in the ``wanted`` mode, in words; ``modes`` by UUID, in the policy's words."""
    if wanted == "unchanged":
        return None
    wrong = [f"{modes[uuid]} on {uuid}" for uuid in ours if uuid in modes and modes[uuid] != wanted]
    return f"the compute mode is {', '.join(wrong)}; the policy wants {wanted}" if wrong else None


def mode_doubts(modes: Mapping[str, str], ours: Sequence[Device]) -> Iterator[tuple[str, str | None]]:
    """Yield the GPUs that no program can use."""
    known = [one for one in ours if one.uuid in modes]
    shut = [str(one.ordinal) for one in known if modes[one.uuid] == "prohibited"]
    what = f"the compute mode is PROHIBITED on GPU {some(shut)}: no program can use it"
    yield "mode prohibited", what if shut else None


def _made(path: str) -> float | None:
    """When a socket was made, seconds since the epoch."""
    try:
        return os.lstat(path).st_ctime
    except OSError:
        return None
