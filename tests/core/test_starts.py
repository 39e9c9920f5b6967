"""A server that starts with other limits than its user's is killed before anybody has got anything from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsagent.core import actions as act
from mpsagent.core.model import State
from mpsagent.core.starts import IN_TIME
from mpsagent.mps.limits import Limits
from tests.core.harness import ALICE, BOB, CAROL, EXIT, GIB, START, Toy


def knock_at_the_last_moment(toy: Toy, before: float) -> tuple[int, int]:
    """Bob's idle server exits for Alice; Bob comes again, `before` seconds before that exit is over."""
    first = toy.client(BOB)
    toy.run(1)
    toy.leave(first)
    toy.run(1)
    alice = toy.client(ALICE)
    toy.run(EXIT - before)
    bob = toy.client(BOB)
    serve_all(toy)
    return alice, bob


def serve_all(toy: Toy) -> None:
    """Everybody leaves as soon as he has been served."""
    for _ in range(6):
        toy.run(1)
        for pid in list(toy.procs):
            if pid in toy.served:
                toy.leave(pid)


def given(toy: Toy) -> dict[int, Limits]:
    return {pid: limits for pid, _, limits in toy.given}


@pytest.mark.parametrize("before", [0.0001, 0.0005, 0.001, 0.002, 0.003, 0.004])
def test_who_knocks_in_the_last_moment_of_his_servers_exit_gets_his_own_limits(before: float) -> None:
    """He goes before Alice (X20), for whom more was armed; there is no time to arm for him."""
    toy = Toy().up()
    alice, bob = knock_at_the_last_moment(toy, before)
    assert given(toy)[bob] == toy.limits(BOB)
    assert given(toy)[alice] == toy.limits(ALICE)
    assert not toy.hurt


def test_without_the_kill_he_gets_the_limits_of_the_one_who_was_armed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hole is there: this keeps the test above honest."""
    monkeypatch.setattr("mpsagent.core.starts.IN_TIME", 0.0)
    toy = Toy().up()
    _, bob = knock_at_the_last_moment(toy, 0.0005)
    assert given(toy)[bob] == toy.limits(ALICE)


def test_a_server_that_started_unseen_with_the_floor_is_killed_once() -> None:
    """Nobody was parked: the first client's server starts at once, with the floor. One more start gives him his own."""
    toy = Toy().up()
    toy.server = None  # the parked one has gone, and nothing of it is known any more
    toy.state = State(control=toy.state.control)
    toy.memory = replace(toy.memory, limits=replace(toy.memory.limits, parking_until=toy.now + 5))
    pid = toy.client(ALICE)
    toy.run(2)
    assert given(toy)[pid] == toy.limits(ALICE)
    kills = toy.actions(act.KillServer)
    assert len(kills) == 1
    assert "is starting with 20.0 % of threads" in kills[0].reason


def test_what_cannot_be_set_ends_after_a_few_starts() -> None:
    """The front-end fails for good: he is served in the end, with less, and it is on record."""
    toy = Toy().up()
    toy.front_end_fails = True
    first = toy.client(ALICE)
    toy.run(5)
    assert first in toy.served
    assert 1 <= len(toy.actions(act.KillServer)) <= 5
    assert toy.reports("limits.mismatch")


def test_nobody_is_killed_who_may_be_ready_already() -> None:
    """With an agent that sees everything late, the server is left alone: its clients may be at work."""
    toy = Toy(lag=IN_TIME + 0.01).up()
    knock_at_the_last_moment(toy, 0.0005)
    assert not toy.actions(act.KillServer)


def test_a_third_user_is_armed_for_when_the_guess_was_wrong() -> None:
    """Alice and Carol wait, Bob's server is killed: Alice is next, and everybody gets his own in the end."""
    toy = Toy().up()
    first = toy.client(BOB)
    toy.run(1)
    toy.leave(first)
    toy.run(1)
    pids = [toy.client(ALICE), toy.client(CAROL)]
    toy.run(EXIT - 0.0005)
    pids.append(toy.client(BOB))
    serve_all(toy)
    assert [given(toy)[pid] for pid in pids] == [toy.limits(ALICE), toy.limits(CAROL), toy.limits(BOB)]
    assert toy.limits(CAROL) == Limits(50.0, {0: 10 * GIB})
    assert IN_TIME < START


def test_a_server_that_cannot_be_killed_without_hurting_somebody_starts_as_it_is() -> None:
    """It is not tried again, nothing is armed for it as if it were gone, and what it starts with is on record."""
    toy = Toy().up()
    toy.server = None
    toy.state = State(control=toy.state.control)
    toy.memory = replace(toy.memory, limits=replace(toy.memory.limits, parking_until=toy.now + 5))
    toy.spare = True
    pid = toy.client(ALICE)
    toy.run(2)
    assert len(toy.actions(act.KillServer)) == 1
    assert given(toy)[pid] == toy.world().floor()
    assert [report.uid for report in toy.reports("limits.mismatch")] == [ALICE]
    toy.leave(pid)
    assert toy.memory.starts.spared
    bob = toy.client(BOB)
    toy.run(2)
    assert given(toy)[bob] == toy.limits(BOB)
