"""One day of each habit. `python -m tests.world.known` says after how many days each known defect is found."""

from __future__ import annotations

import pytest

from tests.world.habits import DAYS, Comes, Habit, Lived, draw
from tests.world.many import played
from tests.world.plans import LIMITS
from tests.world.world import Fault


@pytest.mark.parametrize("name", DAYS)
def test_every_promise_holds_on_a_day_with_this_habit(name: str) -> None:
    found = played(draw(1, (name,)), Lived)
    assert found is None, found[0]


def test_a_user_whose_daemon_has_no_client_any_more_has_a_name_after_a_restart() -> None:
    """Arrivals, seed 81: the agent asked for the names of users with clients and of those who wait."""
    for way in ("apart", "own"):
        comes = Comes(2.0, 2003, 1.0, kind="worker"), Comes(30.0, 2004, 1.0, kind="worker")
        day = Habit(1, way, comes, (Fault(20.0, "agent"),), LIMITS, ends=True, quiet=True, rest=90.0)
        found = played(day, Lived)
        assert found is None, found[0]


@pytest.mark.parametrize("way", ["shared", "apart"])
def test_a_client_that_wants_a_context_while_gate_and_agent_are_removed_is_counted_once(way: str) -> None:
    """Mixed, seed 6035: its connection was taken in before what the earlier agent had kept of it."""
    comes = tuple(Comes(2.0, 2003, 60.0, kind="worker") for _ in range(8))
    faults = Fault(9.9, "agent", "away", 10), Fault(10.0, "agent", "removed", 2)  # the gate is back first
    sections = ((3001, (10.0, 1024)),)  # so it holds them meanwhile
    day = Habit(1, way, comes, faults, LIMITS, ends=True, quiet=True, cgroups=sections)
    found = played(day, Lived)
    assert found is None, found[0]


def test_a_client_is_warned_once_although_the_next_agent_does_not_know_yet_who_waits() -> None:
    """Warned, seed 9009: while the name service was asked nobody seemed to wait, and the warning was forgotten."""
    comes = Comes(2.0, 2002, 60.0, kind="worker"), Comes(4.0, 2004, 5.0, kind="worker")
    text = '[turn]\ntime_limit = "10s"\ngrace = "5s"\non_expiry = "terminate"\nwarning_signal = "SIGUSR1"\n'
    for seed in range(1, 5):
        day = Habit(seed, "shared", comes, (Fault(15.0, "agent"),), LIMITS, ends=True, quiet=True, by_name=True,
                    more=text, grace=5.0, after=15.0, late=2.0)  # fmt: skip
        found = played(day, Lived)
        assert found is None, found[0]
