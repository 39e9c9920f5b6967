"""Does the windows, in namespaces of its own, and says each figure as it comes: a line of JSON on standard output.

Process 1 of its pid namespace, like mpsagent_bench/inside.py: whatever ends it, nothing of what it started is left. MPS
is there from the first to the last window; those without it are of processes that cannot reach it, so that both of a
pair are measured within seconds.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.seeds import published
from benchmarks.seeds.process import Make, Process, ProcessError, Simulated
from benchmarks.seeds.programs import JPEG, NVJPEG, PER_STEP, PROCESSOR, PROGRAMS, RESTART, TORCH, decodes, photographs
from benchmarks.seeds.published import OFF, Seed, Start
from mpsagent_bench.own_mps import OwnMps, OwnMpsError
from mpsagent_bench.results import percentile

EMPTY = ("/media", "/mnt")
"""Directories that every machine has; on one of them lies the file system for the files of this run."""
READY = 45.0
"""Seconds in which the processes of a start must be ready; who is not by then takes no part."""
START = 6.0
"""Seconds that a start takes at most, as a rule."""
LEAD, FIRST_WARM, WARM = 0.2, 1.2, 0.5
"""Seconds from the word to the common begin of work, and of work before a window: the first of a start, and others."""
MIB = 1 << 20


class Nvml:
    """Memory, utilisation and clock of the one GPU, which are only read; None where they cannot be had."""

    def __init__(self, uuid: str) -> None:
        self._device: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            by_uuid = uuid.startswith("GPU-")
            self._device = (
                pynvml.nvmlDeviceGetHandleByUUID(uuid) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(int(uuid or 0))
            )
            self.driver = str(pynvml.nvmlSystemGetDriverVersion())
        except Exception as error:  # whatever it is, the windows have their figures without it
            self.driver = f"unknown: {error}"

    def memory(self) -> float | None:
        with suppress(Exception):
            return float(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used / MIB)
        return None

    def engines(self) -> int | None:
        """Percent of the time in which the JPEG engines work."""
        with suppress(Exception):
            return int(self._nvml.nvmlDeviceGetJpgUtilization(self._device)[0])
        return None

    def now(self) -> tuple[int, int] | None:
        """Percent of the time in which a kernel ran, and the multiprocessors' clock in MHz."""
        with suppress(Exception):
            clock = self._nvml.nvmlDeviceGetClockInfo(self._device, self._nvml.NVML_CLOCK_SM)
            return self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu, clock
        return None


class Windows:
    """``environments``: of the processes, for each mode."""

    def __init__(
        self, data: Path, seconds: float, end: float, environments: Mapping[str, Mapping[str, str]], nvml: Nvml,
        programs: Path | None,
    ) -> None:  # fmt: skip
        self._data, self._seconds, self._end = data, seconds, end
        self._takes = LEAD + WARM + seconds
        self._environments, self._nvml, self._programs = environments, nvml, programs

    def measure(self, seed: Seed, start: Start, mode: str) -> None:
        """Says a figure for each number of processes, or why there is none."""
        left = list(start.counts)
        started: list[Process] = []
        before = self._nvml.memory()
        try:
            if time.monotonic() + START + self._takes > self._end:
                raise ProcessError("the time for all of it was over")
            for number in range(max(start.counts)):
                user = None if os.getuid() else start.user
                started.append(Process(self._make(start.program), number, user, self._environments[mode]))
            ready, saw, problem = self._ready(started)
            while left:
                if left[0] > len(ready):
                    raise ProcessError(f"{len(ready)} of {len(started)} processes were ready: {problem}")
                if time.monotonic() + self._takes > self._end:
                    raise ProcessError("the time for all of it was over")
                warm = 0.0 if self._programs else FIRST_WARM if len(left) == len(start.counts) else WARM
                figure = self._window(ready[: left[0]], PER_STEP.get(start.program, 1), warm)
                memory = self._nvml.memory()
                figure["memory"] = None if memory is None or before is None else round(memory - before)
                _say(figure={**_names(seed, start, mode, left.pop(0)), **figure, "multiprocessors": saw})
        except (ProcessError, OSError) as error:
            for count in left:
                _say(figure={**_names(seed, start, mode, count), "problem": str(error)})
        finally:
            for process in started:
                process.end()

    def _ready(self, started: Sequence[Process]) -> tuple[list[Process], list[int], str]:
        """Those that may begin, what each sees of the GPU, and what is wrong with the first of the others."""
        end = min(time.monotonic() + READY, self._end)
        ready, saw, problem = [], [], ""
        for process in started:
            try:
                saw.append(int(process.hear(max(0.0, end - time.monotonic()))["multiprocessors"]))
                ready.append(process)
            except ProcessError as error:
                problem = problem or str(error)
                process.end()
        return ready, saw, problem

    def _make(self, program: str) -> Make:
        if self._programs is not None:
            return Simulated(self._programs)
        return lambda number: PROGRAMS[program](number, self._data / program)

    def _window(self, working: Sequence[Process], per_step: int, warm: float) -> dict[str, Any]:
        begin = time.monotonic() + LEAD
        at = begin + warm
        for process in working:
            process.go(begin, at, self._seconds)
        time.sleep(max(0.0, at - time.monotonic()))
        seen, engines = [], []
        while time.monotonic() < at + self._seconds - 0.05:
            seen.append(self._nvml.now())
            engines.append(self._nvml.engines())
            time.sleep(0.1)
        said = [process.hear(self._seconds + READY) for process in working]
        each = [{"rate": one["rate"] * per_step, **_latencies([(v, 1.0) for v in one["latencies"]])} for one in said]
        weighed = [(v, one["steps"] / len(one["latencies"])) for one in said for v in one["latencies"]]
        known = [one for one in seen if one is not None]
        return {
            "rate": sum(one["rate"] for one in each), **_latencies(weighed), "each": each,
            "utilisation": statistics.fmean(busy for busy, _ in known) if known else None,
            "mhz": statistics.fmean(clock for _, clock in known) if known else None,
            "jpeg_engines": max((one for one in engines if one is not None), default=None),
            "load": os.getloadavg()[0],
        }  # fmt: skip


