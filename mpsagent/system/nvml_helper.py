"""The process that talks to NVIDIA's libraries for the agent: `python -m mpsagent.system.nvml_helper`.

A question is a line of JSON, ``{"ask": "gpus"}``; its answer is ``{"answer": [...]}`` or ``{"error": "..."}``.
What happens by itself (Xid events) comes in between: ``{"xid": N}``. It ends when its input does, and an error of NVML
itself ends it too: the next one loads the library that is installed then. With the word ``devices`` it says once which
GPUs there are, as CUDA numbers them. It makes no CUDA context.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MODES = ("default", "exclusive-thread", "prohibited", "exclusive-process")
"""NVML's compute modes by their numbers."""
GENERATIONS = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
    10: "Blackwell",
}  # fmt: skip
SMALL_SMS = {(6, 0), (7, 0), (7, 2), (7, 5), (8, 0)}
"""Compute capabilities with 64 cores in a multiprocessor instead of 128."""
EVENT_WAIT = 10_000
"""Milliseconds of one wait for Xid events."""
NO_INSTANCE = 0xFFFFFFFF
MOST_BYTES = 1 << 60
"""NVML says that it does not know a size by one beyond all sizes."""
SMS_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

Row = dict[str, object]


class Helper:
    """Answers questions; ``nvml`` is pynvml, ``say`` writes one line."""

    def __init__(self, nvml: Any, say: Callable[[Row], None]) -> None:
        self._nvml = nvml
        self._say = say
        self._uuids: dict[int, str] = {}
        """What each GPU was called before it was lost."""
        self._worked: dict[int, tuple[float, int]] = {}
        """When what each GPU does was asked last, and NVML's stamp of the last sample."""
        self._listening = False

    def answer(self, asked: Row) -> list[Row]:
        """Raises pynvml.NVMLError when NVML says nothing at all, ValueError for a question that it does not know."""
        match asked.get("ask"):
            case "gpus":
                rows = [self._gpu(index) for index in range(self._nvml.nvmlDeviceGetCount())]
                self._listen()
                return rows
            case "processes":
                return [row for index in range(self._nvml.nvmlDeviceGetCount()) for row in self._processes(index)]
            case "work":
                return [row for index in range(self._nvml.nvmlDeviceGetCount()) for row in self._work(index)]
            case "set-mode":
                return [self._set_mode(str(asked.get("device")), str(asked.get("mode")))]
            case other:
                raise ValueError(f"no such question: {other!r}")

    # --- one GPU ------------------------------------------------------------------------------------------------------

    def _gpu(self, index: int) -> Row:
        """What one GPU says of itself; null: it does not know. ``problem``: why it says nothing."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = self._uuids[index] = text(nvml.nvmlDeviceGetUUID(handle))
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            return {"number": index, "uuid": self._uuids.get(index), "problem": self._words(error)}
        busy = self._fact(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._fact(nvml.nvmlDeviceGetPowerUsage, handle)
        mig = self._fact(nvml.nvmlDeviceGetMigMode, handle)
        mode = self._fact(nvml.nvmlDeviceGetComputeMode, handle)
        return {
            "number": index,
            "uuid": uuid,
            "name": text(self._fact(nvml.nvmlDeviceGetName, handle) or ""),
            "generation": GENERATIONS.get(self._fact(nvml.nvmlDeviceGetArchitecture, handle) or 0),
            "memory": int(memory.total),
            "used": int(memory.used),
            "multiprocessors": self.multiprocessors(handle),
            "mode": None if mode is None else MODES[mode] if 0 <= mode < len(MODES) else f"mode {mode}",
            "mig": None if mig is None else bool(mig[0]),
            "parts": self._parts(handle) if mig is not None and mig[0] else [],
            "utilization": None if busy is None else int(busy.gpu) / 100,
            "power": None if power is None else int(power) / 1000,
            "temperature": self._fact(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            "problem": None,
        }

    def multiprocessors(self, handle: Any) -> int | None:
        nvml = self._nvml
        capability = self._fact(nvml.nvmlDeviceGetCudaComputeCapability, handle)
        cores = self._fact(nvml.nvmlDeviceGetNumGpuCores, handle)
        if capability is None or cores is None:
            return None
        return int(cores) // (64 if tuple(capability) in SMALL_SMS else 128)

    def memory(self, handle: Any) -> int:
        """As CUDA counts it: without what the driver reserves (docs/measured.md), where this one says how much that
        is."""
        try:
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle, self._nvml.nvmlMemory_v2)
        except (self._nvml.NVMLError, AttributeError):
            return int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return int(info.total) - int(info.reserved)

    def _parts(self, handle: Any) -> list[Row]:
        """The MIG devices of a GPU that is divided into such."""
        nvml, found = self._nvml, []
        for number in range(self._fact(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = self._fact(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            uuid = None if part is None else self._fact(nvml.nvmlDeviceGetUUID, part)
            if part is None or uuid is None:
                continue
            memory = self._fact(nvml.nvmlDeviceGetMemoryInfo, part)
            found.append({
                "uuid": text(uuid),
                "instance": self._fact(nvml.nvmlDeviceGetGpuInstanceId, part),
                "memory": None if memory is None else int(memory.total),
                "used": None if memory is None else int(memory.used),
            })  # fmt: skip
        return found

    def _fact(self, ask: Callable[..., Any], *of: Any) -> Any:
        """None where this GPU, or this driver, cannot say."""
        try:
            return ask(*of)
        except self._nvml.NVMLError:
            return None

    def _words(self, error: Any) -> str:
        if error.value == self._nvml.NVML_ERROR_GPU_IS_LOST:
            return "has fallen off the bus (NVML: GPU is lost)"
        return f"cannot be asked (NVML: {error})"

    # --- what runs there ----------------------------------------------------------------------------------------------

    def _processes(self, index: int) -> list[Row]:
        """Those with a context on a GPU. One that is lost has none to speak of."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text(nvml.nvmlDeviceGetUUID(handle))
            # clients of MPS last: one that starts in between is then in one list at least as a client
            plain = {one.pid: one for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except nvml.NVMLError:
            return []
        shown = {one.pid for one in self._fact(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or ()}
        clients = {one.pid: one for one in self._fact(nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or ()}
        parts = {part["instance"]: part["uuid"] for part in self._parts(handle)} if self._divided(handle) else {}
        return [
            {
                "pid": int(pid),
                "device": parts.get(getattr(one, "gpuInstanceId", NO_INSTANCE), uuid),
                "mps": pid in clients,
                "display": pid in shown,
                "memory": _size(one.usedGpuMemory),
            }
            for pid, one in {**plain, **clients}.items()
        ]

    def _work(self, index: int) -> list[Row]:
        """What a GPU has done since the last such question: its utilisation in these seconds, and its energy in joules
        since the driver was loaded. One that is lost does nothing."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            return []
        now, (before, stamp) = time.monotonic(), self._worked.get(index, (0.0, 0))
        _, samples = self._fact(nvml.nvmlDeviceGetSamples, handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, stamp) or (0, ())
        found = [one.sampleValue.uiVal for one in samples if one.timeStamp > stamp]
        if not found and (rates := self._fact(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
            found = [rates.gpu]
        self._worked[index] = now, max((one.timeStamp for one in samples), default=stamp)
        energy = self._fact(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        return [{
            "device": uuid,
            "seconds": now - before if before else 0.0,
            "utilization": sum(found) / len(found) / 100 if found else None,
            "energy": None if energy is None else int(energy) / 1000,
        }]  # fmt: skip

    def _divided(self, handle: Any) -> bool:
        mig = self._fact(self._nvml.nvmlDeviceGetMigMode, handle)
        return mig is not None and bool(mig[0])

    # --- compute mode -------------------------------------------------------------------------------------------------

    def _set_mode(self, uuid: str, mode: str) -> Row:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        nvml.nvmlDeviceSetComputeMode(handle, MODES.index(mode))
        now = int(nvml.nvmlDeviceGetComputeMode(handle))
        return {"device": uuid, "mode": MODES[now] if 0 <= now < len(MODES) else f"mode {now}"}

    # --- Xid events ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Xid events of all GPUs, from the first question on."""
        if not self._listening:
            self._listening = True
            threading.Thread(target=self._events, daemon=True).start()

    def _events(self) -> None:
        nvml = self._nvml
        try:
            events, some = nvml.nvmlEventSetCreate(), False
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = self._fact(nvml.nvmlDeviceGetHandleByIndex, index)
                if handle is not None:
                    some = self._fact(_register, nvml, handle, events) is not None or some
        except nvml.NVMLError:
            return
        while some:
            try:
                event = nvml.nvmlEventSetWait_v2(events, EVENT_WAIT)
                uuid = text(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    return
                continue
            self._say({"xid": int(event.eventData), "device": uuid})


def _register(nvml: Any, handle: Any, events: Any) -> bool:
    nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
    return True


def _size(value: object) -> int | None:
    return int(value) if isinstance(value, int) and 0 <= value < MOST_BYTES else None


def text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


# --- as CUDA numbers them ---------------------------------------------------------------------------------------------


def devices() -> list[Row]:
    """By libcuda; where that is missing or does not start, by NVML."""
    if (found := _from_cuda()) is not None:
        return found
    nvml: Any = importlib.import_module("pynvml")
    nvml.nvmlInit()
    helper = Helper(nvml, print)
    rows = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = text(nvml.nvmlDeviceGetUUID(handle)), text(nvml.nvmlDeviceGetName(handle))
        rows.append(_device(index, uuid, name, helper.memory(handle), helper.multiprocessors(handle)))
    return _visible(rows, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(rows: list[Row], wanted: str | None) -> list[Row]:
    """Those that CUDA_VISIBLE_DEVICES names, in its order, up to the first that is not known."""
    if wanted is None:
        return rows
    chosen: list[Row] = []
    for word in filter(None, (part.strip() for part in wanted.split(","))):
        fits = [row for row in rows if str(row["ordinal"]) == word or str(row["uuid"]).startswith(word)]
        if len(fits) != 1:
            break
        chosen.append({**fits[0], "ordinal": len(chosen)})
    return chosen


def _from_cuda() -> list[Row] | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    if cuda.cuInit(0) != 0 or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    rows = []
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
        digits, shown = bytes(uuid).hex(), name.value.decode(errors="replace")
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        rows.append(_device(ordinal, "GPU-" + "-".join(parts), shown, size.value, sms.value))
    return rows


def _device(ordinal: int, uuid: str, name: str, memory: int, multiprocessors: int | None) -> Row:
    return {"ordinal": ordinal, "uuid": uuid, "name": name, "memory": memory, "multiprocessors": multiprocessors}


def main() -> int:
    """Until the end of the input, or until NVML has nothing to say any more."""
    if sys.argv[1:] == ["devices"]:
        try:
            sys.stdout.write(json.dumps(devices()))
        except Exception as error:
            sys.stdout.write(json.dumps({"error": f"the GPUs could not be asked: {error or type(error).__name__}"}))
        return 0
    lock = threading.Lock()

    def say(line: Row) -> None:
        with lock:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

    nvml: Any = None
    helper: Helper | None = None
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if helper is None:
                nvml = importlib.import_module("pynvml")
                nvml.nvmlInit()
                helper = Helper(nvml, say)
            say({"answer": helper.answer(asked)})
        except Exception as error:
            say({"error": str(error) or type(error).__name__})
            if helper is None or isinstance(error, nvml.NVMLError):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
