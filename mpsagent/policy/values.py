"""How much of a device a policy gives, as it was written, and what that is on the devices there are.

Everything rounds towards less, so that no client gets more than its policy: percentages to one decimal (MPS itself
would round 12.75 up to 12.8, recording 04, T3), memory to whole MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpsagent.mps import units
from mpsagent.mps.limits import Device, Total

LEAST_PERCENT = 0.1


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """``{ sms = 26 }``: so many multiprocessors, whatever the device has."""

    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """``"25%"`` of a device's memory; ``percent`` above 0 and at most 100, and 100 is no limit."""

    percent: float


Threads = float | Multiprocessors
Memory = int | Share


def percent_of(threads: Threads, devices: Sequence[Device]) -> float:
    """The active thread percentage, one decimal, never above what was written. While the devices are unknown, a number
    of multiprocessors is the least percentage: too little can be raised later, too much is an escape."""
    if not isinstance(threads, Multiprocessors):
        tenths = math.floor(threads * 10 + 1e-6)  # 1e-6: 16.1 * 10 may be a hair below 161
        return min(100.0, max(LEAST_PERCENT, tenths / 10))
    counts = [device.multiprocessors for device in devices]
    if not counts or min(counts) <= 0:
        return LEAST_PERCENT
    return min(units.percent_for_multiprocessors(threads.count, present) for present in counts)


def total(
    threads: Threads | None, memory: Memory | None, own: Threads | None, devices: Sequence[Device]
) -> Total | None:
    """What several processes may use together, of which each has ``own`` threads; None: there is no such bound."""
    if threads is None and memory is None:
        return None
    if threads is None:
        return Total(None, sizes(memory, devices))
    return Total(_total_percent(threads, own, devices), sizes(memory, devices), least_percent(devices))


def least_percent(devices: Sequence[Device]) -> float:
    """Of the threads, for which MPS gives a process the fewest multiprocessors that it gives; 0: it is not known."""
    present = {device.multiprocessors for device in devices if device.multiprocessors > 0}
    return max((units.percent_for_multiprocessors(units.least(one), one) for one in present), default=0.0)


def _total_percent(total: Threads, own: Threads | None, devices: Sequence[Device]) -> float:
    """What the percentages of these processes may add up to.

    Percentages for numbers of multiprocessors are rounded up (26 of 132 are 19.7 %), so a total in multiprocessors is
    counted in processes where these are given in multiprocessors too: two times 26 fit into 52.
    """
    percent = percent_of(total, devices)
    if isinstance(total, Multiprocessors) and isinstance(own, Multiprocessors):
        each = max(percent_of(own, devices), least_percent(devices))
        count = max([own.count, *(units.least(device.multiprocessors) for device in devices)])
        return max(percent, total.count // count * each)
    return percent


def bytes_of(memory: Memory, device: Device) -> int | None:
    """The limit in bytes on a device, whole MiB and never 0 (which would mean no limit); None: no limit."""
    if isinstance(memory, Share):
        if memory.percent >= 100:
            return None
        wanted = int(device.memory * memory.percent / 100)
    else:
        wanted = memory
    return max(units.MIB, wanted - wanted % units.MIB)


def sizes(memory: Memory | None, devices: Sequence[Device]) -> dict[int, int]:
    """The limit in bytes by device ordinal; a device that is missing has none."""
    found = {one.ordinal: bytes_of(memory, one) for one in devices} if memory is not None else {}
    return {device: size for device, size in found.items() if size is not None}


def text(memory: Memory) -> str:
    """``20G``, ``25%``."""
    return f"{memory.percent:g}%" if isinstance(memory, Share) else units.limit_text(memory)


def written(value: object) -> object:
    """A value as a policy file has it, JSON-able: ``{"sms": 26}``, ``"25%"``, ``"4G"``, ``20.0``."""
    match value:
        case Multiprocessors(count):
            return {"sms": count}
        case Share(percent):
            return f"{percent:g}%"
        case tuple():
            return list(value)
        case _:
            return value
