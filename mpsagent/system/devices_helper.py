"""The process that asks libcuda and NVML once which GPUs there are, as CUDA numbers them: ``python -m`` this, by
:mod:`mpsagent.system.devices`. It prints JSON and makes no CUDA context."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from typing import Any

from mpsagent.system.nvml_helper import SMALL_SMS
from mpsagent.system.nvml_helper import text as _text

SMS_ATTRIBUTE = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT


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
            row.update(name=known["name"])  # the memory is CUDA's: of NVML's total programs cannot have all
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
        rows[uuid] = _row(index, uuid, name, _memory(pynvml, handle), sms)
    return rows


def _memory(pynvml: Any, handle: Any) -> int:
    """As CUDA counts it: without what the driver reserves (docs/measured.md), where this one says how much that is."""
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError, AttributeError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return int(info.total) - int(info.reserved)


def _row(ordinal: int, uuid: str, name: str, memory: int, sms: int) -> dict[str, object]:
    return {"ordinal": ordinal, "uuid": uuid, "name": name, "memory": memory, "multiprocessors": sms}


def main() -> int:
    """Prints a list, or an object with ``error``."""
    try:
        answer: object = _devices()
    except Exception as error:
        answer = {"error": f"the GPUs could not be asked: {error or type(error).__name__}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
