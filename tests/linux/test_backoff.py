"""Pauses between attempts double, are bounded, begin anew after a success, and are not the same in each process."""

from __future__ import annotations

import pytest

from mpsagent.linux import backoff
from mpsagent.linux.backoff import Backoff, fraction


def test_pauses_double_up_to_the_longest_and_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "fraction", lambda: 0.0)
    pauses = Backoff(0.5, 3.0)
    assert [pauses.pause() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    pauses.reset()
    assert pauses.pause() == 0.5


def test_a_pause_is_up_to_a_quarter_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never longer: some callers promise an attempt within this time."""
    monkeypatch.setattr(backoff, "fraction", lambda: 0.5)
    pauses = Backoff(8.0, 8.0)
    assert [pauses.pause(), pauses.pause()] == [7.0, 7.0]


def test_processes_that_fail_together_do_not_try_again_together() -> None:
    found = {fraction() for _ in range(1000)}
    assert len(found) > 100
    assert all(0 <= one < 1 for one in found)
