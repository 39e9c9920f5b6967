"""Every death of every party at every step of the heart; `make test` has one of forty in test_world.py."""

from __future__ import annotations

import pytest

from tests.world.heart import SCENES, enumerate_all
from tests.world.plans import WAYS

STARTS = tuple(f"{scene}, apart, daemon before its step {step}:" for scene in SCENES for step in (1, 2))
"""Known: without systemd, a control daemon that is killed in the moment in which it starts is waited for, 15 s
(mpsagent/system/control_child.py). Its user has no other daemon then; in the other ways it starts with the agent."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scene", SCENES)
def test_whoever_dies_at_whichever_step_nobody_is_stuck(scene: str, way: str) -> None:
    played, broken = enumerate_all(scene, way)
    assert [one for one in broken if not one.startswith(STARTS)] == []
    assert len(broken) <= 2
    assert played > 300
