"""A few days of trouble of each kind, in which every promise holds; `make test-all` has them."""

from __future__ import annotations

import pytest

from tests.world.trouble import DAYS, draw, fails


@pytest.mark.parametrize("name", DAYS)
def test_every_promise_holds_on_a_few_days_of_trouble(name: str) -> None:
    for seed in range(1, 4):
        found = fails(draw(seed, (name,)))
        assert found is None, f"seed {seed}: {found[0]}"
