"""The JSON of GPUs; see :mod:`mpsagent.api.shapes`."""

from __future__ import annotations

from typing_extensions import TypedDict


class Xid(TypedDict):
    """An error that the driver has reported; NVIDIA's manual of Xid errors has the numbers. ``at``: when it was heard
    of."""

    at: str
    number: int


class Outside(TypedDict):
    """A process that computes on our GPUs outside MPS. ``began``: when it started, ``since``: when it was seen first;
    ``why``: the likely reason, by what the process itself shows; ``ends``: when it is to be asked to end, null: it
    is not."""

    pid: int
    uid: int
    user: str | None
    command: str | None
    device: str
    memory: int | None
    began: str | None
    since: str
    why: str
    ends: str | None


class Device(TypedDict):
    """From ``generation`` on it is what NVML said at ``seen``; null: it cannot say, or was not asked yet.
    ``utilization``: from 0 to 1, the part of the last second or so in which a kernel ran; ``power`` in watts;
    ``temperature`` in °C; ``mig``: the GPU is divided into MIG devices; ``memory_used``: by all processes, of any kind;
    ``xids``: the last ones that were heard of, of ``xids_seen``; ``problem``: why the GPU says nothing."""

    ordinal: int
    uuid: str
    name: str
    memory: int
    multiprocessors: int
    generation: str | None
    compute_mode: str | None
    mig: bool | None
    memory_used: int | None
    utilization: float | None
    power: float | None
    temperature: int | None
    xids: list[Xid]
    xids_seen: int
    problem: str | None
    seen: str | None
