"""To which instance a user goes. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.core.placement import Place, Placement, free, needs_names, open_to, place, stays
from mpsagent.policy.identity import Identity

ALICE = Identity(1001, "alice", ("lab", "staff"))
BOB = Identity(1002, "bob", ("staff",))


def test_fixed_goes_by_user_then_group_then_to_the_first_for_all() -> None:
    places = [Place("rest"), Place("lab", groups=("lab",)), Place("bob", users=("bob",)), Place("more")]
    assert place(ALICE, places, "fixed") == "lab"
    assert place(BOB, places, "fixed") == "bob"
    assert place(Identity(7, "carol"), places, "fixed") == "rest"
    assert place(Identity(1002), [Place("rest"), Place("bob", users=("1002",))], "fixed") == "bob"
    assert place(Identity(7), [Place("bob", users=("bob",))], "fixed") is None


def test_a_user_may_ask_for_each_instance_of_the_kind_that_is_nearest() -> None:
    places = [Place("rest"), Place("lab", groups=("lab",)), Place("more"), Place("two", users=("bob", "alice"))]
    assert open_to(ALICE, places) == ["two"]
    assert open_to(Identity(8, "dan", ("lab",)), places) == ["lab"]
    assert open_to(Identity(7), places) == ["rest", "more"]
    assert open_to(Identity(7), places[1:2]) == []
    assert free(Identity(7), places, "own") is None, "nobody is moved"


def test_the_least_loaded_has_the_fewest_users_then_clients_then_memory() -> None:
    a = Place("a", there=frozenset({5}), clients=8, memory=0.9)
    assert place(ALICE, [a, Place("b", there=frozenset({6, 7}), clients=2)], "least-loaded") == "a"
    assert place(ALICE, [a, Place("b", there=frozenset({6}), clients=2)], "least-loaded") == "b"
    assert place(ALICE, [a, Place("b", there=frozenset({6}), clients=8, memory=0.5)], "least-loaded") == "b"
    assert place(ALICE, [Place("a"), Place("b")], "least-loaded") == "a"


def test_the_least_loaded_is_one_of_those_that_are_for_the_user_and_able() -> None:
    busy = Place("lab", groups=("lab",), there=frozenset({5, 6}))
    assert place(ALICE, [Place("rest"), busy], "least-loaded") == "lab"
    assert place(BOB, [Place("a", able=False), Place("b", there=frozenset({5}))], "least-loaded") == "b"
    assert place(BOB, [Place("a", able=False)], "least-loaded") == "a"


def test_a_user_stays_where_he_is() -> None:
    places = [Place("a"), Place("b", there=frozenset({1001}))]
    assert stays(1001, places) == "b"
    assert stays(1002, places) is None


def test_a_uid_is_enough_unless_users_or_groups_are_named() -> None:
    assert not needs_names([Place("a"), Place("b")])
    assert needs_names([Place("a"), Place("b", groups=("lab",))])


@given(st.lists(st.integers(1, 8), min_size=1, max_size=40), st.integers(2, 8))
def test_users_who_come_one_after_the_other_are_spread_evenly(clients: list[int], count: int) -> None:
    places = [Place(str(number)) for number in range(count)]
    for uid, processes in enumerate(clients):
        chosen = place(Identity(uid), places, "least-loaded")
        places = [
            Place(one.name, there=one.there | {uid}, clients=one.clients + processes) if one.name == chosen else one
            for one in places
        ]
    users = [len(one.there) for one in places]
    assert max(users) - min(users) <= 1


def test_the_gpus_of_a_section_that_are_all_exclusive_are_filled_one_after_the_other() -> None:
    """The policy did not divide them, and a second user waits there."""
    shut = [Place("a", exclusive="a"), Place("a-gpu1", exclusive="a")]
    assert place(BOB, shut, "fixed") == "a"
    taken = [replace(shut[0], there=frozenset({5})), shut[1]]
    assert place(BOB, taken, "fixed") == "a-gpu1"
    assert free(BOB, taken, "fixed") == "a-gpu1", "a user who waits moves to a GPU that is idle"


@pytest.mark.parametrize("how", ["fixed", "own"])
def test_nobody_waits_for_an_exclusive_gpu_while_others_are_shared(how: Placement) -> None:
    mixed = [Place("a", there=frozenset({5, 6})), Place("a-gpu1", exclusive="a")]
    assert place(BOB, mixed, how) == "a"
    assert free(BOB, mixed, how) is None
    taken = [mixed[0], replace(mixed[1], there=frozenset({7}))]
    assert place(BOB, taken, "least-loaded") == "a"


def test_an_idle_exclusive_gpu_counts_as_any_other_idle_gpu() -> None:
    """A user waits there only if another user has it."""
    assert place(BOB, [Place("a", exclusive="a"), Place("b")], "least-loaded") == "a"
