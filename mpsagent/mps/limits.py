"""What a client process may use, and the GPUs that this is counted on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client process may use.

    ``threads``: percent of the multiprocessors, one decimal; ``memory``: bytes by device ordinal, a device that is
    missing has no limit; ``below_normal``: its MPS client priority is the lower one, so on one server the kernels of
    others come first (docs/measured.md).
    """

    threads: float = 100.0
    memory: Mapping[int, int] = field(default_factory=dict)
    below_normal: bool = False

    def settable(self) -> Limits:
        """0.1 is the smallest percentage that MPS takes (recording 01, S2)."""
        return replace(self, threads=min(100.0, max(0.1, self.threads)))

    def joined(self, other: Limits) -> Limits:
        """Return the larger limit of each kind. A device has no limit if one of the two has none."""
        devices = self.memory.keys() & other.memory.keys()
        memory = {device: max(self.memory[device], other.memory[device]) for device in devices}
        return replace(self, threads=max(self.threads, other.threads), memory=memory)

    def as_json(self) -> dict[str, object]:
        """Device ordinals as text, because JSON's keys are. ``below_normal`` is there when it is true."""
        lower = {"below_normal": True} if self.below_normal else {}
        return {"threads": self.threads, "memory": _by_ordinal(self.memory), **lower}


@dataclass(frozen=True, slots=True)
class Total:
    """What all client processes of one user, or of one job, may use together. ``threads``: percent, None: no bound;
    ``memory``: bytes by device ordinal, a device that is missing has no bound; ``least``: percent of the threads that
    MPS gives a process however small its limit is."""

    threads: float | None = None
    memory: Mapping[int, int] = field(default_factory=dict)
    least: float = 0.0

    def as_json(self) -> dict[str, object]:
        return {"threads": self.threads, "memory": _by_ordinal(self.memory), "least": self.least}

    def cap(self, limits: Limits) -> Limits:
        """Limits of one process that are nowhere more than this."""
        memory = {device: min(most, limits.memory.get(device, most)) for device, most in self.memory.items()}
        threads = limits.threads if self.threads is None else min(limits.threads, self.threads)
        return replace(limits, threads=threads, memory={**limits.memory, **memory})

    def fits(self, used: Iterable[Limits], more: Limits) -> bool:
        """Whether a further process fits beside those that there are. One without a limit counts as the whole. The only
        one may always have its limit: nothing smaller than ``least`` can be given."""
        all_of_them = [*used, more]
        if self.threads is not None:
            has = self.used(all_of_them) if len(all_of_them) > 1 else more.threads
            if round(has * 10) > round(self.threads * 10):
                return False
        for device, most in self.memory.items():
            sizes = [one.memory.get(device) for one in all_of_them]
            if None in sizes or sum(size for size in sizes if size is not None) > most:
                return False
        return True

    def used(self, processes: Iterable[Limits]) -> float:
        """Percent of the threads that MPS gives these processes."""
        # in tenths of a percent, as MPS counts: sums of floats drift
        return sum(round(max(one.threads, self.least) * 10) for one in processes) / 10


def _by_ordinal(memory: Mapping[int, int]) -> dict[str, int]:
    return {str(device): size for device, size in sorted(memory.items())}


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU as the control daemon numbers it (after its CUDA_VISIBLE_DEVICES). ``memory`` in bytes."""

    ordinal: int
    uuid: str
    name: str
    memory: int
    multiprocessors: int
