"""What NVML says of the machine's GPUs and of who uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Part(NamedTuple):
    """A MIG device. Bytes; None: not known."""

    uuid: str
    memory: int | None
    used: int | None


class Gpu(NamedTuple):
    """What a GPU says of itself, None where it cannot: ``memory``, ``used`` in bytes, ``utilization`` from 0 to 1,
    ``power`` in watts, ``temperature`` in °C, ``mode`` in the policy's words. ``problem``: why it says nothing."""

    number: int
    uuid: str | None
    name: str = ""
    generation: str | None = None
    memory: int | None = None
    used: int | None = None
    multiprocessors: int | None = None
    mode: str | None = None
    mig: bool | None = None
    parts: tuple[Part, ...] = ()
    utilization: float | None = None
    power: float | None = None
    temperature: int | None = None
    problem: str | None = None

    def has(self, uuid: str) -> bool:
        """It is this device, or has it as a part."""
        return uuid in (self.uuid, *(part.uuid for part in self.parts))


class ComputeProcess(NamedTuple):
    """A process with a context on a GPU, as NVML lists it. ``mps``: as a client of MPS, of any daemon (MPS's servers
    are listed too, and not as one); ``display``: it draws there as well. ``memory`` in bytes, None when NVML cannot
    say."""

    pid: int
    device: str
    mps: bool
    memory: int | None
    display: bool = False


class Xid(NamedTuple):
    """An error that the driver has reported; NVIDIA's manual of Xid errors has the numbers. ``at``: when it was heard
    of, seconds of ``clock``."""

    at: float
    device: str
    number: int


class GpusSeen(NamedTuple):
    """What NVML said at ``at`` (None: nothing yet), by UUID of GPUs and MIG devices, the last Xid events, and how many
    there were since the agent's start. ``problem``: why it says nothing now."""

    gpus: Mapping[str, Gpu] = {}
    xids: Mapping[str, tuple[Xid, ...]] = {}
    counts: Mapping[str, int] = {}
    at: float | None = None
    problem: str | None = None
