"""Agent, gate, daemon and servers may die at any moment; the full run is `python -m tests.agent.kills 200`, or
`MPSAGENT_KILLS=200` here."""

from __future__ import annotations

import os

import pytest

from tests.agent import kills
from tests.agent.stage import Stage

COUNT = int(os.environ.get("MPSAGENT_KILLS", "3"))


@pytest.mark.timeout(400 + 10 * COUNT)
def test_killed_under_load_nobody_is_refused_or_gets_more_and_nothing_is_forgotten(stage: Stage) -> None:
    """Who waits is served, exactly; nothing twice on record; the same picture afterwards."""
    played = kills.play(stage, COUNT, COUNT, max(1, COUNT // 4), max(1, COUNT // 4))
    assert played.verdict() == []
    assert played.counts["exact"] > 0
    assert played.counts["picture"] > 0
