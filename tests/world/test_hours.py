"""A hundred hours of a node, always the same: what fails here is due to a change. `make world` plays other ones."""

from __future__ import annotations

import time

import pytest

from tests.world import many
from tests.world.plans import WAYS, hour
from tests.world.plans import played as lasted
from tests.world.world import World

TESTS, HOURS = 25, 4
FIRST = 5_000_000


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", range(TESTS))
def test_every_promise_holds_for_a_hundred_hours(place: int) -> None:
    """A failure is told as `make world` does: seed, commit, the plan cut down, and the story."""
    seed, seconds = FIRST + place, 0.0
    while seconds < HOURS * 3600:
        plan = hour(seed, WAYS)
        found = many.played(plan, World)
        if found is not None:
            pytest.fail(many.told("hour", seed, plan, found, time.monotonic() + 300))
        seconds += lasted[-1]
        seed += TESTS
