"""What NVIDIA's programs are started with."""

from __future__ import annotations

import pytest

from mpsagent.agent.executor import mps_environment
from mpsagent.policy.policy import Policy
from mpsagent.system.directories import Directories


def test_it_is_ours_whatever_the_agents_own_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate speaks the protocol that drivers up to 610 have and later ones have by default."""
    theirs = {"CUDA_MPS_PROTOCOL_VERSION": "3", "CUDA_MPS_SM_PARTITION": "x", "TZ": "Europe/Berlin", "PATH": "/bin"}
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    found = mps_environment(Policy(), Directories("/public", "/hidden", "/log", "/home"))
    assert (found["CUDA_MPS_PROTOCOL_VERSION"], found["TZ"], found["PATH"]) == ("2", "UTC", "/bin")
    assert "CUDA_MPS_SM_PARTITION" not in found