def _latencies(weighed: list[tuple[int, float]]) -> dict[str, float | None]:
    weighed.sort()
    return {"p50": percentile(weighed, 0.5), "p99": percentile(weighed, 0.99)}


def _names(seed: Seed, start: Start, mode: str, count: int) -> dict[str, Any]:
    names = {"seed": seed.name, "program": start.program, "mode": mode, "processes": count}
    return {**names, "percent": start.percent} if start.percent else names


def prepare(data: Path, seeds: Sequence[Seed], mnist_files: str) -> dict[str, Any]:
    """PyTorch, imported once for all processes, which are forked of this one; the files. What it was is told."""
    about: dict[str, Any] = {}
    programs = {start.program for seed in seeds for start in seed.starts}
    for name in ("torch", "torchvision") if programs & set(TORCH) else ():
        try:
            about[name] = importlib.import_module(name).__version__
        except ImportError as error:
            about[name] = f"not there: {error}"
    for program in programs:
        (data / program).mkdir(mode=0o755)
    if "mnist" in programs:
        from benchmarks.seeds import mnist

        if mnist_files:
            (data / "mnist").rmdir()
            (data / "mnist").symlink_to(mnist_files)
        else:
            mnist.make(data / "mnist")
        about["mnist"] = mnist_files or "made"
    for program in programs & set(JPEG):
        photographs(data / program, restart=RESTART if program == "jpeg-own" else 0)
    return about


def decoder_for(environments: Mapping[str, Mapping[str, str]]) -> str:
    """The GPU's where it works without MPS and with it, for both are compared. Tried in processes of their own, because
    this one must not touch the GPU."""
    for environment in environments.values():
        pid = os.fork()
        if not pid:
            signal.alarm(45)
            os.environ.update(environment)
            os._exit(not decodes())
        if os.waitpid(pid, 0)[1]:
            return PROCESSOR
    return NVJPEG


def main(argument: str) -> int:
    order: dict[str, Any] = json.loads(argument)
    end = time.monotonic() + order["limit"]
    programs = Path(order["programs"]) if order["programs"] else None
    seeds = [published.BY_NAME[name] for name in order["seeds"]]
    os.environ["CUDA_CACHE_DISABLE"] = "1"  # nothing may be left behind
    place = next(Path(one) for one in EMPTY if not Path(__file__).is_relative_to(one) and Path(one).is_dir())
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755", "mpsagent-seeds", str(place)], check=True)
    data = place / "data"
    data.mkdir(mode=0o755)
    about = {} if programs else prepare(data, seeds, order["mnist"])
    nvml = Nvml("none" if programs else order["gpu"])
    mps = OwnMps(place / "mps", "one-server", published.limits(), programs, order["gpu"])
    _say(about={**about, "driver": nvml.driver})
    environments = {OFF: {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}, published.ON: mps.environment}
    try:
        mps.start()
        if (data / "jpeg").is_dir():
            found = decoder_for(environments)
            (data / "jpeg" / "decoder").write_text(found)
            _say(about={"decoder": found})
        windows = Windows(data, order["seconds"], end, environments, nvml, programs)
        for seed in seeds:
            for start in seed.starts:
                for mode in start.modes:
                    _say(begins=f"{seed.name}: {start.program}, {mode}")
                    windows.measure(seed, start, mode)
    except OwnMpsError as error:
        _say(problem=str(error))
        return 1
    finally:
        mps.stop()
    return 0


def _say(**what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
