"""Who uses more device memory than it was given at its hand-over.

A client can take its limit away by its own environment (recording 11), and MPS has nothing against that. NVML says how
much each process uses. No client is named where its use is not known: a device that NVML does not name, a look that did
not come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from mpsagent.core.model import Client, Over, State
from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.mps.units import MIB

ALLOWANCE = 128 * MIB
"""What an honest client that fills its limit may show beyond it: 2 MiB for each context (1,322 clients on H200s with
PyTorch, CuPy, JAX, shared and managed memory, and with several contexts showed at most 4), and a server takes 60."""
SETTLED = 1.0
"""Seconds as a client until NVML's word is about it: an answer may be a second old, and pids come again."""
GAP = 5.0
"""Seconds that one look can count for at most: NVML may have said nothing meanwhile."""


def seen(state: State, at: float, memory: Mapping[int, Mapping[str, int]]) -> Mapping[int, Over]:
    """What a look at ``at`` adds, by pid. Once over, a client stays known with its sum while it lives."""
    found: dict[int, Over] = {}
    for pid, client in state.clients.items():
        before, worst = state.over.get(pid), _worst(client, memory.get(pid, {}), state.devices)
        if worst is not None and at >= client.since + SETTLED:
            seconds = 0.0 if before is None else before.seconds + min(at - before.looked, GAP)
            found[pid] = Over(*worst, at, seconds)
        elif before is not None:
            found[pid] = before._replace(looked=at, now=False)
    return found


def _worst(client: Client, used: Mapping[str, int], devices: tuple[Device, ...]) -> tuple[int, int, int] | None:
    """Device, bytes in use and limit, where it is over; None where it is not."""
    most = client.most_memory or {}
    over = [
        (used[device.uuid] - limit, (device.ordinal, used[device.uuid], limit)) for device in devices
        if device.uuid in used and (limit := most.get(device.ordinal)) is not None
        and used[device.uuid] > limit + ALLOWANCE
    ]  # fmt: skip
    return max(over)[1] if over else None


def counted(state: State, client: Client) -> Limits | None:
    """Return what a client counts in a total: its limits, or what it really uses if that is more. None: unknown."""
    one, limits = state.over.get(client.pid), client.limits
    if limits is None or one is None or not one.now or one.used <= limits.memory.get(one.device, one.used):
        return limits
    return replace(limits, memory={**limits.memory, one.device: one.used})


def left(state: State, clients: Iterable[Client], total: Total) -> Total:
    """The total of these clients without what they use beyond their limits: the gate counts by these."""
    memory = dict(total.memory)
    for client in clients:
        limits, really = client.limits, counted(state, client)
        if limits is None or really is None:
            continue
        for device, size in really.memory.items():
            if device in memory:
                memory[device] = max(0, memory[device] - size + limits.memory[device])
    return total if memory == total.memory else replace(total, memory=memory)
