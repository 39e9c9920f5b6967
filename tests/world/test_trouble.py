"""A few days of trouble of each kind, in which every promise holds; `make test-all` has them."""

from __future__ import annotations

import pytest

from tests.world.plans import LIMITS
from tests.world.trouble import DAYS, FOUND, Day, Guest, draw, fails


@pytest.mark.parametrize("name", DAYS)
def test_every_promise_holds_on_a_few_days_of_trouble(name: str) -> None:
    for seed in range(1, 4):
        found = fails(draw(seed, (name,)))
        assert found is None, f"seed {seed}: {found[0]}"


def test_a_signal_to_who_has_become_another_user_s_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.linux.processes.Process.is_anothers", lambda self: False)
    guests = (*(Guest(2.0 + place, 2004, 30.0, kind="becoming") for place in range(8)), Guest(6.0, 2005, 1.0))
    text = '[turn]\ntime_limit = "4s"\ngrace = "1s"\n'
    days = (
        Day(seed, "shared", guests, (), LIMITS, ends=True, name="setuid", quiet=True, more=text, overlap=FOUND)
        for seed in range(1, 9)
    )
    assert any(found is not None and "and gets signal" in found[0] for found in map(fails, days))


def test_a_client_that_cannot_be_seen_and_is_let_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.gate.holding.UNSEEN", None)
    found = fails(draw(2, ("unseen",)))
    assert found is not None


def test_a_full_server_that_is_not_on_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.core.caps.NEARLY_FULL", 2.0)
    days = (draw(seed, ("hostile",)) for seed in range(20))
    assert any("contexts, which is not on record" in found[0] for day in days
               if any(one.kind == "flood" for one in day.comings) and (found := fails(day)) is not None)  # fmt: skip


def test_an_idle_user_who_is_ended_while_no_other_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutation that no day found: in core/caps.py a place counts as wanted although none waits."""
    monkeypatch.setattr("mpsagent.core.caps._place_wanted", lambda view, uid: True)
    found = (fails(draw(seed, ("idle",))) for seed in range(1, 6))
    assert any(one is not None and "and no other user waits" in one[0] for one in found)
