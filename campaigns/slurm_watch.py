"""What nvidia-smi itself says of a GPU while jobs run on it: memory of each process, utilisation, power. And what
NVML's figures (gate_use.py) are for one job of several."""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

EVERY = 0.5
PROCESSES = "--query-compute-apps=pid,used_memory"
DEVICE = "--query-gpu=utilization.gpu,power.draw,memory.used"


class Span(NamedTuple):
    """A process at work."""

    uid: int
    job: str
    begin: float
    end: float


def divided(moments: Sequence[tuple[Any, ...]], spans: Sequence[Span], job: str) -> tuple[float, float]:
    """The GPU's mean utilisation while processes of a job were at work, and its joules: evenly among all at work."""
    weight = busy = joules = 0.0
    for before, after in itertools.pairwise(moments):
        at = (before[0] + after[0]) / 2
        there = [one for one in spans if one.begin <= at <= one.end]
        mine = [one for one in there if one.job == job]
        if mine:
            of_user = sum(one.uid == mine[0].uid for one in there)
            weight += len(mine) / of_user * (after[0] - before[0])
            busy += len(mine) / of_user * (after[0] - before[0]) * after[1]
            joules += len(mine) / len(there) * (after[2] - before[2])
    return busy / (weight or 1.0), joules


class Watch:
    """Of the first GPU, twice a second; nothing on the simulator."""

    def __init__(self, backend: str) -> None:
        self._real = backend == "real"
        self._running: list[subprocess.Popen[bytes]] = []
        self._said: dict[str, Any] = {}
        self._energy = 0.0

    def __enter__(self) -> Watch:
        self._since = time.monotonic()
        self._joules = _joules()
        for query in (PROCESSES, DEVICE) if self._real else ():
            self._said[query] = tempfile.TemporaryFile("w+")
            words = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", "0", "-lms", str(int(EVERY * 1000))]
            with suppress(OSError):
                self._running.append(subprocess.Popen(words, stdout=self._said[query], stderr=subprocess.DEVNULL))
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds = time.monotonic() - self._since
        joules = _joules()
        self._energy = joules - self._joules if joules and self._joules else 0.0
        for one in self._running:
            one.kill()
            one.wait()

    def _rows(self, query: str) -> list[list[float]]:
        if query not in self._said:
            return []
        self._said[query].seek(0)
        rows = []
        for line in self._said[query]:
            with suppress(ValueError):  # "[N/A]", or half a line
                rows.append([float(cell) for cell in line.split(",")])
        return rows

    def by_pid(self) -> dict[int, int]:
        """The most memory of each process, MiB."""
        most: dict[int, int] = {}
        for pid, used in (row for row in self._rows(PROCESSES) if len(row) == 2):
            most[int(pid)] = max(most.get(int(pid), 0), int(used))
        return most

    def figures(self) -> dict[str, str]:
        rows = [row for row in self._rows(DEVICE) if len(row) == 3]
        if not rows:
            return {"nvidia-smi": "not there"}
        busy, power = (sum(row[n] for row in rows) / len(rows) for n in (0, 1))
        memory = max(row[2] for row in rows)
        return {
            "nvidia-smi": f"{self._seconds:.1f} s, utilisation {busy:.0f} % of the time, {power:.0f} W, that is "
            f"{power * self._seconds:.0f} J, at most {memory:.0f} MiB; NVML's counter of energy: {self._energy:.0f} J",
        }


def _joules() -> float:
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)) / 1000)
    return 0.0
