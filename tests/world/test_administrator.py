"""A few days with an administrator, front-ends, ailing disks and threads; and that their judges can find something."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mpsagent.agent.host import Agent
from mpsagent.agent.orders import Orders, _Places
from mpsagent.core.view import View
from tests.world.administrator import DAYS, Administered
from tests.world.many import played
from tests.world.plans import LIMITS
from tests.world.trouble import Day, Guest
from tests.world.world import Fault


def day(name: str, seed: int) -> Any:
    return DAYS[name](random.Random(f"{name} {seed}"), seed)


@pytest.mark.parametrize("name", DAYS)
def test_every_promise_holds_on_a_few_days_of_an_administrator(name: str) -> None:
    for seed in range(1 if name == "shares" else 4):
        found = played(day(name, seed), Administered)
        assert found is None, f"seed {seed}: {found[0]}"


def test_a_policy_that_the_disk_does_not_take_in_time_is_in_force_all_the_same() -> None:
    """Ailing 44 found it: an agent that started while the disk was slow denied everybody, and had control daemons quit:
    what could not be remembered within 5 s counted as wrong."""
    comings = tuple(Guest(2.0 + place, 2001 + place % 3, 2.0) for place in range(20))
    faults = Fault(3.0, "disk", "slow", 20), Fault(4.0, "agent", "kill")
    for seed in range(10):
        found = played(Day(seed, "together", comings, faults, LIMITS, name="ailing", quiet=True), Administered)
        assert found is None, found[0]


def test_a_drain_in_which_somebody_is_let_in_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.agent.acting._drain", lambda *_, **__: None)
    assert any("after a drain was answered" in found[0] for seed in range(40)
               if any(one.what == "drain" for one in day("orders", seed).faults)
               and (found := played(day("orders", seed), Administered)) is not None)  # fmt: skip


def test_a_client_that_is_ordered_to_end_and_does_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.agent.acting._end", lambda *_, **__: None)
    assert any("was ordered to end" in found[0] for seed in range(40)
               if (found := played(day("orders", seed), Administered)) is not None)  # fmt: skip


def test_shares_that_are_not_fair_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With who came first always next, two users of three have all the time."""
    asked = next(one for seed in range(20) if len((one := day("shares", seed)).limits) == 3)
    waiting, came = View.waiting, [one.uid for one in asked.comings]
    monkeypatch.setattr(View, "waiting", lambda self: sorted(waiting(self), key=came.index))
    found = played(asked, Administered)
    assert found is not None
    assert "stands for" in found[0] or "which is not the same" in found[0]


def test_a_lease_that_is_answered_and_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpsagent.core.model.State.lease", lambda *_: None)
    assert any("and its lease or policy says" in found[0] for seed in range(6)
               if (found := played(day("batch", seed), Administered)) is not None)  # fmt: skip


def test_an_order_that_is_carried_out_and_not_on_record_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Agent.record
    monkeypatch.setattr(Agent, "record", lambda self, kind, *rest, **more: None if kind == "client.end_ordered"
                        else record(self, kind, *rest, **more))  # fmt: skip
    found = played(day("flood", 0), Administered)
    assert found is not None
    assert "is not on record" in found[0]


def test_a_flood_of_users_orders_that_takes_roots_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one count of both sockets, and none of each user's own, and no user who gives way."""
    together = _Places()
    monkeypatch.setattr(_Places, "_gives_way", lambda self, uid: False)
    accept = Orders._accept
    monkeypatch.setattr("mpsagent.agent.orders.EACH", 1000)
    monkeypatch.setattr("mpsagent.agent.orders.MOST", 8)
    monkeypatch.setattr(Orders, "_accept", lambda self, sock, _: accept(self, sock, together))
    found = played(day("flood", 0), Administered)
    assert found is not None
    assert "too many orders" in found[0]
