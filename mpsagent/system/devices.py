"""The GPUs and what computes on them, asked by a short-lived helper process.

After a driver error NVML and libcuda can hang for ever, even beyond SIGKILL. So the agent never loads them: it runs
``python -m mpsagent.system.devices`` with a deadline, and reads JSON. No CUDA context is created; the pipe directory
in the helper's environment does not exist, so that it is never a client of MPS.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import mpsagent
from mpsagent.mps.limits import Device
from mpsagent.system.spawn import run_program

NOWHERE = "/nonexistent/mpsagent-asks-without-mps"
DEADLINE = 30.0
"""Seconds: without persistence mode the driver starts a GPU first, which takes several."""
SMS_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
SMALL_SMS = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}
"""Compute capabilities with 64 cores in a multiprocessor instead of 128."""

MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
"""NVML's compute modes by their numbers."""


class ComputeProcess(NamedTuple):
    """A process with a context on a GPU, as NVML lists it. ``mps``: it is listed as a client of MPS. NVML lists the MPS
    server itself too, and not as one. ``memory`` in bytes, None when NVML cannot say."""

    pid: int
    device: str
    mps: bool
    memory: int | None


async def probe(environment: Mapping[str, str], *, deadline: float = DEADLINE) -> tuple[Device, ...] | str:
    """The GPUs as a control daemon with this ``environment`` (CUDA_VISIBLE_DEVICES) numbers them, or what is wrong."""
    answer = await _ask("devices", environment, deadline)
    if isinstance(answer, str):
        return answer
    try:
        return parse_devices(answer)
    except ValueError as error:
        return f"the GPU helper's answer: {error}"


async def compute_processes(
    environment: Mapping[str, str], *, deadline: float = DEADLINE
) -> tuple[ComputeProcess, ...] | str:
    """Every process that computes on any GPU of the machine, or what is wrong."""
    answer = await _ask("processes", environment, deadline)
    if isinstance(answer, str):
        return answer
    try:
        rows = [(row["pid"], row["device"], row["mps"], row["memory"]) for row in answer]
    except (TypeError, KeyError) as error:
        return f"the GPU helper's answer: {error!r}"
    return tuple(ComputeProcess(*row) for row in rows)


async def compute_modes(environment: Mapping[str, str], *, deadline: float = DEADLINE) -> dict[str, str] | str:
    """Each GPU's compute mode by its UUID, in the policy's words (``default``, ``exclusive-process``), or what is
    wrong. It is only looked at, never set."""
    answer = await _ask("modes", environment, deadline)
    if isinstance(answer, str):
        return answer
    try:
        return {str(row["device"]): str(row["mode"]) for row in answer}
    except (TypeError, KeyError) as error:
        return f"the GPU helper's answer: {error!r}"


def simulated_processes(devices_file: str) -> tuple[ComputeProcess, ...]:
    """The same list for simulated GPUs: files ``processes/ORDINAL.PID`` beside their description."""
    place = Path(devices_file).with_name("processes")
    uuids = {str(device.ordinal): device.uuid for device in from_file(devices_file)}
    rows = []
    for path in place.iterdir() if place.is_dir() else ():
        ordinal, _, pid = path.name.partition(".")
        with suppress(OSError, ValueError):
            kind, _, size, _ = path.read_text()[:200].split()
            rows.append(ComputeProcess(int(pid), uuids.get(ordinal, ""), kind in ("mps", "server"), int(size) << 20))
    return tuple(rows)


def simulated_modes(devices_file: str) -> dict[str, str]:
    """Their compute modes: a file ``processes/ORDINAL.compute_mode`` may say so."""
    place = Path(devices_file).with_name("processes")
    modes = {}
    for device in from_file(devices_file):
        modes[device.uuid] = "default"
        with suppress(OSError):
            text = (place / f"{device.ordinal}.compute_mode").read_text()[:100]
            modes[device.uuid] = text.strip().lower().replace("_", "-")
    return modes


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


