"""Which GPUs there are: from NVML, from a file, or, until one of them answers, those found last."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.settings import Settings
from mpsagent.core.inputs import Worked
from mpsagent.linux import atomic_file
from mpsagent.linux.threads import in_thread
from mpsagent.mps.gpus import ComputeProcess, Gpu
from mpsagent.mps.limits import Device
from mpsagent.system import devices as gpus
from mpsagent.system.nvml import Nvml

CACHE = "devices.json"
UNKNOWN = tuple(Device(ordinal, "", "unknown GPU", 4 << 30, 256) for ordinal in range(8))
"""The devices for counting limits while the GPUs are not known: memory in percent as of 4 GiB, multiprocessors as of
256, on eight devices (MPS takes limits for devices that do not exist; recording 01, S2). So a client gets less, never
more."""


def known(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The GPUs, as far as they are known."""
    return () if devices == UNKNOWN else devices


EXCLUSIVE = "exclusive-process"
MODES = "exclusive-gpus.json"
MODES_WAIT, MODES_WAIT_KNOWN = 15.0, 3.0
"""Seconds for which the start waits for the compute modes: without persistence mode the driver starts each GPU first.
The second one counts if an earlier agent has known them."""
MOMENT = 1.0
"""Seconds for which an answer about the machine is every instance's."""
_Answer = TypeVar("_Answer")


class SharedQuestion(Generic[_Answer]):
    """A question about the whole machine, which starts a program: asked once for all instances that ask together."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, _Answer]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[_Answer] | None = None
        self._asked = float("-inf")

    def forget(self) -> None:
        """Forget the last answer after an event: the next question gets a new one."""
        self._asked = float("-inf")

    async def __call__(self) -> _Answer:
        loop = asyncio.get_running_loop()
        if self._task is None or (self._task.done() and loop.time() > self._asked + MOMENT):
            self._task, self._asked = loop.create_task(self._ask()), loop.time()
        return await asyncio.shield(self._task)


class Gpus:
    """What NVML, or the simulator's files, say of the machine, for all instances. ``environment()`` is what the helper
    of NVML starts with."""

    def __init__(self, settings: Settings, environment: Callable[[], Mapping[str, str]], clock: SteadyClock) -> None:
        self._file = settings.devices_file
        self._clock = clock
        self.nvml = Nvml(environment, clock.now)
        self.processes = SharedQuestion(self._processes)
        self.work = SharedQuestion(self._work)
        self.look = SharedQuestion(self._look)
        self.seen: dict[str, Gpu] = {}
        """The GPUs and their MIG devices by UUID, as they were seen last."""
        self.all: tuple[Gpu, ...] = ()
        self.at: float | None = None
        """When that was."""
        self.problem: str | None = None
        """The reason for which nothing is known of them now."""

    async def _processes(self) -> tuple[ComputeProcess, ...] | str:
        """Every process that computes on any GPU, or what is wrong."""
        if self._file is None:
            return await self.nvml.processes()
        return await self._simulated(gpus.simulated_processes, self._file)

    async def _work(self) -> Worked | None:
        """Return the work of each GPU, or None: it is not known. :meth:`_look` reports failures."""
        if self._file is None:
            found = await self.nvml.work()
        else:
            found = await self._simulated(gpus.simulated_work, self._file)
        return None if isinstance(found, str) else Worked(self._clock.now(), found)

    async def _look(self) -> None:
        """Look at the GPUs themselves."""
        found = await self.nvml.gpus() if self._file is None else await self._simulated(gpus.simulated_gpus, self._file)
        if isinstance(found, str):
            self.problem, self.all, self.seen = found, (), {}
            return
        self.problem, self.all, self.at = None, found, self._clock.now()
        self.seen = {uuid: one for one in found for uuid in (one.uuid, *(part.uuid for part in one.parts)) if uuid}

    async def _simulated(self, read: Callable[[str], _Answer], file: str) -> _Answer | str:
        try:
            return await in_thread(read, file, deadline=5.0)
        except (OSError, ValueError, TimeoutError) as error:
            return f"{file}: {error}"

    @property
    def modes(self) -> dict[str, str]:
        """Compute modes by UUID."""
        return {uuid: one.mode for uuid, one in self.seen.items() if one.mode is not None}

    def serves(self, devices: Sequence[Device]) -> bool:
        """Return False if NVML has answered and one of these GPUs is lost. An unknown GPU is not lost."""
        if self.problem is not None or not self.seen:
            return True
        found = [self.seen.get(device.uuid) for device in known(tuple(devices))]
        return all(one is not None and one.problem is None for one in found)

    def exclusive(self, before: frozenset[str]) -> frozenset[str]:
        """Return the GPUs in EXCLUSIVE_PROCESS mode, by UUID. One whose mode is not known is as it was ``before``."""
        modes = self.modes
        return frozenset(uuid for uuid, mode in modes.items() if mode == EXCLUSIVE) | (before - modes.keys())

    def lost(self) -> str | None:
        """Return the GPUs that do not answer, in words."""
        return "; ".join(f"GPU {one.uuid or one.number} {one.problem}" for one in self.all if one.problem) or None


async def find(
    settings: Settings, environment: Mapping[str, str], visible: Sequence[str] = ()
) -> tuple[Device, ...] | str:
    """The GPUs as a control daemon that sees ``visible`` (empty: all) numbers them, or what is wrong."""
    if settings.devices_file is None:
        return await gpus.probe(environment)
    try:
        return of_those(gpus.from_file(settings.devices_file), visible)
    except (OSError, ValueError) as error:
        return f"{settings.devices_file}: {error}"


def of_those(devices: Sequence[Device], visible: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES with these UUIDs leaves, in its order."""
    if not visible:
        return tuple(devices)
    by_uuid = {device.uuid.lower(): device for device in devices}
    found = [by_uuid[uuid.lower()] for uuid in visible if uuid.lower() in by_uuid]
    return tuple(replace(device, ordinal=number) for number, device in enumerate(found))


