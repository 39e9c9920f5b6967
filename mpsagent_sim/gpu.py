"""Simulated GPUs, and the arithmetic of their multiprocessors and memory (all memory here in MiB).

The numbers were recorded on an NVIDIA H200. Values between two recorded points are interpolated.
"""

import math

NAME = "NVIDIA H200"
MULTIPROCESSORS = 132
TOTAL = 143155
SERVER_USAGE = 66
BYPASS_OVERHEAD = 526  # outside MPS: 142629 of 143155 free
_UUIDS = ("GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8", "GPU-3d07cd2a-6e14-11b8-c643-07a1e14ae7bc")

# multiprocessors -> what a context costs under a memory limit (01 S4, 02 R1, 04 T1, 05 M1, 06 V2, 07 W1;
# 2026-11-23, slurm-day.md)
_CONTEXT = (
    (8, 58),
    (12, 72),
    (26, 123),
    (38, 167),
    (46, 196),
    (52, 218),
    (58, 240),
    (78, 315),
    (104, 411),
    (118, 462),
    (132, 514),
)
# without a limit the server's memory counts as well (03 Q1, 04 T3, 07 W1)
_UNLIMITED = ((12, 146), (16, 160), (26, 196), (132, 590))


class Device:
    """A GPU. `ordinal` is its number in the machine. Inside an instance its position in the list counts."""

    __slots__ = ("ordinal", "uuid")

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        if ordinal < len(_UUIDS):
            self.uuid = _UUIDS[ordinal]
        else:
            self.uuid = f"GPU-{0x7FC4AA32 + ordinal:08x}-1cf4-1f71-2952-83582f20ec{ordinal:02x}"

    @property
    def pci(self) -> str:
        return f"0000:00.{self.ordinal + 6:02x}.00"


def machine(count: int) -> list[Device]:
    """All GPUs of the simulated machine."""
    return [Device(ordinal) for ordinal in range(count)]


def visible(devices: list[Device], wanted: str | None) -> list[Device]:
    """Return the devices in CUDA_VISIBLE_DEVICES: ordinals in that list or UUIDs, up to the first invalid one."""
    if wanted is None:
        return devices
    chosen: list[Device] = []
    for word in wanted.split(","):
        word = word.strip()
        if word.isdigit() and int(word) < len(devices):
            found = [devices[int(word)]]
        else:
            found = [device for device in devices if len(word) > 4 and device.uuid.startswith(word)]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def multiprocessors(percentage: float) -> int:
    """Percent to multiprocessors: rounded down, and down to an even number (they come in pairs); at least 8."""
    return max(8, int(percentage * MULTIPROCESSORS / 100 + 1e-9) // 2 * 2)


def _interpolate(points: tuple[tuple[int, int], ...], x: int) -> int:
    right = next((at for at in range(1, len(points)) if x <= points[at][0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(0, math.floor(y0 + (y1 - y0) * (x - x0) / (x1 - x0)))


def context_overhead(sms: int) -> int:
    """Return the part of a client's memory limit that its context uses, with `sms` multiprocessors."""
    return _interpolate(_CONTEXT, sms)


def free(sms: int, limit: int | None, own: int, others: int) -> int:
    """Memory a client under MPS may still allocate.

    limit: its pinned memory limit, None for none; own: its allocations; others: memory of other clients, other servers
    and processes outside MPS on this device (its own server is counted here already).
    """
    left = TOTAL - _interpolate(_UNLIMITED, sms) - others
    if limit is not None:
        left = min(left, limit - context_overhead(sms))
    return max(0, left - own)


def usage(sms: int, own: int) -> int:
    """Return the memory of a client process in NVML (580 with all multiprocessors and 64 MiB allocated)."""
    return context_overhead(sms) + 2 + own
