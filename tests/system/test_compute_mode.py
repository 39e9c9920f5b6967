"""The compute mode is set before the daemon and given back after it: the real program, on a stand-in below NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.nvml_stand_in import UUID, Machine

EXCLUSIVE, DEFAULT, PROHIBITED = "3", "0", "2"


class Gpu:
    def __init__(self, machine: Machine, state: Path) -> None:
        self.machine, self.state = machine, state
        machine.set("mode", DEFAULT)

    def run(self, *words: str, **environment: str) -> tuple[int, str]:
        given = {**os.environ, **self.machine.environment, "MPSAGENT_STATE": str(self.state), **environment}
        argv = [sys.executable, "-m", "mpsagent.system.compute_mode", *words]
        ended = subprocess.run(argv, capture_output=True, text=True, check=False, env=given, timeout=50)
        return ended.returncode, ended.stderr

    def set(self, mode: str = "exclusive-process", **environment: str) -> tuple[int, str]:
        return self.run("set", "gpu0", MPSAGENT_COMPUTE_MODE=mode, **environment)

    @property
    def mode(self) -> str:
        return (self.machine.place / "mode").read_text().strip()

    @property
    def kept(self) -> Path:
        return self.state / "compute-mode-gpu0.json"


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    place, state = tmp_path / "nvml", tmp_path / "state"
    place.mkdir()
    state.mkdir()
    return Gpu(Machine(place), state)


def test_it_is_set_and_given_back(gpu: Gpu) -> None:
    """Also when the daemon is started twice without its end in between: what was found first counts."""
    assert gpu.set() == (0, f"<5>compute mode of {UUID}: exclusive-process (it was default)\n")
    assert gpu.mode == EXCLUSIVE
    assert gpu.set() == (0, "")
    assert gpu.run("restore", "gpu0") == (0, f"<5>compute mode of {UUID}: default again\n")
    assert gpu.mode == DEFAULT
    assert not gpu.kept.exists()


def test_what_was_so_already_or_others_have_changed_is_left_alone(gpu: Gpu) -> None:
    gpu.machine.set("mode", EXCLUSIVE)
    assert gpu.set() == (0, "")
    assert gpu.run("restore", "gpu0") == (0, "")
    assert gpu.mode == EXCLUSIVE
    gpu.set("default")
    gpu.machine.set("mode", PROHIBITED)
    code, said = gpu.run("restore-all")
    assert (code, gpu.mode) == (0, PROHIBITED)
    assert "left at prohibited, which mpsagent did not set" in said


def test_without_a_wish_or_for_other_gpus_nothing_is_asked_or_set(gpu: Gpu) -> None:
    gpu.machine.set("no_driver")
    assert gpu.run("set", "gpu0") == (0, "")
    assert gpu.run("restore", "gpu0") == (0, "")
    gpu.machine.unset("no_driver")
    assert gpu.set(CUDA_VISIBLE_DEVICES="GPU-another") == (0, "")
    assert gpu.mode == DEFAULT


def test_a_refusal_is_said_and_what_was_found_is_kept(gpu: Gpu) -> None:
    """By the driver, or because there is none: the daemon's unit goes on without it."""
    gpu.set()
    gpu.machine.set("denied")
    code, said = gpu.run("restore", "gpu0")
    assert (code, gpu.mode) == (1, EXCLUSIVE)
    assert "Insufficient Permissions" in said
    assert gpu.kept.exists()
    gpu.machine.unset("denied")
    assert gpu.run("restore", "gpu0")[0] == 0
    assert gpu.mode == DEFAULT


def test_a_gpu_that_does_not_answer_gets_its_mode_back_when_it_does(gpu: Gpu) -> None:
    gpu.set()
    gpu.machine.set("lost")
    code, said = gpu.run("restore", "gpu0")
    assert (code, gpu.mode) == (0, EXCLUSIVE)
    assert f"{UUID}: not given back, because the GPU does not answer" in said
    gpu.machine.unset("lost")
    assert gpu.run("restore", "gpu0")[0] == 0
    assert gpu.mode == DEFAULT
    assert not gpu.kept.exists()


def test_a_reboot_has_forgotten_the_mode_and_what_was_kept_counts_no_more(gpu: Gpu) -> None:
    gpu.set()
    known = json.loads(gpu.kept.read_text())
    gpu.kept.write_text(json.dumps({**known, "boot": "another"}))
    assert gpu.run("restore", "gpu0") == (0, "")
    assert gpu.mode == EXCLUSIVE, "another boot's word says nothing about this one's"


@pytest.mark.parametrize("words", [(), ("set",), ("set", "../x"), ("other", "gpu0")])
def test_a_wrong_call_is_said(gpu: Gpu, words: tuple[str, ...]) -> None:
    assert gpu.run(*words)[0] == 2