def remembered(settings: Settings, visible: Sequence[str]) -> tuple[Device, ...]:
    """Return the devices that the last agent found, if it looked at the same ``visible`` GPUs; else nothing."""
    if settings.state_directory is None or settings.devices_file is not None:
        return ()
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(Path(settings.state_directory, CACHE).read_bytes())
        return gpus.parse_devices(known["by visible"][",".join(visible)])
    return ()


def remember(settings: Settings, visible: Sequence[str], found: Sequence[Device]) -> None:
    """Keep the devices for the next agent. A disk that does not take them costs the next agent a second."""
    if settings.state_directory is None or settings.devices_file is not None:
        return
    path, known = Path(settings.state_directory, CACHE), {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = dict(json.loads(path.read_bytes())["by visible"])
    known[",".join(visible)] = [asdict(device) for device in found]
    with suppress(OSError):
        atomic_file.write(path, json.dumps({"by visible": known}))


async def exclusive(settings: Settings, machine: Gpus) -> frozenset[str]:
    """Return the GPUs in EXCLUSIVE_PROCESS mode, by UUID; if the driver does not answer in time, the GPUs that the
    last agent has found."""
    known = _known_exclusive(settings)
    looking = asyncio.ensure_future(machine.look())
    await asyncio.wait({looking}, timeout=MODES_WAIT if known is None else MODES_WAIT_KNOWN)
    found = machine.exclusive(frozenset()) if machine.modes else known or frozenset()
    if found != known:
        remember_exclusive(settings, found)
    return found


def _known_exclusive(settings: Settings) -> frozenset[str] | None:
    if settings.state_directory is not None:
        with suppress(OSError, ValueError, TypeError):
            return frozenset(map(str, json.loads(Path(settings.state_directory, MODES).read_bytes())))
    return None


def remember_exclusive(settings: Settings, found: frozenset[str]) -> None:
    """Keep them for the next agent."""
    if settings.state_directory is not None:
        with suppress(OSError):
            atomic_file.write(Path(settings.state_directory, MODES), json.dumps(sorted(found)))
