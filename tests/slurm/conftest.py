"""The stage of the agent's tests, for jobs of a real Slurm."""

from __future__ import annotations

from tests.agent.conftest import sim, stage

__all__ = ["sim", "stage"]
