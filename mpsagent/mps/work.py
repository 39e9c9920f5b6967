"""What a GPU has done, as NVML's counters say it."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Since the agent began to look: for ``seconds`` it was looked at, in ``busy`` of these a kernel ran, ``energy`` in
    joules. Of MPS's servers beside each other NVML says too little to go by (an H200, 2026-11-23)."""

    seconds: float
    busy: float
    energy: float
