"""The stage of the agent's tests."""

from tests.agent.conftest import sim, stage

__all__ = ["sim", "stage"]
