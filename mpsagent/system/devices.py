"""The GPUs as CUDA numbers them, asked at each start of a control daemon by a short-lived helper; and simulated ones.

After a driver error NVML and libcuda can hang indefinitely, even beyond SIGKILL: the agent never loads them. The
helper's pipe directory does not exist, so that it is never a client of MPS. :mod:`mpsagent.system.nvml` reads the
values that change while the GPUs work.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mpsagent
from mpsagent.linux.proc import start_time
from mpsagent.mps.gpus import ComputeProcess, Gpu
from mpsagent.mps.limits import Device
from mpsagent.mps.work import Work
from mpsagent.system.directories import NOWHERE
from mpsagent.system.spawn import run_program

DEADLINE = 30.0
"""Seconds: without persistence mode the driver starts a GPU first, which takes several."""
IDLE_WATTS, BUSY_WATTS = 100.0, 500.0
"""What a simulated GPU draws, without a kernel and with one."""


async def probe(environment: Mapping[str, str], *, deadline: float = DEADLINE) -> tuple[Device, ...] | str:
    """The GPUs as a control daemon with this ``environment`` (CUDA_VISIBLE_DEVICES) numbers them, or what is wrong."""
    answer = await _ask(environment, deadline)
    if isinstance(answer, str):
        return answer
    try:
        return parse_devices(answer)
    except ValueError as error:
        return f"the GPU helper's answer: {error}"


def memory_by_device(listed: Iterable[ComputeProcess]) -> dict[int, dict[str, int]]:
    """Bytes of each process by the UUID of the GPU; who is not in it uses none, or it is not known."""
    found: dict[int, dict[str, int]] = {}
    for one in listed:
        if one.memory is not None:
            sizes = found.setdefault(one.pid, {})
            sizes[one.device] = sizes.get(one.device, 0) + one.memory
    return found


def simulated_processes(devices_file: str) -> tuple[ComputeProcess, ...]:
    """The same list for simulated GPUs: files ``processes/ORDINAL.PID`` beside their description."""
    place = Path(devices_file).with_name("processes")
    uuids = {str(device.ordinal): device.uuid for device in from_file(devices_file)}
    rows = []
    for path in place.iterdir() if place.is_dir() else ():
        ordinal, _, pid = path.name.partition(".")
        with suppress(OSError, ValueError):
            kind, _, size, started = path.read_text()[:200].split()
            if start_time(int(pid)) != int(started):
                continue  # it has gone, or it counts in a pid namespace of its own
            rows.append(ComputeProcess(int(pid), uuids.get(ordinal, ""), kind in ("mps", "server"), int(size) << 20))
    return tuple(rows)


def simulated_work(devices_file: str) -> dict[str, Work]:
    """What they have done: files ``processes/ORDINAL.busy.PID`` that simulated servers write, with the seconds in which
    a kernel ran there, and since when (by the machine's monotonic clock) one runs now, or 0."""
    place, now, found = Path(devices_file).with_name("processes"), time.monotonic(), dict[str, Work]()
    for device in from_file(devices_file):
        total = 0.0
        for path in place.glob(f"{device.ordinal}.busy.*"):
            with suppress(OSError, ValueError):
                busy, since = map(float, path.read_text()[:100].split())
                total += busy + (max(0.0, now - since) if since else 0.0)
        found[device.uuid] = Work(now, total, IDLE_WATTS * now + (BUSY_WATTS - IDLE_WATTS) * total)
    return found


def simulated_gpus(devices_file: str) -> tuple[Gpu, ...]:
    """What NVML would say of them: a file ``processes/ORDINAL.compute_mode`` may give the compute mode."""
    place = Path(devices_file).with_name("processes")
    taken = simulated_processes(devices_file)
    found = []
    for device in from_file(devices_file):
        mode = "default"
        with suppress(OSError):
            mode = (place / f"{device.ordinal}.compute_mode").read_text()[:100].strip().lower().replace("_", "-")
        used = sum(one.memory or 0 for one in taken if one.device == device.uuid)
        found.append(
            Gpu(
                device.ordinal, device.uuid, device.name, None, device.memory, used, device.multiprocessors, mode, False
            )
        )
    return tuple(found)


def from_file(path: str) -> tuple[Device, ...]:
    """GPUs from a JSON file: a list of objects with the fields of :class:`Device`. Raises ValueError, OSError."""
    text = Path(path).read_bytes()
    try:
        return parse_devices(json.loads(text))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_devices(rows: Any) -> tuple[Device, ...]:
    """Checks what came from outside. Raises ValueError with what is wrong."""
    if not isinstance(rows, list):
        raise ValueError("expected a list of devices")
    devices = []
    for number, row in enumerate(rows):
        kinds = {"ordinal": int, "uuid": str, "name": str, "memory": int, "multiprocessors": int}
        if not isinstance(row, dict) or set(row) != set(kinds):
            raise ValueError(f"device {number}: expected an object with {', '.join(kinds)}")
        for key, kind in kinds.items():
            if not isinstance(row[key], kind) or isinstance(row[key], bool):
                raise ValueError(f"device {number}: {key} has to be {'a number' if kind is int else 'a text'}")
            if kind is int and row[key] < (0 if key == "ordinal" else 1):
                raise ValueError(f"device {number}: {key} is {row[key]}")
        devices.append(Device(**row))
    if len({device.ordinal for device in devices}) != len(devices):
        raise ValueError("two devices have the same ordinal")
    return tuple(sorted(devices, key=lambda device: device.ordinal))


async def _ask(environment: Mapping[str, str], deadline: float) -> list[Any] | str:
    own = {"CUDA_MPS_PIPE_DIRECTORY": NOWHERE, "PYTHONPATH": str(Path(mpsagent.__file__).parents[1])}
    argv = [sys.executable, "-P", "-m", "mpsagent.system.nvml_helper", "devices"]
    ended = await run_program(argv, {**environment, **own}, deadline=deadline)
    if ended.code is None:
        return f"the GPUs could not be asked: {ended.problem}; does nvidia-smi answer?"
    try:
        answer = json.loads(ended.out)
    except ValueError:
        said = " ".join(ended.err.split())[-300:]
        return f"the GPUs could not be asked: the helper ended with status {ended.code}: {said or 'no message'}"
    if isinstance(answer, list):
        return answer
    return str(answer.get("error", answer)) if isinstance(answer, dict) else f"unexpected answer {answer!r}"
