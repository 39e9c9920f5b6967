"""The program that carries out the runs, in separate namespaces. It writes each figure as a line of JSON.

It is process 1 of its pid namespace, and its files are on a file system that only it has: however it exits, its
processes and files do not remain. `mpsagent-cli bench` starts it (see outside.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpsagent_bench import plan, results
from mpsagent_bench.driver import CudaError, Gpu
from mpsagent_bench.own_mps import OwnMps, OwnMpsError
from mpsagent_bench.process import Make, Process, ProcessError, Ready, SilentError, Simulated, stepping
from mpsagent_bench.programs import Torch
from mpsagent_bench.torch_workloads import TORCH
from mpsagent_bench.workloads import WORKLOADS

FIRST_USER = 61184
"""The first uid of the processes: from systemd's range for dynamic users, which no account of the node has."""
READY = 60.0
"""Seconds in which a process must be ready once it may have the GPU."""
EMPTY = ("/media", "/mnt")
"""Directories that every machine has; over one of them lies the file system for the files of the runs' own MPS. It is
in this process's mount namespace alone, from which nothing gets out: no other process sees it, and it ends with the
process.
"""
LEAD = 0.2
"""Seconds from the word to the common begin."""


def real(workload: str) -> Make:
    def make(number: int) -> Ready:
        gpu = Gpu()
        return stepping(gpu.name, gpu.multiprocessors, WORKLOADS[workload].make(gpu, number))

    return make


@dataclass(frozen=True)
class Makers:
    """Factories of the workloads. ``programs``: the simulator's directory. ``python``: a Python that has PyTorch."""

    programs: Path | None = None
    python: str = ""

    def of(self, workload: str) -> Make:
        if self.programs is not None:
            return Simulated(self.programs)
        return Torch(self.python, workload) if workload in TORCH else real(workload)

    def slow(self, workload: str) -> str:
        """Return a possible reason why a workload is not ready in time, and the remedy; empty if none is known."""
        if self.programs is not None or workload not in TORCH:
            return ""
        return (
            f"; importing PyTorch with {self.python} may take longer where the disk is slow or many do it at once: try "
            "again (what was read is in memory now), take fewer --processes, or name another Python with --python"
        )


def measure(run: plan.Run, environment: Mapping[str, str], makers: Makers) -> results.Figure:
    """Carry out a run; return its figure, or the reason why there is none."""
    groups = run.groups()
    steps = [0.0] * run.processes
    latencies: list[Sequence[int]] = [()] * run.processes
    saw = [0] * run.processes
    begun: list[float] = []
    at = 0.0
    started: list[Process] = []

    def start(group: Sequence[int]) -> None:
        for number in group:
            started.append(Process(makers.of(run.of(number)), number, user(run.mode, number % run.users), environment))

    try:
        start(groups[0])
        for place, group in enumerate(groups):
            working = started[-len(group) :]
            for process in working:
                try:
                    saw[process.number] = int(process.hear(READY)["multiprocessors"])
                except SilentError as error:
                    raise ProcessError(f"{error}{makers.slow(run.of(process.number))}") from None
            at = time.monotonic() + LEAD
            begun.append(at)
            for process in working:
                process.go(at, run.seconds)
            if place + 1 < len(groups):
                start(groups[place + 1])  # they wait at the gate while these work
            for process in working:
                said = process.hear(LEAD + run.seconds + READY)
                steps[process.number], latencies[process.number] = float(said["steps"]), said["latencies"]
            for process in working:
                process.end()
    except (ProcessError, CudaError) as error:
        return results.without(run, str(error))
    finally:
        for process in started:
            process.end()
    return results.figure(run, steps, latencies, at + run.seconds - begun[0], saw)


def user(mode: str, number: int = 0) -> int | None:
    """Return the uid for the user of this number; None: the caller's own, for the node's MPS or without root."""
    return None if mode == plan.NODE or os.getuid() else FIRST_USER + number


def main(argument: str) -> int:
    order: dict[str, Any] = json.loads(argument)
    runs = [plan.Run(**{**one, "programs": tuple(one["programs"])}) for one in order["runs"]]
    programs = Path(order["programs"]) if order["programs"] else None
    makers = Makers(programs, order["python"])
    gpu = str(order["gpu"] or "")
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # the driver's cache of compiled kernels is small, and no file may remain
    place = next(Path(one) for one in EMPTY if not Path(__file__).is_relative_to(one) and Path(one).is_dir())
    if any(run.mode in plan.SHARING for run in runs):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "mpsagent-bench", str(place)], check=True)
    for number, ((mode, limits), some) in enumerate(plan.by_mps(runs)):
        mps = OwnMps(place / str(number), mode, limits, programs, gpu) if mode in plan.SHARING else None
        environment = {} if mps is None else mps.environment
        if mode == plan.OFF:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = "/nonexistent"
        problem = ""
        try:
            if mps is not None:
                mps.start()
        except OwnMpsError as error:
            problem = str(error)
        for run in some:
            _say(begins=asdict(run))
            done = results.without(run, problem) if problem else measure(run, environment, makers)
            _say(figure=asdict(done))
        if mps is not None:
            mps.stop()
    return 0


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()
