"""``mpsagent-cli env``: what a CUDA process needs, for each reader."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.api.stand_in import Served
from tests.cli.program import run


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "shell",
            "export CUDA_MPS_PIPE_DIRECTORY='/tmp/my mps'\nexport CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=''\n",
        ),
        ("slurm", "export CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps\nexport CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=\n"),
        (
            "docker",
            "--env 'CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps' --env CUDA_MPS_PINNED_DEVICE_MEM_LIMIT= "
            "--volume '/tmp/my mps:/tmp/my mps'\n",
        ),
        ("json", '{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/my mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": ""}\n'),
    ],
)
def test_env_for_each_reader(served: Served, form: str, text: str) -> None:
    """A shell needs quotes, slurmd must not get any. Whatever text a program had in the variable that can take its
    memory limit away, an empty one does not (recording 11)."""
    no_memory_limit(served)
    state = served.backend.state
    served.backend.state = replace(state, policy=replace(state.policy, pipe_directory="/tmp/my mps"))
    assert run(served, "env", "--format", form).stdout == text


def test_a_program_that_gives_way(served: Served) -> None:
    """Of its user's own will, so not in the device of all containers."""
    given = json.loads(run(served, "env", "--give-way", "--json").stdout)
    assert given == {**json.loads(run(served, "env", "--json").stdout), "CUDA_MPS_CLIENT_PRIORITY": "1"}
    assert "export CUDA_MPS_CLIENT_PRIORITY=1" in run(served, "env", "--give-way").stdout.splitlines()
    assert run(served, "env", "--give-way", "--format", "cdi").returncode == 2


def no_memory_limit(served: Served) -> None:
    explains(served, {"0": None})


def explains(served: Served, memory: Mapping[str, int | None]) -> None:
    async def explain(user: str, cgroup: str | None = None) -> object:
        return {"active_threads": {"value": 20.0}, "memory_limit": {"value": memory}}

    served.backend.explain = explain  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("memory", "fraction"),
    [
        ({"0": 20 << 30}, "0.1357"),  # 19 of 140 GiB
        ({"0": 2 << 30}, "0.0071"),
        ({"0": 1 << 30}, "0.0029"),  # with 600 MiB less: of 1 GiB JAX cannot do without the other half
        ({"0": 600 << 20}, None),  # a context alone takes 516 MiB
        ({"0": 20 << 30, "1": 10 << 30}, "0.1357"),  # a device that it does not have
        ({"0": None}, None),
    ],
)
def test_the_fraction_of_the_gpu_that_fits_the_users_limit(
    served: Served, memory: dict[str, int | None], fraction: str | None
) -> None:
    """JAX, vLLM and TensorFlow count by the whole GPU. With 1 GiB less than its limit JAX worked at each limit tried
    (docs/measured.md)."""
    explains(served, memory)
    given = json.loads(run(served, "env", "--json").stdout)
    assert given.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == fraction
    notes = [line for line in run(served, "env").stdout.splitlines() if line.startswith("#")]
    assert len(notes) == (fraction is not None)
    for words in ("--gpu-memory-utilization", "per_process_gpu_memory_fraction") if fraction else ():
        assert f"{words} {fraction}" in notes[0]
    assert not any(one.startswith("#") for one in run(served, "env", "--format", "slurm").stdout.splitlines())


def test_a_shell_takes_all_of_it(served: Served) -> None:
    explains(served, {"0": 20 << 30})
    text = run(served, "env").stdout
    shown = ["printf", "%s,%s", "$XLA_PYTHON_CLIENT_MEM_FRACTION", "${CUDA_MPS_PINNED_DEVICE_MEM_LIMIT-unset}"]
    script = f'eval "$1"; {shown[0]} {shown[1]} "{shown[2]}" "{shown[3]}"'
    made = subprocess.run(["sh", "-c", script, "sh", text], capture_output=True, text=True, check=True)
    assert made.stdout == "0.1357,"


PARTITIONING = {
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20.0"
}  # fmt: skip


def test_a_program_that_divides_its_own_share(served: Served) -> None:
    """With its limit as its own percentage, to which MPS holds it."""
    given = json.loads(run(served, "env", "--partitioning", "--json").stdout)
    assert given == {**json.loads(run(served, "env", "--json").stdout), **PARTITIONING}
    for form in ("shell", "slurm", "docker"):
        text = run(served, "env", "--partitioning", "--give-way", "--format", form).stdout
        assert all(f"{name}={value}" in text for name, value in PARTITIONING.items())
    assert run(served, "env", "--partitioning", "--format", "cdi").returncode == 2


@pytest.mark.parametrize("limit", [100.0, None])
def test_its_percentage_is_never_all(served: Served, monkeypatch: pytest.MonkeyPatch, limit: float | None) -> None:
    """With 100 percent MPS would not hold it to what its job has; None: not known while the GPUs are not."""

    async def explain(user: str, cgroup: str | None = None) -> object:
        assert user == str(os.getuid())
        return {"active_threads": {"value": limit}, "memory_limit": {"value": {}}}

    monkeypatch.setattr(served.backend, "explain", explain)
    given = json.loads(run(served, "env", "--partitioning", "--json").stdout)
    assert given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "99.9"


def test_env_as_a_container_device(served: Served) -> None:
    """What podman, docker and containerd read from /etc/cdi; tests/agent/test_containers.py gives it to podman."""
    spec = json.loads(run(served, "env", "--format", "cdi").stdout)
    assert (spec["cdiVersion"], spec["kind"]) == ("0.3.0", "mpsagent/mps")
    (device,) = spec["devices"]
    (mount,) = device["containerEdits"]["mounts"]
    assert device["name"] == "all"
    assert device["containerEdits"]["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]
    assert (mount["hostPath"], mount["containerPath"]) == ("/tmp/nvidia-mps", "/tmp/nvidia-mps")
    assert "ro" in mount["options"]
