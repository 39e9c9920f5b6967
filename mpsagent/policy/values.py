"""How much of a device a policy gives, as it was written, and what that is on the devices there are.

Everything rounds towards less, so that no client gets more than its policy: percentages to one decimal (MPS itself
would round 12.75 up to 12.8, recording 04, T3), memory to whole MiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from mpsagent.mps import units
from mpsagent.mps.limits import Device, Total

LEAST_PERCENT = 0.1
ALL_DEVICES = ""
"""Key of a memory setting that was written as one value for every device."""


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """A number of multiprocessors, whatever the device has: ``26``."""

    count: int


@dataclass(frozen=True, slots=True)
class Clients:
    """``{ clients = 4, rule = "even" }``: 100/n for each; ``"double"``: 100/(0.5 n), for clients that are seldom busy
    at the same time."""

    count: int
    rule: Literal["even", "double"] = "even"


@dataclass(frozen=True, slots=True)
class Weight:
    """``{ weight = 3 }``: this weight divided by the sum of all weights in the policy."""

    weight: float


@dataclass(frozen=True, slots=True)
class Percent:
    """``"25%"`` of a device's memory or multiprocessors; ``percent`` above 0 and at most 100, and 100 is no limit."""

    percent: float


Threads = Percent | Multiprocessors | Clients | Weight
TotalThreads = Percent | Multiprocessors
Memory = int | Percent


def percent_of(threads: Threads, devices: Sequence[Device], weights: float) -> float:
    """The active thread percentage, never above what was written. ``weights``: sum of the weights in the policy. While
    the devices are unknown, a number of multiprocessors is the least: too little can be raised later."""
    match threads:
        case Multiprocessors(count):
            counts = [device.multiprocessors for device in devices]
            if not counts or min(counts) <= 0:
                return LEAST_PERCENT
            return min(units.percent_for_multiprocessors(count, present) for present in counts)
        case Clients(count, rule):
            return _down(100.0 / count if rule == "even" else 200.0 / count)
        case Weight(weight):
            return _down(100.0 * weight / weights)
        case Percent(percent):
            return _down(percent)


def total(
    threads: TotalThreads | None, memory: Memory | None, own: Threads | None, devices: Sequence[Device]
) -> Total | None:
    """What several processes may use together, of which each has ``own`` threads; None: there is no such bound."""
    if threads is None and memory is None:
        return None
    sizes = {one.ordinal: bytes_of(memory, one) for one in devices} if memory is not None else {}
    known = {device: size for device, size in sizes.items() if size is not None}
    if threads is None:
        return Total(None, known)
    return Total(_total_percent(threads, own, devices), known, least_percent(devices))


def least_percent(devices: Sequence[Device]) -> float:
    """Of the threads, for which MPS gives a process the fewest multiprocessors that it gives; 0: it is not known."""
    present = {device.multiprocessors for device in devices if device.multiprocessors > 0}
    return max((units.percent_for_multiprocessors(units.least(one), one) for one in present), default=0.0)


def _total_percent(total: TotalThreads, own: Threads | None, devices: Sequence[Device]) -> float:
    """What the percentages of these processes may add up to. Those for multiprocessors are rounded up (26 of 132 are
    19.7 %), so such a total is counted in processes where these are given so too: two times 26 fit into 52."""
    percent = percent_of(total, devices, 0.0)
    if isinstance(total, Multiprocessors) and isinstance(own, Multiprocessors):
        each = max(percent_of(own, devices, 0.0), least_percent(devices))
        count = max([own.count, *(units.least(device.multiprocessors) for device in devices)])
        return max(percent, total.count // count * each)
    return percent


def _down(percent: float) -> float:
    tenths = math.floor(percent * 10 + 1e-6)  # 1e-6: 16.1 * 10 may be a hair below 161
    return min(100.0, max(LEAST_PERCENT, tenths / 10))


def bytes_of(memory: Memory, device: Device) -> int | None:
    """The limit in bytes on a device, whole MiB and never 0 (which would mean no limit); None: no limit."""
    if isinstance(memory, Percent):
        if memory.percent >= 100:
            return None
        wanted = int(device.memory * memory.percent / 100)
    else:
        wanted = memory
    return max(units.MIB, wanted - wanted % units.MIB)


def for_device(table: Mapping[str, Memory], device: Device) -> str | None:
    """The key under which a memory table speaks about a device (UUID before ordinal before all), or None."""
    uuid = device.uuid.lower()
    for key in table:
        if key and key.lower() == uuid:
            return key
    for key in (str(device.ordinal), ALL_DEVICES):
        if key in table:
            return key
    return None


def text(memory: Memory) -> str:
    """``20G``, ``25%``."""
    return f"{memory.percent:g}%" if isinstance(memory, Percent) else units.limit_text(memory)


def written(value: object) -> object:
    """Return a value as a policy file has it, JSON-able: ``"25%"``, ``26`` multiprocessors, ``20.0`` seconds."""
    match value:
        case Multiprocessors(count):
            return count
        case Clients(count, rule):
            return {"clients": count, "rule": rule}
        case Weight(weight):
            return {"weight": weight}
        case Percent(percent):
            return f"{percent:g}%"
        case Mapping():
            return {str(key): written(one) for key, one in value.items()}
        case tuple():
            return list(value)
        case _:
            return value
