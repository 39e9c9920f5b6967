"""Who has most is known at once, however many users there are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mpsagent.gate.counts import Counts


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=200))
def test_it_counts_as_a_counter_does(steps: list[tuple[int, bool]]) -> None:
    counts, plain = Counts(), Counter[int]()
    for uid, more in steps:
        if more:
            counts.add(uid)
            plain[uid] += 1
        elif plain[uid]:
            counts.remove(uid)
            plain[uid] -= 1
        assert [counts[one] for one in range(6)] == [plain[one] for one in range(6)]
        most = counts.most()
        assert (most is None) == (not +plain)
        assert most is None or plain[most] == max(plain.values())


def test_of_several_with_as_many_it_is_who_came_to_it_first() -> None:
    counts = Counts()
    for uid in (1, 2, 3, 2, 1):
        counts.add(uid)
    assert counts.most() == 2
