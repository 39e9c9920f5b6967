"""A few days of trouble of each kind, in which every promise holds; `make test-all` has them."""

from __future__ import annotations

import pytest

from tests.world.trouble import DAYS, draw, fails


@pytest.mark.parametrize("name", DAYS)
def test_every_promise_holds_on_a_few_days_of_trouble(name: str) -> None:
    for seed in range(1, 4):
        found = fails(draw(seed, (name,)))
        assert found is None, f"seed {seed}: {found[0]}"


def test_a_full_server_that_is_not_on_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.core.caps.NEARLY_FULL", 2.0)
    days = (draw(seed, ("hostile",)) for seed in range(20))
    assert any("contexts, which is not on record" in found[0] for day in days
               if any(one.kind == "flood" for one in day.comings) and (found := fails(day)) is not None)  # fmt: skip
