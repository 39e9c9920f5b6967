"""Units: what MPS takes safely, how it rounds, and what a person may write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps import units


@pytest.mark.parametrize(
    ("text", "size"),
    [("20G", 20 << 30), ("1.5G", 3 << 29), ("512M", 512 << 20), ("512MiB", 512 << 20), ("1T", 1 << 40), ("4096", 4096)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert units.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1G2", "1e9", "٣G", "1.G", "9" * 40])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("250ms", 0.25), ("1d", 86400), ("2min 5s", 125)]
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", " ", "10", "m", "-5s", "5 parsecs", "1h30", "1e3s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        units.parse_duration(text)


@given(st.integers(0, 1 << 50))
def test_a_limit_leaves_only_in_the_form_that_mps_takes_and_never_gives_more(size: int) -> None:
    """``1.5G`` and ``512K`` silently become 1 MiB, ``0`` takes the limit away (recordings 01 and 07)."""
    text = units.limit_text(size)
    assert text[:-1].isdecimal()
    assert text[-1] in "MG"
    given = int(text[:-1]) * (units.MIB if text[-1] == "M" else units.GIB)
    assert 0 < given <= max(size, units.MIB)
    assert size - given < units.MIB


@pytest.mark.parametrize(
    ("percent", "seen"),
    [
        (2.0, 8),
        (5.0, 8),
        (6.2, 8),
        (10.0, 12),
        (20.0, 26),
        (30.0, 38),
        (45.0, 58),
        (60.0, 78),
        (90.0, 118),
        (100.0, 132),
    ],
)
def test_multiprocessors_as_clients_saw_them_on_an_h200(percent: float, seen: int) -> None:
    """132 multiprocessors; the counts are what clients printed in the recordings and in slurm-day.md of 2026-11-23."""
    assert units.multiprocessors_for_percent(percent, 132) == seen


@given(st.integers(1, 200), st.integers(2, 200))
def test_a_wished_number_of_multiprocessors_is_met_and_never_exceeded(wanted: int, present: int) -> None:
    percent = units.percent_for_multiprocessors(wanted, present)
    got = units.multiprocessors_for_percent(percent, present)
    assert got <= max(wanted, units.least(present))
    if wanted < present:
        assert got >= wanted - 1 or got == 2


@given(st.floats(0, 1e7))
def test_every_duration_has_a_text(seconds: float) -> None:
    assert units.duration_text(seconds)[-1] in "smh"


def test_the_nearest_word_is_suggested_and_a_stranger_is_not() -> None:
    assert units.nearest("thread", ["threads", "memory"]) == "threads"
    assert units.nearest("memroy", ["threads", "memory"]) == "memory"
    assert units.nearest("zzzzzz", ["threads", "memory"]) is None
    assert units.nearest("zoe", ["bob", "joe"]) == "joe"
    assert units.nearest("zoe", ["bob"]) is None
    assert units.nearest("x", ["bob", "y"]) is None
