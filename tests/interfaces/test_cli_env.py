"""``mpsagent-cli env``: what a CUDA process needs, for each reader."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.interfaces.program import run
from tests.interfaces.stand_in import Served, serve


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as one:
        yield one


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("shell", "export CUDA_MPS_PIPE_DIRECTORY='/tmp/my mps'\n"),
        ("slurm", "export CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps\n"),
        ("docker", "--env 'CUDA_MPS_PIPE_DIRECTORY=/tmp/my mps' --volume '/tmp/my mps:/tmp/my mps'\n"),
        ("json", '{"CUDA_MPS_PIPE_DIRECTORY": "/tmp/my mps"}\n'),
    ],
)
def test_env_for_each_reader(served: Served, form: str, text: str) -> None:
    """A shell needs quotes, slurmd must not get any."""
    state = served.backend.state
    served.backend.state = replace(state, policy=replace(state.policy, pipe_directory="/tmp/my mps"))
    assert run(served, "env", "--format", form).stdout == text


def test_a_program_that_gives_way(served: Served) -> None:
    """Of its user's own will, so not in the device of all containers."""
    given = json.loads(run(served, "env", "--give-way", "--json").stdout)
    assert given == {**json.loads(run(served, "env", "--json").stdout), "CUDA_MPS_CLIENT_PRIORITY": "1"}
    assert "export CUDA_MPS_CLIENT_PRIORITY=1" in run(served, "env", "--give-way").stdout.splitlines()
    assert run(served, "env", "--give-way", "--format", "cdi").returncode == 2


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

    async def explain(user: str) -> object:
        assert user == str(os.getuid())
        return {"threads": {"value": limit}}

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
