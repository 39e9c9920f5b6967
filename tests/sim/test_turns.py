"""The daemon's decisions without any process: pending list and back-off, replayed from recordings 01 and 06."""

from __future__ import annotations

from mpsagent_sim.turns import BackOff, Turns

A, B, C = 1001, 1002, 1003


def ready(turns: Turns, uid: int) -> tuple[list[int], bool]:
    turns.starting(uid)
    return turns.ready()


def test_back_off_doubles_by_timer_and_repeats_by_command() -> None:
    """01 S6: 200, 400, 800, 1600; the command answers 1600 again; then 3200 and 6400."""
    back_off = BackOff()
    assert back_off.busy(by_timer=False) == 200
    assert [back_off.busy(by_timer=True) for _ in range(3)] == [400, 800, 1600]
    assert back_off.busy(by_timer=False) == 1600
    assert [back_off.busy(by_timer=True) for _ in range(2)] == [3200, 6400]
    back_off.clear()
    assert back_off.busy(by_timer=False) == 200


def test_a_client_starts_its_server_and_is_attached_at_ready() -> None:
    turns = Turns()
    assert turns.client(A, 1) == "start"
    turns.starting(A)
    assert turns.client(A, 2) == "wait"
    assert turns.ready() == ([2, 1], False), "the last to come is attached first"
    assert turns.client(A, 3) == "attach"


def test_others_wait_in_order_of_arrival_and_only_the_first_asks_the_server_to_leave() -> None:
    """01 S5: the third user's arrival causes no further try, the back-off is running already."""
    turns = Turns()
    turns.client(A, 1)
    ready(turns, A)
    assert turns.client(B, 2) == "try"
    turns.back_off.busy(by_timer=False)
    assert turns.client(C, 3) == "wait"
    assert turns.client(A, 4) == "attach", "the holder's clients are still accepted: others can starve"
    turns.leaving()
    assert turns.gone() == B
    assert ready(turns, B) == ([2], True), "others still wait, so the next try follows at once"
    turns.leaving()
    assert turns.gone() == C
    assert ready(turns, C) == ([3], False)


def test_who_came_for_the_exiting_servers_user_goes_first() -> None:
    """01 S4: start_server for 1002 and 1001, then a client of 1001: 1001's server starts again."""
    turns = Turns()
    assert turns.start_request(A) == "start"
    ready(turns, A)
    assert turns.start_request(B) == "try"
    turns.leaving()
    assert turns.start_request(A) == "wait"
    assert turns.client(A, 1) == "wait"
    assert turns.gone() == A
    assert ready(turns, A) == ([1], True)
    turns.leaving()
    assert turns.gone() == B
    assert ready(turns, B) == ([], False)


def test_start_requests_and_clients_wait_in_one_line() -> None:
    """X4 of the real runs: a request for A, a client of C, a request for nobody, served in that order."""
    turns = Turns()
    turns.start_request(B)
    ready(turns, B)
    assert turns.start_request(A) == "try"
    turns.back_off.busy(by_timer=False)
    assert turns.client(C, 1) == "wait"
    assert turns.start_request(65534) == "wait"
    served = []
    while True:
        turns.leaving()
        uid = turns.gone()
        if uid is None:
            break
        served.append(uid)
        ready(turns, uid)
    assert served == [A, C, 65534]


def test_a_start_request_for_the_running_server_does_nothing() -> None:
    turns = Turns()
    turns.start_request(A)
    ready(turns, A)
    assert turns.start_request(A) == "wait"
    assert turns.ready() == ([], False)