async def _ask(what: str, environment: Mapping[str, str], deadline: float) -> list[Any] | str:
    own = {"CUDA_MPS_PIPE_DIRECTORY": NOWHERE, "PYTHONPATH": str(Path(mpsagent.__file__).parents[1])}
    argv = [sys.executable, "-P", "-m", "mpsagent.system.devices", what]
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


# --- in the helper process -------------------------------------------------------------------------------------------


def _devices() -> list[dict[str, object]]:
    cuda = _from_cuda()
    try:
        nvml = _from_nvml()
    except Exception:
        if cuda:
            return cuda
        raise
    if cuda is None:
        return _visible(list(nvml.values()), os.environ.get("CUDA_VISIBLE_DEVICES"))
    for row in cuda:
        known = nvml.get(str(row["uuid"]))
        if known is not None:
            row.update(name=known["name"], memory=known["memory"])
    return cuda


def _visible(rows: list[dict[str, object]], wanted: str | None) -> list[dict[str, object]]:
    """As CUDA numbers them: those that CUDA_VISIBLE_DEVICES names, in its order, up to the first it does not know."""
    if wanted is None:
        return rows
    chosen: list[dict[str, object]] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        fits = [row for row in rows if str(row["ordinal"]) == word or str(row["uuid"]).startswith(word)]
        if len(fits) != 1:
            break
        chosen.append({**fits[0], "ordinal": len(chosen)})
    return chosen


def _from_cuda() -> list[dict[str, object]] | None:
    """None when libcuda is missing or does not start."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    rows: list[dict[str, object]] = []
    for ordinal in range(count.value):
        device, sms = ctypes.c_int(), ctypes.c_int()
        uuid, name, size = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(256), ctypes.c_size_t()
        for status in (
            cuda.cuDeviceGet(ctypes.byref(device), ordinal),
            cuda.cuDeviceGetUuid(uuid, device),
            cuda.cuDeviceGetName(name, 256, device),
            cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device),
            cuda.cuDeviceGetAttribute(ctypes.byref(sms), SMS_ATTRIBUTE, device),
        ):
            if status != 0:
                raise OSError(f"CUDA device {ordinal}: error {status}")
        digits = bytes(uuid).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        text = name.value.decode(errors="replace")
        rows.append(_row(ordinal, "GPU-" + "-".join(parts), text, size.value, sms.value))
    return rows


def _from_nvml() -> dict[str, dict[str, object]]:
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    rows = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        small = tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)) in SMALL_SMS
        sms = pynvml.nvmlDeviceGetNumGpuCores(handle) // (64 if small else 128)
        uuid, name = _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle))
        rows[uuid] = _row(index, uuid, name, int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), sms)
    return rows


def _processes() -> list[dict[str, object]]:
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    rows: list[dict[str, object]] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        clients = {process.pid: process for process in pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
        plain = {process.pid: process for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        for pid, process in {**plain, **clients}.items():
            memory = process.usedGpuMemory
            known = int(memory) if isinstance(memory, int) and 0 <= memory < 1 << 60 else None
            rows.append({"pid": int(pid), "device": uuid, "mps": pid in clients, "memory": known})
    return rows


def _modes() -> list[dict[str, object]]:
    pynvml: Any = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    rows: list[dict[str, object]] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        mode = int(pynvml.nvmlDeviceGetComputeMode(handle))
        words = MODES[mode] if 0 <= mode < len(MODES) else f"mode {mode}"
        rows.append({"device": _text(pynvml.nvmlDeviceGetUUID(handle)), "mode": words})
    return rows


def _row(ordinal: int, uuid: str, name: str, memory: int, sms: int) -> dict[str, object]:
    return {"ordinal": ordinal, "uuid": uuid, "name": name, "memory": memory, "multiprocessors": sms}


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def main() -> int:
    """Prints a list, or an object with ``error``."""
    try:
        answer: object = {"processes": _processes, "modes": _modes}.get(sys.argv[1] if sys.argv[1:] else "", _devices)()
    except Exception as error:
        answer = {"error": f"the GPUs could not be asked: {error or type(error).__name__}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
