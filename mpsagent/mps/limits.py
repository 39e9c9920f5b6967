"""What a client process may use, and the GPUs that this is counted on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client process may use.

    ``threads``: percent of the multiprocessors, one decimal; ``memory``: bytes by device ordinal, a device that is
    missing has no limit.
    """

    threads: float = 100.0
    memory: Mapping[int, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Device ordinals as text, because JSON's keys are."""
        return {"threads": self.threads, "memory": {str(device): size for device, size in sorted(self.memory.items())}}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the control daemon numbers it (after its CUDA_VISIBLE_DEVICES). ``memory`` in bytes."""

    ordinal: int
    uuid: str
    name: str
    memory: int
    multiprocessors: int
