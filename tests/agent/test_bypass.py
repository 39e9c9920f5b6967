"""Programs that compute outside MPS, and the compute mode: said, with what to do, and forgotten when it is over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from mpsagent.agent.bypass import Bypass, mode_trouble
from mpsagent.system.devices import ComputeProcess
from tests.agent.stage import A, B, Stage

OURS = ["GPU-1"]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as one:
        yield one
        one.kill()


def row(pid: int, *, device: str = "GPU-1", mps: bool = False) -> ComputeProcess:
    return ComputeProcess(pid, device, mps, None)


def test_each_process_is_said_once_and_forgotten_when_it_has_ended(process: subprocess.Popen[bytes]) -> None:
    """A record for each look would fill the history; a trouble that stays would hide the next."""
    bypass = Bypass()
    (found,) = bypass.take([row(process.pid), row(process.pid)], OURS, set())
    assert (found.pid, found.uid) == (process.pid, os.geteuid())
    assert bypass.take([row(process.pid)], OURS, set()) == []
    assert f"process {process.pid} of user {os.geteuid()} on GPU-1" in (bypass.trouble() or "")
    process.kill()
    process.wait()
    bypass.drop_ended()
    assert bypass.trouble() is None


def test_clients_of_mps_and_other_peoples_gpus_are_no_bypass(process: subprocess.Popen[bytes]) -> None:
    """NVML lists them all; blaming a server or another instance's program would teach people to ignore it."""
    bypass = Bypass()
    assert bypass.take([row(process.pid, mps=True)], OURS, set()) == []
    assert bypass.take([row(process.pid)], OURS, {process.pid}) == []
    assert bypass.take([row(process.pid, device="GPU-2")], OURS, set()) == []
    assert bypass.take([row(2**22 + 1)], OURS, set()) == []
    assert bypass.trouble() is None


def test_many_are_counted_not_listed() -> None:
    """A status line has to stay one."""
    processes = [subprocess.Popen(["sleep", "60"]) for _ in range(8)]
    bypass = Bypass()
    bypass.take([row(one.pid) for one in processes], OURS, set())
    assert (bypass.trouble() or "").endswith("and 3 more")
    for one in processes:
        one.kill()
        one.wait()


def test_only_our_gpus_mode_counts_and_only_if_the_policy_says_one() -> None:
    modes = {"GPU-1": "default", "GPU-2": "prohibited"}
    assert mode_trouble(None, modes, OURS) is None
    assert mode_trouble("default", modes, OURS) is None
    assert mode_trouble("exclusive-process", {}, OURS) is None
    text = mode_trouble("exclusive-process", modes, OURS) or ""
    assert "default on GPU-1" in text
    assert "GPU-2" not in text


def test_a_program_outside_mps_is_found_while_a_client_works(stage: Stage) -> None:
    """And the compute mode that the policy asks for is looked at, never set."""
    agent = stage.with_agent("[limits]\nthreads = 20\n", extra='compute_mode = "exclusive-process"')
    stage.problem(agent, "compute mode")
    inside = stage.client(A, "sleep", 60)
    outside = stage.client(B, "sleep", 60, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    inside.working()
    outside.working()
    os.kill(agent.pid, signal.SIGHUP)  # a reload looks at once; otherwise it takes up to a minute
    found = stage.record("bypass")
    assert (found["pid"], found["uid"]) == (outside.pid, B)
    assert str(inside.pid) not in stage.problem(agent, f"process {outside.pid} of user {B}")
    outside.kill()
    stage.until(lambda: not any("outside MPS" in one for one in agent.api.problems()), "over when it has ended")
    assert len(stage.records("bypass")) == 1


def test_while_nothing_works_no_program_is_started_to_look(stage: Stage) -> None:
    """An idle node has to stay idle."""
    stage.with_agent("[limits]\nthreads = 20\n")
    outside = stage.client(B, "sleep", 60, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    outside.working()
    time.sleep(1.5)
    assert stage.records("bypass") == []
