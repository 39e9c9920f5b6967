"""One of six deaths of every party at every step of the heart; `make test` has one of forty in test_world.py."""

from __future__ import annotations

import pytest

from tests.world.heart import SCENES, enumerate_all
from tests.world.plans import WAYS

EVERY = 6
"""`python -m tests.world.heart` plays all of them, in seven minutes of processor time."""
PAIRS = 60
"""Of the deaths one of so many, and of what may die after each. `--pairs` plays all pairs, which takes hours."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scene", SCENES)
def test_whoever_dies_at_whichever_step_nobody_is_stuck(scene: str, way: str) -> None:
    played, broken = enumerate_all(scene, way, EVERY)
    assert broken == []
    assert played > 50


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scene", ["one client", "a change of turn"])
def test_whoever_dies_after_a_death_nobody_is_stuck(scene: str) -> None:
    played, broken = enumerate_all(scene, "shared", PAIRS, pairs=True)
    assert broken == []
    assert played > 20
