"""The plan of a benchmark: its runs, their order and their duration. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mpsagent_bench.torch_workloads import TORCH

OFF, NODE = "off", "node"
SHARING = ("turns", "one-server", "per-user")
MODES = (OFF, *SHARING, NODE)
"""Without MPS; MPS started for this run with each sharing mode; through the MPS of the node, as it is."""
SECONDS = 5.0
START = {OFF: 1.0, NODE: 1.0, "turns": 1.5, "one-server": 1.5, "per-user": 2.0}
"""Seconds from the start of a run's processes to the first step, about."""
CONTEXT = 0.1
"""Seconds between two contexts behind the gate."""
IMPORT = 6.0
"""Seconds for a process to import PyTorch and make its network, about."""
MPS_START = 4.0
"""Seconds for an agent, gate and control daemon of the benchmark's own to start and end, about."""


@dataclass(frozen=True)
class Run:
    """A number of processes of one workload at the same time, of a number of users."""

    mode: str
    workload: str
    processes: int
    users: int
    seconds: float
    programs: tuple[str, ...] = ()
    """The workload of each process, if they differ. Then ``workload`` is the name of the mix."""
    limits: str = ""
    """Sections of the policy for this run's MPS."""

    def of(self, process: int) -> str:
        """The workload of the process of that number."""
        return self.programs[process] if self.programs else self.workload

    def groups(self) -> list[list[int]]:
        """The processes (by number) that can work at the same time: with turns those of a user, else all."""
        if self.mode == "turns":
            return [group for user in range(self.users) if (group := [*range(user, self.processes, self.users)])]
        return [[*range(self.processes)]]

    def takes(self) -> float:
        """Seconds, about."""
        paced = 0.0 if self.mode == OFF else CONTEXT * self.processes
        load = IMPORT if {self.workload, *self.programs} & TORCH.keys() else 0.0
        return len(self.groups()) * (START[self.mode] + load + self.seconds) + paced


def plan(
    modes: Sequence[str], workloads: Sequence[str], processes: Sequence[int], users: int, seconds: float
) -> list[Run]:
    """Return the runs, mode after mode, because each mode has a separate MPS.

    A run has at most as many users as processes. The node's MPS has one user, who runs the benchmark.
    """
    return [
        Run(mode, workload, count, 1 if mode == NODE else min(users, count), seconds)
        for mode in modes
        for workload in workloads
        for count in sorted(processes)
    ]


def takes(runs: Sequence[Run]) -> float:
    """Seconds that all of them take, about."""
    return sum(run.takes() for run in runs) + MPS_START * sum(mode in SHARING for (mode, _), _ in by_mps(runs))


def by_mps(runs: Sequence[Run]) -> Iterator[tuple[tuple[str, str], Iterator[Run]]]:
    """The runs that can have the same MPS, by its mode and limits, in their order."""
    return groupby(runs, lambda run: (run.mode, run.limits))
