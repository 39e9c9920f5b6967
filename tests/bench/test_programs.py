"""Workloads that are programs of their own: PyTorch's, and those of whoever measures."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import click
import pytest

from mpsagent.bench import outside, programs
from mpsagent.bench.plan import Run
from mpsagent.bench.process import ProcessError, Ready
from mpsagent.bench.results import Figure
from mpsagent.bench.torch_workloads import TORCH
from mpsagent.interfaces import cli_bench

TELLS = ["/bin/sh", "-c", "n=0; while :; do n=$((n + 5)); echo working; echo steps $n; sleep 0.01; done"]


def figures(ready: Ready) -> tuple[float, list[int]]:
    """On a machine with other things to do a short time may be too short."""
    for seconds in (0.3, 3.0):
        with suppress(ProcessError):
            return ready.work(time.monotonic(), seconds)
    return ready.work(time.monotonic(), 30.0)


def test_a_program_that_tells_of_its_steps_is_measured_by_them() -> None:
    program = programs.Program(TELLS)
    ready = program(0)
    assert figures(ready)[0] > 0
    ready.end()
    assert program._process.poll() is not None


def test_a_program_that_ends_is_started_again_and_its_steps_go_on() -> None:
    program = programs.Program(["/bin/sh", "-c", "echo steps 1; echo steps 2; sleep 0.01"])
    ready = program(0)
    assert figures(ready)[0] > 0
    ready.end()


def test_a_program_that_says_nothing_is_measured_by_its_runs() -> None:
    ready = programs.Program(["/bin/sleep", "0.01"])(0)
    runs, latencies = figures(ready)
    assert runs > 0
    assert all(value >= 10_000 for value in latencies)
    ready.end()


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(ProcessError, match="ended with 3: it broke"):
        programs.Program(["/bin/sh", "-c", "echo it broke >&2; exit 3"])(0)
    with pytest.raises(ProcessError, match="/nonexistent ended with"):
        programs.Program(["/nonexistent"])(0)


def test_pytorch_is_spoken_to_line_by_line(tmp_path: Path) -> None:
    """By a stand-in for a Python that has it."""
    stand_in = tmp_path / "python"
    stand_in.write_text(
        '#!/bin/sh\n[ "$3" = mnist ] || { echo no such model >&2; exit 1; }\n'
        'echo \'{"gpu": "a", "multiprocessors": 66}\'\nwhile read -r _; do echo done; done\n'
    )
    stand_in.chmod(0o755)
    ready = programs.Torch(str(stand_in), "mnist")(0)
    assert (ready.gpu, ready.multiprocessors) == ("a", 66)
    assert ready.work(time.monotonic(), 30.0 / 100)[0] >= 0
    ready.end()
    with pytest.raises(ProcessError, match="no such model"):
        programs.Torch(str(stand_in), "other")(0)


def test_without_pytorch_its_workloads_are_left_out_and_those_who_ask_are_told(tmp_path: Path) -> None:
    without, broken = tmp_path / "without", tmp_path / "broken"
    without.write_text("#!/bin/sh\nexit 1\n")
    without.chmod(0o755)
    assert cli_bench._torch(None, ["block"]) == ""
    for python in (str(without), str(broken)):
        with pytest.raises(click.UsageError, match="resnet needs PyTorch, which"):
            cli_bench._torch(python, ["block", "resnet"])
    with pytest.raises(click.UsageError, match="cannot import PyTorch"):
        cli_bench._torch(str(without), [])
    assert set(TORCH) == {"resnet", "resnet16", "mnist"}


def test_programs_of_ones_own_run_beside_each_other_and_end() -> None:
    """Two at once: each must hear that it is over."""
    own = {"tells": TELLS, "fails": ["/bin/sh", "-c", "echo it broke >&2; exit 3"]}
    runs = [Run("off", "tells", 2, 2, 1.0), Run("off", "fails", 1, 1, 1.0)]
    with outside.going(runs, None, None, "", own) as said:
        two, failed = (one for one in said if isinstance(one, Figure))
    assert two.problem or (two.throughput > 0 and len(two.each) == 2)
    assert "it broke" in failed.problem
