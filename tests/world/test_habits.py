"""One day of each habit. `python -m tests.world.known` says after how many days each known defect is found."""

from __future__ import annotations

import pytest

from tests.world.habits import DAYS, Lived, draw
from tests.world.many import played


@pytest.mark.parametrize("name", DAYS)
def test_every_promise_holds_on_a_day_with_this_habit(name: str) -> None:
    found = played(draw(1, (name,)), Lived)
    assert found is None, found[0]
