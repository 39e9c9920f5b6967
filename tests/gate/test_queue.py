"""Who is next: order of arrival, known processes first, bounds, pauses. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.gate.link import Admissions, User
from mpsagent.gate.queue import LOOK_BEHIND, Held, KnownProcess, Queue
from mpsagent.mps.limits import Limits

A, B, C = 1101, 1102, 1103


def held(number: int, uid: int, pid: int | None = None) -> Held:
    return Held(number, pid or number, uid, uid, start=5, since=float(number))


def known(pid: int, uid: int) -> KnownProcess:
    return KnownProcess(pid, uid, uid, 5, 0.0, Limits())


def admits(*users: int | User, **more: Any) -> Admissions:
    entries = [user if isinstance(user, User) else User(user, "all", Limits()) for user in users]
    return Admissions(open=True, users={user.uid: user for user in entries}, **more)


def queue(*entries: Held) -> Queue:
    made = Queue()
    for entry in entries:
        made.add(entry)
    return made


def order(made: Queue, admissions: Admissions, now: float = 0.0) -> list[int]:
    """All that pass, one after another, each becoming known."""
    passed = []
    while (one := made.next(now, admissions)) is not None:
        made.remove(one.connection)
        made.know(known(one.pid, one.uid))
        passed.append(one.connection)
    return passed


def test_order_of_arrival_inside_a_user_and_among_users() -> None:
    made = queue(held(1, A), held(2, B), held(3, A), held(4, C), held(5, B))
    assert order(made, admits(A, B)) == [1, 2, 3, 5]
    assert [one.connection for one in made.held()] == [4]


def test_one_that_comes_back_from_the_store_has_its_old_place() -> None:
    made = queue(held(9, A), held(3, A), held(5, A))
    assert order(made, admits(A)) == [3, 5, 9]


def test_connections_of_known_processes_go_first() -> None:
    made = queue(held(1, A), held(2, B), held(3, A, pid=77))
    made.know(known(77, A))
    assert order(made, admits(A, B)) == [3, 1, 2]


def test_a_process_that_becomes_known_takes_its_waiting_connections_along() -> None:
    made = queue(held(1, A, pid=70), held(2, A, pid=71), held(3, A, pid=70))
    assert order(made, admits(A)) == [1, 3, 2]


def test_another_process_with_the_same_pid_is_not_known() -> None:
    made = queue(Held(1, 70, A, A, start=6, since=0.0))
    made.know(known(70, A))
    assert made.next(0.0, admits(User(A, "known", Limits()))) is None


@pytest.mark.parametrize(
    ("admissions", "passed"),
    [
        (Admissions(), []),
        (admits(), []),
        (admits(User(A, "known", Limits())), [4]),
        (admits(A, room=1), [4]),
        (admits(A, room=2), [4, 1]),
        (admits(User(A, "all", Limits(), max_clients=1)), [4]),
        (admits(User(A, "all", Limits(), max_clients=2), B), [4, 1, 3]),
        (admits(B, others=User(0, "all", Limits())), [4, 1, 2, 3]),
        (admits(B, others=User(0, "known", Limits())), [4, 3]),
    ],
)
def test_admissions(admissions: Admissions, passed: list[int]) -> None:
    made = queue(held(1, A), held(2, A), held(3, B), held(4, A, pid=77))
    made.know(known(77, A))
    assert order(made, admissions) == passed


def test_the_end_of_a_process_makes_room() -> None:
    made = queue(held(1, A), held(2, A))
    assert order(made, admits(A, room=1)) == [1]
    made.forget((1, 5))
    assert order(made, admits(A, room=1)) == [2]


def test_released_a_process_has_to_knock_again() -> None:
    made = queue(held(1, A, pid=77))
    made.know(known(77, A))
    made.forget((77, 5))
    assert made.next(0.0, admits(User(A, "known", Limits()))) is None


def test_a_pause_keeps_the_place_and_doubles() -> None:
    first, second = held(1, A), held(2, A)
    made = queue(first, second)
    first.failed(10.0)
    assert first.not_before == 10.05
    assert made.next(10.0, admits(A)) is second
    second.failed(10.0)
    assert made.next(10.0, admits(A)) is None
    assert made.wake(10.0, admits(A)) == 10.05
    assert made.next(10.05, admits(A)) is first
    for _ in range(10):
        first.failed(20.0)
    assert first.not_before == 22.0


def test_only_some_are_looked_at_behind_those_that_pause() -> None:
    made = queue(*(held(number, A) for number in range(1000)))
    for one in made.held():
        one.failed(0.0)
    last = made.get(999)
    assert last is not None
    last.not_before = 0.0
    assert made.next(0.0, admits(A)) is None
    for number in range(999 - LOOK_BEHIND):
        made.remove(number)
    assert made.next(0.0, admits(A)) is last


def test_bounds() -> None:
    made = Queue(most=3, most_of_a_user=2)
    made.add(held(1, A))
    made.add(held(2, A))
    assert "user 1101" in (made.full_for(A) or "")
    assert made.full_for(B) is None
    made.add(held(3, B))
    assert made.full_for(B) == "3 connections are held already"
    made.remove(1)
    assert made.full_for(A) is None


events = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "know", "forget", "next"]), st.integers(0, 8), st.sampled_from([A, B])),
    max_size=60,
)


@given(events)
def test_whatever_happens_the_next_one_is_the_oldest_admitted_known_first(what: list[tuple[str, int, int]]) -> None:
    made, number = Queue(), 0
    mine: dict[int, Held] = {}
    alive: set[int] = set()
    for event, pid, uid in what:
        match event:
            case "add":
                number += 1
                entry = held(number, A if pid % 2 else B, pid + 100)
                mine[number] = entry
                made.add(entry)
            case "remove":
                mine.pop(pid, None)
                made.remove(pid)
            case "know":
                alive.add(pid + 100)
                made.know(known(pid + 100, A if pid % 2 else B))
            case "forget":
                alive.discard(pid + 100)
                made.forget((pid + 100, 5))
            case "next":
                admitted = [one for one in mine.values() if one.uid == uid]
                best = min(admitted, key=lambda one: (one.pid not in alive, one.connection), default=None)
                assert made.next(0.0, admits(uid)) is best
        assert len(made) == len(mine)
        assert {one.pid for one in made.known()} == alive
