"""Sums of users and days: time with the GPU is counted once, at the right day, and what is not known is not charged."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.system.accounts import Accounts, Job, Sums, divide, job_of, user_of

DAY = 100.0


def calendar(at: float) -> tuple[str, float]:
    """Days of a hundred seconds."""
    return f"day {int(at // DAY)}", (at // DAY + 1) * DAY


def came(pid: int, at: float, uid: int = 1, waited: float = 0.0) -> dict[str, object]:
    return {"kind": "client.connected", "at": at, "uid": uid, "pid": pid, "waited": waited}


def ended(pid: int, at: float, uid: int = 1, outcome: str = "ok") -> dict[str, object]:
    return {"kind": "client.ended", "at": at, "uid": uid, "pid": pid, "outcome": outcome}


def of(*records: dict[str, object], seen: float = 0.0) -> dict[tuple[str, int], Sums]:
    accounts = Accounts(calendar, user_of, {}, {}, seen)
    for one in records:
        accounts.take(one)
    return accounts.sums


def test_clients_at_the_same_time_are_one_user_at_work() -> None:
    """Forty-six processes do not have the GPU forty-six times."""
    assert of(came(1, 10), came(2, 15), ended(1, 20), ended(2, 40))["day 0", 1].gpu == 30


def test_a_long_turn_is_divided_at_midnight() -> None:
    """Each day has what was had on it."""
    sums = of(came(1, 50), ended(1, 320))
    assert [sums[f"day {n}", 1].gpu for n in range(4)] == [50, 100, 100, 20]


def test_a_pause_is_no_time_with_the_gpu() -> None:
    """Also where it lasts over midnight, or the client ends in it."""
    paused = {"kind": "user.paused", "at": 60, "uid": 1, "clients": 1}
    sums = of(came(1, 50), paused, {"kind": "user.resumed", "at": 130, "uid": 1, "seconds": 70}, ended(1, 150))
    assert [(sums[f"day {n}", 1].gpu, sums[f"day {n}", 1].paused) for n in (0, 1)] == [(10, 40), (20, 30)]
    assert of(came(1, 50), paused, ended(1, 90))["day 0", 1].gpu == 10
    accounts = Accounts(calendar, job_of, {}, {})
    for one in (came(1, 10) | {"job": "train"}, paused, came(2, 70, uid=2) | {"job": "train"}, ended(2, 90, uid=2)):
        accounts.take(one)
    assert {owner: one.gpu for (_, owner), one in accounts.sums.items()} == {Job("train", 1): 50, Job("train", 2): 20}


def test_waits_outcomes_and_turns_are_counted() -> None:
    """Who went away waited, too."""
    sums = of(
        came(1, 10, waited=3), came(2, 11, waited=7),
        {"kind": "client.left", "at": 12, "uid": 1, "pid": 3, "waited": 9},
        ended(1, 20, outcome="faulted"), ended(2, 21, outcome="ended"), {"kind": "turn.began", "at": 10, "uid": 1},
        {"kind": "client.refused", "at": 13, "uid": 2, "pid": 9, "why": "full"},
    )  # fmt: skip
    assert sums["day 0", 1] == Sums(11, 19, 9, clients=2, left=1, faults=1, forced=1, turns=1)
    assert sums["day 0", 2] == Sums(refused=1)


def test_a_job_is_counted_by_name_and_user_and_stays_whose_it_was() -> None:
    """Its lease may be over when its client ends, and an agent that comes later knows of none."""
    jobs = Accounts(calendar, job_of, {}, {})
    given = {"limits": {"threads": 30.0, "memory": {"0": 4096, "1": 8192}}}
    for one in (
        {**came(1, 10, waited=3), "job": "slurm-7", **given}, {**came(2, 20, uid=2), "job": "slurm-7"}, came(3, 25),
        ended(1, 40, outcome="ended"), {**ended(2, 50, uid=2), "job": "slurm-7"}, ended(3, 60),
        {"kind": "client.left", "at": 70, "uid": 1, "pid": 4, "waited": 9, "job": "slurm-8"},
        {"kind": "client.refused", "at": 71, "uid": 1, "pid": 5, "why": "full"},
    ):  # fmt: skip
        jobs.take(one)
    assert jobs.sums == {
        ("day 0", Job("slurm-7", 1)): Sums(30, 3, 3, clients=1, forced=1),
        ("day 0", Job("slurm-7", 2)): Sums(30, clients=1),
        ("day 0", Job("slurm-8", 1)): Sums(0, 9, 9, left=1),
    }
    assert jobs.limits["day 0", Job("slurm-7", 1)] == (30.0, 8192)
    assert not jobs.working
    assert not jobs.busy


def test_an_end_that_no_agent_has_seen_counts_until_the_last_record() -> None:
    """The machine was off for a week: nobody had the GPU then."""
    accounts = Accounts(calendar, user_of, {1: 7}, {7: 30.0}, seen=60.0)
    accounts.take(ended(1, 90, uid=7, outcome="unknown"))
    assert accounts.sums["day 0", 7].gpu == 30
    assert not accounts.working
    assert not accounts.busy


@pytest.mark.parametrize("broken", [{}, {"uid": None}, {"uid": 1, "pid": "x"}, {"uid": 1, "pid": 5, "outcome": None}])
def test_a_record_that_lacks_something_changes_nothing(broken: dict[str, object]) -> None:
    """Of an agent of another version."""
    accounts = Accounts(calendar, user_of, {}, {})
    for kind in ("client.connected", "client.ended", "client.left"):
        accounts.take({"kind": kind, "at": 1.0, **broken})
    assert all(sums.gpu == 0 for sums in accounts.sums.values())
    assert not accounts.working


def test_a_pid_that_comes_again_is_another_client() -> None:
    """Its end was lost with a full disk."""
    assert of(came(1, 10), came(1, 30), ended(1, 40))["day 0", 1].gpu == 30


spans = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 500), st.integers(0, 300)).map(lambda t: (t[0], t[1], t[1] + t[2])),
    max_size=20,
)


@given(spans)
def test_the_time_of_a_user_is_that_of_the_union_of_its_clients(found: list[tuple[int, int, int]]) -> None:
    """Against counting second by second."""
    records = [came(pid, begin, uid) for pid, (uid, begin, _) in enumerate(found)]
    records += [ended(pid, end, uid) for pid, (uid, _, end) in enumerate(found)]
    records.sort(key=lambda one: (float(str(one["at"])), one["kind"] == "client.ended"))
    sums = of(*records)
    for uid in range(4):
        seconds = {second for who, begin, end in found if who == uid for second in range(begin, end)}
        assert sum(one.gpu for (_, who), one in sums.items() if who == uid) == len(seconds)


@given(st.floats(0, 1e6), st.floats(0, 2000))
def test_the_parts_of_a_span_are_the_whole(begin: float, length: float) -> None:
    """Each on a day of its own, in order."""
    parts = list(divide(begin, begin + length, calendar))
    assert sum(seconds for _, seconds in parts) == pytest.approx(length, abs=1e-6)
    assert all(one < other for (one, _), (other, _) in pairwise((int(d.split()[1]), s) for d, s in parts))
