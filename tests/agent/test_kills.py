"""The agent may die at any moment, and nobody who works notices; the full run is `python -m tests.agent.kills 200`."""

from __future__ import annotations

import pytest

from tests.agent import kills
from tests.scenes.stage import Stage


@pytest.mark.timeout(240)
def test_killed_under_load_it_gives_nobody_more_and_forgets_nothing(stage: Stage) -> None:
    """Limits, undisturbed clients, nothing twice, the history without a gap, the same state afterwards."""
    played = kills.play(stage, 10)
    assert played.verdict() == []
    assert played.counts["exact"] > 0
    assert played.counts["terminated"] > 0
    assert played.counts["pictures"] > 0
