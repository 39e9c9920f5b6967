"""How fast users' front-ends go on: what a loop may write to control.log, who notices nothing, what stays bounded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from mpsagent.gate.pacing import (
    MOST_COUNTED,
    MOST_REMEMBERED,
    SESSION,
    PacedLine,
    Rates,
    answers_cost,
    command_cost,
)
from tests.gate.rig import A, B

HOUR, DAY = 3_600.0, 86_400.0
RATES = Rates()
SHORT = command_cost("get_server_list") + answers_cost(["12345"])


def asks(line: PacedLine[str], uid: int, now: float, size: int = SHORT) -> float:
    """When a command goes on that nobody else's comes before."""
    line.enter(uid, "command")
    when = line.when()
    assert when is not None
    assert line.next(max(now, when)) == "command"
    line.charge(uid, size, max(now, when))
    return max(now, when)


def loop(line: PacedLine[str], uids: Iterator[int], size: int, until: float) -> int:
    """How many commands users in a loop, each without a pause, get done."""
    now = 0.0
    for number in itertools.count():
        now = asks(line, next(uids), now, size)
        if now > until:
            return number
    raise AssertionError


def test_what_is_counted_is_what_the_control_daemon_writes() -> None:
    """Recording 01: the lines of one session, with and without an answer of two lines."""
    head = "[2026-11-20 23:56:24.868 Control   471] "
    wrote = [head + text for text in ("Accepting connection...", "NEW UI", "Cmd:ps", "Server not found", "UI closed")]
    assert command_cost("ps") + answers_cost(["Server not found"]) == sum(len(row) + 1 for row in wrote)
    rows = "PID       ID        SERVER\n606       1         608"
    assert answers_cost([rows]) == answers_cost(rows.split("\n")) + 1
    assert answers_cost([]) == 0
    assert answers_cost(["x" * 4092] * 4096) == MOST_COUNTED


@pytest.mark.parametrize("size", [SHORT, SESSION + 1024 + 1100, 6700, MOST_COUNTED])
def test_a_loop_writes_some_tens_of_megabytes_a_day_whatever_it_asks(size: int) -> None:
    assert RATES.rate * DAY < 90e6
    assert loop(PacedLine(), itertools.repeat(A), size, HOUR) * size < RATES.rate * HOUR + RATES.burst + size


def test_a_loop_with_all_uids_of_a_user_is_bounded_too() -> None:
    uids = itertools.cycle(range(100_000, 165_536))
    assert RATES.rate_all * DAY < 900e6
    assert loop(PacedLine(), uids, SHORT, HOUR) * SHORT < RATES.rate_all * HOUR + RATES.burst_all + SHORT


def test_who_asks_every_second_never_waits() -> None:
    """Three programs of one user; and a person who types, or pastes, 500 commands."""
    line: PacedLine[str] = PacedLine()
    for second in range(int(HOUR)):
        for part in (0.0, 0.1, 0.2):
            assert asks(line, A, second + part) == second + part
    for _ in range(500):
        assert asks(line, A, HOUR + 1) == HOUR + 1


def test_a_person_who_watches_a_busy_node_is_not_slowed_down_for_minutes() -> None:
    """``ps`` each second: beside 10 clients for 6 minutes, beside 48 for 40 s."""
    row = "606       1         608            GPU-513e171f-4520-0894    4026531836     /tmp/client    "
    for clients, seconds in ((10, 360), (48, 40)):
        line: PacedLine[str] = PacedLine()
        size = command_cost("ps") + answers_cost(["\n".join([row] * (clients + 1))])
        assert [asks(line, A, now, size) for now in range(seconds)] == list(range(seconds))


def test_after_the_burst_one_waits_and_goes_on_at_the_rate() -> None:
    line: PacedLine[str] = PacedLine(Rates(rate=100, burst=1000, rate_all=1e9, burst_all=1e9))
    times = [asks(line, A, 5.0, 200) for _ in range(10)]
    assert times[:6] == [5.0] * 6
    assert times[6:] == pytest.approx([7.0, 9.0, 11.0, 13.0])
    assert asks(line, B, 13.0, 200) == 13.0


def test_what_is_not_used_is_saved_up_to_the_burst_and_no_further() -> None:
    line: PacedLine[str] = PacedLine(Rates(rate=100, burst=1000, rate_all=1e9, burst_all=1e9))
    for start in (0.0, 1e6):
        assert [asks(line, A, start, 1000) for _ in range(3)] == pytest.approx([start, start, start + 10])


def test_users_take_turns_where_all_together_have_used_it_up() -> None:
    """One with many places, or who comes again and again, is before no one twice."""
    line: PacedLine[str] = PacedLine(Rates(rate=1e9, burst=1e9, rate_all=100, burst_all=0))
    line.charge(A, 100, 0.0)
    for name in ("a1", "a2", "a3"):
        line.enter(A, name)
    line.enter(B, "b1")
    assert line.next(0.9) is None
    went = []
    for second in range(1, 6):
        assert line.next(second - 0.1) is None
        one = line.next(float(second))
        assert one is not None
        went.append(one)
        line.charge(A if one[0] == "a" else B, 100, float(second))
        if one == "b1":
            line.enter(B, "b2")
    assert went == ["a1", "b1", "a2", "b2", "a3"]
    assert line.when() is None


def test_who_is_paced_keeps_no_one_else_waiting() -> None:
    line: PacedLine[str] = PacedLine()
    line.charge(A, 2 * int(RATES.burst), 0.0)
    line.enter(A, "a")
    line.enter(B, "b")
    assert line.when() is not None
    assert line.next(0.0) == "b"
    assert line.next(0.0) is None


def test_who_leaves_is_not_served_and_uses_nothing_up() -> None:
    line: PacedLine[str] = PacedLine()
    for name in ("one", "two"):
        line.enter(A, name)
    line.leave(A, "one")
    line.leave(A, "one")
    line.leave(B, "never came")
    assert line.of(A) == ["two"]
    assert (line.next(0.0), line.next(0.0), line.when()) == ("two", None, None)


def test_users_are_forgotten_when_they_owe_nothing() -> None:
    """However many uids there are: what all of them may use at once is not enough to fill the table."""
    line: PacedLine[str] = PacedLine()
    now = 0.0
    for uid in range(100_000, 160_000):
        now = asks(line, uid, now, SESSION)
        assert len(line._account._paid) <= MOST_REMEMBERED
    asks(line, A, now + 1e4)
    line.charge(A, 2 * int(RATES.burst), now + 1e4)
    for uid in range(100_000, 110_000):
        asks(line, uid, now + 1e4, SESSION)
    assert A in line._account._paid, "who owes something is not forgotten with the others"
