"""GPUs as the API shows them: what CUDA counts, and what NVML said last. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpsagent.core.outside import Outsider
from mpsagent.mps.limits import Device
from mpsagent.mps.units import iso
from mpsagent.system.nvml import Gpu, GpusSeen, Part

if TYPE_CHECKING:
    from mpsagent.api import shapes_gpus


def outside(one: Outsider, name: str | None) -> shapes_gpus.Outside:
    """``name``: of its user."""
    seen, facts = one.seen, one.facts
    return {
        "pid": seen.pid,
        "uid": seen.uid,
        "user": name,
        "command": facts.command or None,
        "device": seen.device,
        "memory": seen.memory,
        "began": None if facts.began is None else iso(facts.began),
        "since": iso(one.since),
        "why": one.why,
        "ends": None if one.ending is None else iso(one.ending.due),
    }


def device(one: Device, seen: GpusSeen) -> shapes_gpus.Device:
    """A MIG device has its own memory; power, temperature and errors are its GPU's."""
    gpu = seen.gpus.get(one.uuid)
    part = None if gpu is None else next((part for part in gpu.parts if part.uuid == one.uuid), None)
    used: Gpu | Part | None = part or gpu
    events = seen.xids.get((gpu.uuid if gpu is not None else None) or one.uuid, ())
    return {
        "ordinal": one.ordinal,
        "uuid": one.uuid,
        "name": one.name,
        "memory": one.memory,
        "multiprocessors": one.multiprocessors,
        "generation": None if gpu is None else gpu.generation,
        "compute_mode": None if gpu is None else gpu.mode,
        "mig": None if gpu is None else gpu.mig,
        "memory_used": None if used is None else used.used,
        "utilization": None if gpu is None else gpu.utilization,
        "power": None if gpu is None else gpu.power,
        "temperature": None if gpu is None else gpu.temperature,
        "xids": [{"at": iso(xid.at), "number": xid.number} for xid in events],
        "xids_seen": seen.counts.get((gpu.uuid if gpu is not None else None) or one.uuid, 0),
        "problem": None if gpu is None else gpu.problem,
        "seen": None if gpu is None or seen.at is None else iso(seen.at),
    }
