"""Totals of users: what they come to on the GPUs, and which no client would ever fit in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.mps.units import multiprocessors_for_percent
from mpsagent.policy import totals
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.values import Percent
from tests.policies import policy

GIB = 1 << 30
H200 = Device(0, "GPU-0", "NVIDIA H200", 140 * GIB, 132)
SMALL = Device(1, "GPU-1", "NVIDIA A30", 24 * GIB, 56)
ALICE = Identity(1001, "alice", ("lab",))


def test_without_totals_there_is_no_bound() -> None:
    assert policy("").rules(ALICE).total([H200]) is None


def test_what_totals_come_to() -> None:
    rules = policy(
        '[limits]\nactive_threads = "20%"\nmemory_limit = "4G"\ntotal_active_threads = "60%"\n'
        'total_memory_limit = "10%"\n'
    ).rules(ALICE)
    assert rules.total([H200, SMALL]) == Total(60.0, {0: 14 * GIB, 1: 2457 << 20}, 6.1)
    assert policy('[limits]\nmemory_limit = "1G"\ntotal_memory_limit = "3G"\n').rules(ALICE).total([H200]) == Total(
        None, {0: 3 * GIB}
    )


def test_each_key_is_looked_up_on_its_own() -> None:
    found = policy(
        "[limits]\nactive_threads = '10%'\ntotal_active_threads = '80%'\n[group.lab]\n"
        "total_active_threads = '40%'\n[user.alice]\nactive_threads = '15%'\n"
    )
    rules = found.rules(ALICE)
    assert (rules.threads, rules.total([H200])) == (Percent(15.0), Total(40.0, {}, 6.1))
    assert rules.explain([H200])["total_active_threads"]["value"] == "40%"
    assert rules.explain([H200])["total_active_threads"]["from"]["line"] == 5


@pytest.mark.parametrize(
    ("own", "most", "fit"),
    [(26, 52, 2), (10, 100, 10), (10, 109, 10), (26, 60, 2), (44, 132, 3), (2, 52, 6), (4, 132, 16)],
)
def test_totals_in_multiprocessors_are_counted_in_multiprocessors(own: int, most: int, fit: int) -> None:
    """Percentages round up to whole multiprocessors, and that must not cost the last process."""
    text = f"[limits]\nactive_threads = {own}\ntotal_active_threads = {most}\n"
    rules = policy(text).rules(ALICE)
    total, each = rules.total([H200]), rules.limits([H200])
    assert total is not None
    used: list[Limits] = []
    while total.fits(used, each):
        used.append(each)
    assert len(used) == fit


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 40))
def test_processes_that_fit_never_have_more_multiprocessors_than_their_total(own: int, most: int, crowd: int) -> None:
    """MPS gives each of an H200's at least 8: 8 processes of a job with 52 had 64 (2026-11-23, slurm-day.md). The first
    one always may: nothing smaller can be given."""
    total = (
        policy(f"[limits]\nactive_threads = '{min(own, most) / 10}%'\ntotal_active_threads = '{most / 10}%'\n")
        .rules(ALICE)
        .total([H200])
    )
    assert total is not None
    used: list[Limits] = []
    while len(used) < crowd and total.fits(used, Limits(min(own, most) / 10)):
        used.append(Limits(min(own, most) / 10))
    seen = len(used) * multiprocessors_for_percent(min(own, most) / 10, 132)
    assert len(used) == 1 or seen <= most * 132 / 1000
    assert len(used) == crowd or (len(used) + 1) * max(min(own, most), 61) > most, "and another one would not fit"


def test_a_process_without_a_limit_counts_as_the_whole() -> None:
    total = Total(None, {0: 10 * GIB})
    assert not total.fits([Limits(10)], Limits(10, {0: GIB}))
    assert not total.fits([], Limits(10))
    assert total.fits([Limits(10, {0: 9 * GIB})], Limits(100, {0: GIB}))


def test_tenths_add_up_without_drift() -> None:
    assert Total(100.0).fits([Limits(0.1)] * 999, Limits(0.1))
    assert not Total(100.0).fits([Limits(0.1)] * 1000, Limits(0.1))
    assert Total(0.3).fits([Limits(0.1), Limits(0.1)], Limits(0.1))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[limits]\nactive_threads = '60%'\ntotal_active_threads = '60%'\n", []),
        ("[limits]\nactive_threads = '61%'\ntotal_active_threads = '60%'\n", ["3 limits.total_active_threads"]),
        ("[limits]\ntotal_active_threads = '60%'\n", ["2 limits.total_active_threads"]),
        ("[user.a]\ntotal_active_threads = '60%'\n", ["2 user.a.total_active_threads"]),
        ("[limits]\nactive_threads = '70%'\n[group.g]\ntotal_active_threads = '60%'\n",
         ["4 group.g.total_active_threads"]),
        ("[limits]\nactive_threads = 50\ntotal_active_threads = 40\n", ["3 limits.total_active_threads"]),
        ("[limits]\nactive_threads = { clients = 2 }\ntotal_active_threads = '40%'\n",
         ["3 limits.total_active_threads"]),
        ('[limits]\ntotal_memory_limit = "4G"\n', ["2 limits.total_memory_limit"]),
        ('[limits]\nmemory_limit = "5G"\ntotal_memory_limit = "4G"\n', ["3 limits.total_memory_limit"]),
        ('[limits]\nmemory_limit = "30%"\ntotal_memory_limit = "20%"\n', ["3 limits.total_memory_limit"]),
        ('[limits]\nmemory_limit = { 0 = "1G", 1 = "5G" }\ntotal_memory_limit = "4G"\n',
         ["3 limits.total_memory_limit"]),
        ('[limits]\nmemory_limit = "1G"\ntotal_memory_limit = "4G"\n', []),
        ('[limits]\naccess = "deny"\ntotal_active_threads = "6%"\n[user.a]\naccess = "allow"\nactive_threads = "5%"\n',
         []),
        ("[limits]\ntotal_active_threads = { clients = 2 }\n", ["2 limits.total_active_threads"]),
    ],
)  # fmt: skip
def test_a_total_in_which_no_client_ever_fits_is_a_mistake(text: str, found: list[str]) -> None:
    errors = load([("p.toml", text)])[1]
    assert [f"{one.line} {one.key}" for one in errors] == found
    assert all("no client process ever fits" in one.problem or "is not a total" in one.problem for one in errors)


def test_what_depends_on_the_gpus_is_a_warning_there() -> None:
    mixed = policy(
        '[limits]\nactive_threads = 60\nmemory_limit = "10G"\ntotal_active_threads = "50%"\n'
        'total_memory_limit = "40%"\n'
    )
    assert [one.key for one in totals.against_devices(mixed, [H200])] == []
    assert [one.key for one in totals.against_devices(mixed, [SMALL])] == ["limits.total_active_threads"]
    memory = policy('[limits]\nmemory_limit = "10G"\ntotal_memory_limit = "40%"\n')
    assert [one.key for one in totals.against_devices(memory, [SMALL])] == ["limits.total_memory_limit"]


def test_a_section_that_another_one_completes_is_no_mistake() -> None:
    """[user.alice] has the total and her group the threads: it was refused without her groups."""
    made = policy("[group.lab]\nactive_threads = '20%'\n[user.alice]\ntotal_active_threads = '60%'\n")
    assert totals.of_users(made, [ALICE], [H200]) == ()
    assert made.rules(ALICE).threads == Percent(20.0)
    assert [one.problem for one in totals.of_users(made, [Identity(1001, "alice")], [H200])] == [
        "no client process of alice ever fits: threads of a client process are 100 %, which is more"
    ]
    made = policy('[group.lab]\nmemory_limit = "1G"\n[group.big]\ntotal_memory_limit = "4G"\n')
    assert totals.of_users(made, [Identity(1001, "alice", ("lab", "big"))], [H200]) == ()


def test_a_user_whose_groups_leave_no_room_is_told_of() -> None:
    """Each section is right by itself, and alice would have waited for ever."""
    made = policy(
        "[user.alice]\nactive_threads = '70%'\n[group.lab]\nactive_threads = '20%'\ntotal_active_threads = '60%'\n"
    )
    found = totals.of_users(made, [ALICE, Identity(1002, "bob", ("lab",))], [H200])
    assert [(one.line, one.key) for one in found] == [(5, "group.lab.total_active_threads")]
    assert found[0].problem.startswith("no client process of alice ever fits: ")
    mixed = policy(
        "[user.alice]\nactive_threads = 60\n[group.lab]\nactive_threads = '20%'\ntotal_active_threads = '40%'\n"
    )
    assert totals.of_users(mixed, [ALICE], [H200])[0].problem.startswith("no client process of alice ever fits: on the")


def test_a_mistake_that_no_group_takes_away_stays_one() -> None:
    errors = load(
        [
            (
                "p.toml",
                "[user.alice]\nactive_threads = '70%'\ntotal_active_threads = '60%'\n[group.lab]\n"
                "active_threads = '20%'\n",
            )
        ]
    )[1]
    assert [f"{one.line} {one.key}" for one in errors] == ["3 user.alice.total_active_threads"]
