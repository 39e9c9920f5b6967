"""Who is next: order of arrival, known processes first, bounds, pauses. Pure."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.gate.queue import LOOK_BEHIND, Held, KnownProcess
from mpsagent.mps.limits import Limits, Total
from mpsagent.wire.link import Admissions, Job, Named, User
from tests.gate.queues import Asked

A, B, C = 1101, 1102, 1103


def held(number: int, uid: int, pid: int | None = None) -> Held:
    return Held(number, pid or number, uid, uid, start=5, since=float(number))


def known(pid: int, uid: int) -> KnownProcess:
    return KnownProcess(pid, uid, uid, 5, 0.0, Limits())


def admits(*users: int | User, **more: Any) -> Admissions:
    entries = [user if isinstance(user, User) else User(user, "all", Limits()) for user in users]
    return Admissions(open=True, users={user.uid: user for user in entries}, **more)


def queue(*entries: Held) -> Asked:
    made = Asked()
    for entry in entries:
        made.add(entry)
    return made


def order(made: Asked, admissions: Admissions, now: float = 0.0) -> list[int]:
    """All that pass, one after another, each becoming known."""
    passed = []
    while (one := made.next(now, admissions)) is not None:
        made.remove(one.connection)
        if made.known_process(one.process) is None:
            made.know(known(one.pid, one.uid))
        passed.append(one.connection)
    return passed


def test_order_of_arrival_inside_a_user_and_among_users() -> None:
    made = queue(held(1, A), held(2, B), held(3, A), held(4, C), held(5, B))
    assert order(made, admits(A, B)) == [1, 2, 3, 5]
    assert [one.connection for one in made._held.values()] == [4]


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


def test_connections_of_known_processes_go_by_turns_of_their_users() -> None:
    """900 of one user made another wait for 91.6 s (recording 12, H4). One who comes with one at a time has no more."""
    made = queue(*(held(number, A, pid=77) for number in range(1, 901)), held(901, B, pid=78))
    made.know(known(77, A))
    made.know(known(78, B))
    served = []
    for number in range(902, 910):
        one = made.next(0.0, admits(A, B))
        assert one is not None
        made.take(one.connection, "", 0.0)
        made.free(one.connection)
        made.remove(one.connection)
        served.append(one.uid)
        if one.uid == B:
            made.add(held(number, B, pid=78))
    assert served == [A, B] * 4


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
        (admits(B, others=User(0, "all", Limits()), parallel=True), [4, 1, 2, 3]),
        (admits(B, others=User(0, "known", Limits()), parallel=True), [4, 3]),
        (admits(B, others=User(0, "all", Limits())), [4, 1, 2]),
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


def test_contexts_are_paced_and_new_processes_are_not() -> None:
    made = queue(held(1, A, pid=77), held(2, A, pid=77), held(3, A, pid=78))
    made.know(known(77, A))
    made.contexts_from = 10.08
    assert made.next(10.0, admits(A)) is made.get(3)
    made.remove(3)
    assert made.next(10.0, admits(A)) is None
    assert made.wake(10.0, admits(A)) == 10.08
    assert made.next(10.08, admits(A)) is made.get(1)
    first = made.get(1)
    assert first is not None
    first.failed(10.08)
    assert made.next(10.1, admits(A)) is made.get(2)
    made.contexts_from = 10.2
    assert made.wake(10.1, admits(A)) == 10.2


def test_new_clients_of_a_user_beyond_twenty_a_second_are_paced() -> None:
    """133 to 203 a second of one user write 28 to 42 GB of MPS's logs a day. One who brings ten a second is never kept
    waiting, beside that and alone."""
    made, number, passed, waits = Asked(), 0, 0, set[int]()
    for tick in range(2_000):  # 20 s, a hundredth at a time
        now = tick / 100
        number += 1
        made.add(held(number, A))
        made.add(held(1_000_000 + number, A))
        if tick % 10 == 0:
            number += 1
            made.add(held(number, B))
            waits.add(number)
        while (one := made.next(now, admits(A, B, room=1000))) is not None:
            made.take(one.connection, "", now)
            made.remove(one.connection)
            passed += one.uid == A
            waits.discard(one.connection)
        assert not waits
        if tick < 40:
            assert passed == 2 * (tick + 1), "a crowd that starts at once is not slowed"
    assert 20 * 20 <= passed <= 20 * 20 + 101
    assert made.wake(now, admits(A)) == pytest.approx(now, abs=0.05)


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
    for one in made._held.values():
        one.failed(0.0)
    last = made.get(999)
    assert last is not None
    last.not_before = 0.0
    assert made.next(0.0, admits(A)) is None
    for number in range(999 - LOOK_BEHIND):
        made.remove(number)
    assert made.next(0.0, admits(A)) is last


def test_bounds() -> None:
    made = Asked(most=3, most_of_a_user=2)
    made.add(held(1, A))
    made.add(held(2, A))
    assert "user 1101" in (made.full_for(A) or "")
    assert made.full_for(B) is None
    made.add(held(3, B))
    assert made.full_for(B) == "3 connections of all users wait already: start it again later"
    made.remove(1)
    assert made.full_for(A) is None


def test_who_takes_mps_up_and_fails_waits_where_others_could_go() -> None:
    """One who takes descriptors and says nothing, again and again, has a tenth of MPS's time."""
    made = queue(held(1, A), held(2, A), held(3, B))
    made.took(A, 0.9, now=10.0)
    assert made.next(10.0, admits(A, B)) is made.get(1), "a client that dies at once costs nothing"
    made.took(A, 5.0, now=10.0)
    assert made.next(10.0, admits(A, B)) is made.get(3)
    assert made.next(10.0, admits(A)) is made.get(1), "nobody else could go"
    made.remove(3)
    assert made.next(10.0, admits(A, B)) is None
    assert made.wake(10.0, admits(A, B)) == 55.0
    assert made.next(55.0, admits(A, B)) is made.get(1)


def test_whom_it_passes_over_for_what_is_owed_is_said_once_with_the_end() -> None:
    """Not a user who has nobody to be handed over, and not one who has paid."""
    made = queue(held(1, A), held(3, B))
    made.took(A, 5.0, now=10.0)
    made.took(C, 5.0, now=10.0)
    assert made.next(10.0, admits(A, B, C)) is made.get(3)
    assert made.newly_slowed("", 10.0) == [(A, 55.0)]
    assert made.next(11.0, admits(A, B, C)) is made.get(3)
    assert made.newly_slowed("", 11.0) == []
    made.took(A, 5.0, now=12.0)
    assert made.next(12.0, admits(A, B, C)) is made.get(3)
    assert made.newly_slowed("", 12.0) == [(A, 100.0)]
    assert made.next(100.0, admits(A, B, C)) is made.get(1)
    assert made.newly_slowed("", 100.0) == []


def test_who_does_so_while_no_other_user_is_there_waits_after_the_fourth() -> None:
    """Else whoever comes meets one of them each time (make hostile: each client of an honest user waited 5.2 s)."""
    made = queue(held(1, A))
    for number in range(4):
        assert made.next(6.0 * number, admits(A)) is made.get(1), number
        made.took(A, 5.0, 5.0 + 6.0 * number, lives=bool(number % 2))
    assert made.next(24.0, admits(A)) is None
    wake = made.wake(24.0, admits(A))
    assert wake is not None
    assert 24 + 10 <= wake <= 24 + 40
    assert made.next(wake, admits(A)) is made.get(1)


def test_who_is_alone_with_a_server_that_hangs_owes_nothing_for_it() -> None:
    made = queue(held(1, A))
    for number in range(2):  # then it is killed as hung
        made.took(A, 8.0, 8.0 + 8.0 * number)
    assert made.next(16.5, admits(A)) is made.get(1)


def test_clients_that_die_at_once_again_and_again_have_a_tenth_of_mps_time() -> None:
    """20 processes that are silent, and killed after less than a second (make hostile: others waited 1.9 s each)."""
    for there in ((A, B), (A,)):
        made = queue(held(1, A))
        now = taken = 0.0
        while now < 3600:
            if made.next(now, admits(*there)) is not None:
                now, taken = now + 0.95, taken + 0.95
                made.took(A, 0.95, now)
            else:
                now += 0.1
        assert taken <= 360 + 16 + 1


def test_who_lives_and_takes_mps_up_again_waits_longer_each_time() -> None:
    made = queue(held(1, A), held(2, B))
    now, pauses = 0.0, []
    for _ in range(4):
        made.took(A, 5.0, now, lives=True)
        made.remove(2)
        wake = made.wake(now, admits(A, B))
        made.add(held(2, B))
        assert wake is not None
        pauses.append(wake - now)
        now = wake
    assert pauses == [45.0, 90.0, 180.0, 360.0]
    made.took(A, 5.0, now + 10_000, lives=True)
    assert made.wake(now + 10_000, admits(A)) == now + 10_000
    made.remove(2)
    assert made.wake(now + 10_000, admits(A, B)) == now + 10_045, "forgiven after ten minutes without"


def test_a_user_with_20_processes_in_a_loop_slows_others_by_no_more_than_a_tenth() -> None:
    """Whether they say nothing until the gate ends it, or meet their server just before: B's hand-overs of 2 ms each,
    one after the other, for an hour."""
    for seconds, lost in ((5.1, True), (4.9, False), (0.3, False), (0.06, False)):
        made = queue(*(held(number, A) for number in range(1, 21)), held(10_000, B))
        now, taken = 0.0, 0.0
        while now < 3600:
            chosen = made.next(now, admits(A, B))
            assert chosen is not None, "B waits"
            made.remove(chosen.connection)
            made.add(held(chosen.connection + 20_000, chosen.uid))
            if chosen.uid == A:
                now, taken = now + seconds, taken + seconds
                made.took(A, seconds, now, lost=lost, lives=True)
            else:
                now += 0.5
        assert taken <= 360 + 5 + seconds, (seconds, lost)


def test_a_client_that_is_merely_slow_is_not_held_back() -> None:
    """46 at once, each 0.1 s; or one that takes nearly as long as it may; or any number that take a normal time."""
    for times, seconds in ((46, 0.1), (1, 4.9), (1000, 0.04)):
        made = queue(held(1, A), held(2, B))
        for number in range(times):
            made.took(A, seconds, number / 10, lost=False)
        assert made.next(times / 10, admits(A, B)) is made.get(1)


def test_a_user_whose_clients_have_held_others_up_pays_for_it() -> None:
    """For example new clients that wait after a death: each is short, and all are counted."""
    made = queue(held(1, A), held(2, B))
    for number in range(50):
        made.held_up(A, 0.1, number / 10)
    assert made.next(5.0, admits(A, B)) is made.get(1), "a death now and then costs its user nothing"
    made.held_up(A, 0.7, 5.0)
    assert made.next(5.0, admits(A, B)) is made.get(2)
    assert made.next(5.0, admits(A)) is made.get(1), "no other user is there"
    made.remove(2)
    assert made.wake(5.0, admits(A, B)) == 7.0


def test_when_all_places_are_taken_who_has_most_gives_one_up() -> None:
    """Its newest; and not to a user who has nearly as many."""
    made = Asked(most=5)
    for one in (held(1, A), held(2, A), held(3, A), held(4, B)):
        made.add(one)
    assert list(made.crowding_out(C)) == []
    made.add(held(5, B))
    assert list(made.crowding_out(C)) == [3, 2, 1]
    assert list(made.crowding_out(B)) == []


events = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "know", "forget", "next"]), st.integers(0, 8), st.sampled_from([A, B])),
    max_size=60,
)


@given(events)
def test_whatever_happens_the_next_one_is_the_oldest_admitted_known_first(what: list[tuple[str, int, int]]) -> None:
    made, number = Asked(), 0
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


# --- totals


def limits_of(uid: int, draw: random.Random) -> Limits:
    """Each process of a user with the same limits, as a policy has it; now and then the policy changes."""
    return Limits(draw.choice([3.3, 10.0, 19.7, 25.0, 40.0]), {0: draw.choice([1, 2, 5, 9]) << 30})


@pytest.mark.parametrize("seed", range(8))
def test_the_sum_of_a_user_is_never_over_its_total(seed: int) -> None:
    """500 clients of users with totals come, leave, fail, end, come again for a further context, while the policy
    changes. What has been handed over counts until its process has ended; a hand-over under way counts too."""
    draw = random.Random(seed)
    made, users = Asked(), (A, B, C)
    totals = {A: Total(60.0, {0: 12 << 30}), B: Total(40.0), C: Total(None, {0: 9 << 30})}
    table = {uid: User(uid, "all", limits_of(uid, draw), None, totals[uid]) for uid in users}
    came, served, waited = 0, 0, 0
    while came < 500 or len(made):
        step = draw.random()
        living = list(made.known())
        if step < 0.35 and came < 500:
            came += 1
            made.add(held(came, draw.choice(users)))
        elif step < 0.40 and living:
            came += 1
            one = draw.choice(living)
            made.add(held(came, one.uid, one.pid))
        elif step < 0.55 and living:
            made.forget(draw.choice(living).process)
        elif step < 0.60:
            uid = draw.choice(users)
            table[uid] = User(uid, "all", limits_of(uid, draw), None, totals[uid])
        chosen = made.next(0.0, admits(*table.values(), room=10_000))
        if chosen is None:
            waited += len(made) > 0
            continue
        given = made.limits_for(chosen, table[chosen.uid], admits(*table.values()))
        if draw.random() < 0.1 and made.known_process(chosen.process) is None:
            made.remove(chosen.connection)  # it came to nothing
            continue
        made.remove(chosen.connection)
        one = made.known_process(chosen.process) or known(chosen.pid, chosen.uid)
        one.limits = given
        made.know(one)
        served += 1
        for uid in users:
            mine = [one.limits for one in made.known() if one.uid == uid and one.limits is not None]
            threads = round(sum(one.threads for one in mine), 1)
            assert threads <= (totals[uid].threads or 10_000), (uid, mine)
            assert sum(one.memory[0] for one in mine) <= totals[uid].memory.get(0, 1 << 60), (uid, mine)
    assert served > 300
    assert waited > 100


def test_who_does_not_fit_holds_up_no_other_user_and_is_next_when_it_fits() -> None:
    made = queue(held(1, A), held(2, A), held(3, A), held(4, B))
    user = User(A, "all", Limits(30.0), None, Total(60.0))
    table = admits(user, B)
    passed = []
    while (one := made.next(0.0, table)) is not None:
        made.remove(one.connection)
        made.know(KnownProcess(one.pid, one.uid, one.uid, 5, 0.0, Limits(30.0)))
        passed.append(one.connection)
    assert passed == [1, 2, 4]
    made.forget((1, 5))
    assert made.next(0.0, table) is not None


def test_a_total_counts_what_mps_gives_at_least_and_the_first_process_always_may() -> None:
    """5 % of an H200 are 8 multiprocessors, 6.1 %: of a job with 40 % six processes work at once, and one of 2 %."""
    made = queue(*(held(number, A) for number in range(1, 10)))

    def serve(total: Total) -> int:
        table, before = (
            admits(User(A, "all", Limits(min(5.0, total.threads or 0)), None, total)),
            len(list(made.known())),
        )
        while (one := made.next(0.0, table)) is not None:
            made.remove(one.connection)
            made.know(KnownProcess(one.pid, one.uid, one.uid, 5, 0.0, made.limits_for(one, table.users[A], table)))
        return len(list(made.known())) - before

    assert serve(Total(40.0, {}, 6.1)) == 6
    for one in list(made.known()):
        made.forget(one.process)
    assert serve(Total(2.0, {}, 6.1)) == 1


def test_a_process_of_which_an_earlier_gate_cannot_say_counts_as_all_that_it_may_have() -> None:
    made = queue(held(2, A))
    made.know(KnownProcess(1, A, A, 5, 0.0, None))
    assert made.next(0.0, admits(User(A, "all", Limits(40.0), None, Total(60.0)))) is None


def test_the_total_is_counted_in_each_instance() -> None:
    made = queue(held(2, A))
    made.know(KnownProcess(1, A, A, 5, 0.0, Limits(40.0), instance="other"))
    assert made.next(0.0, admits(User(A, "all", Limits(40.0), None, Total(60.0)))) is not None


def test_where_processes_have_limits_of_their_own_only_those_pass_that_are_named() -> None:
    made = queue(held(1, A), held(2, A), held(3, B))
    user = User(A, "all", Limits(20.0), named=True)
    table = admits(user, processes={(2, 5): Named(2, 5, Limits(7.0)), (3, 6): Named(3, 6, Limits(9.0))})
    chosen = made.next(0.0, table)
    assert chosen is not None
    assert chosen.connection == 2
    assert made.limits_for(chosen, user, table) == Limits(7.0)
    made.remove(2)
    assert made.next(0.0, table) is None


def test_a_process_with_limits_of_its_own_keeps_them() -> None:
    """Also when others have none any more; and what is known of it ends with it."""
    made = queue(held(1, A, pid=70))
    user = User(A, "all", Limits(20.0), named=True)
    table = admits(user, processes={(70, 5): Named(70, 5, Limits(7.0))})
    chosen = made.next(0.0, table)
    assert chosen is not None
    made.know(KnownProcess(70, A, A, 5, 0.0, made.limits_for(chosen, user, table)))
    made.remove(1)
    made.add(held(2, A, pid=70))
    for later in (user, User(A, "all", Limits(20.0))):
        chosen = made.next(0.0, admits(later))
        assert chosen is not None
        assert made.limits_for(chosen, later, admits(later)) == Limits(7.0)
    made.remove(2)
    made.forget((70, 5))
    assert not made._own


def test_limits_of_its_own_are_kept_when_those_before_were_not_known() -> None:
    """Gate and agent were installed again. Its second context afterwards escaped its cgroup's limits (world, habits,
    seed 790000675)."""
    made, user = queue(), User(A, "all", Limits(20.0), named=True)
    process = KnownProcess(70, A, A, 5, 0.0, None)
    made.know(process)
    for connection, table in ((1, admits(user, processes={(70, 5): Named(70, 5, Limits(7.0))})), (2, admits(user))):
        made.add(held(connection, A, pid=70))
        chosen = made.next(0.0, table)
        assert chosen is not None
        process.given(limits := made.limits_for(chosen, user, table))
        made.remove(connection)
        assert limits == Limits(7.0)


# --- jobs -------------------------------------------------------------------------------------------------------------


def of_jobs(jobs: list[Job], of: dict[int, str], *users: int) -> Admissions:
    """Each process has 10 %; ``of``: the job of each pid."""
    named = {(pid, 5): Named(pid, 5, Limits(10.0), job) for pid, job in of.items()}
    rows = [User(uid, "all", Limits(20.0), named=True) for uid in users]
    return admits(*rows, processes=named, jobs={one.name: one for one in jobs})


def served(made: Asked, admissions: Admissions) -> list[int]:
    """All that pass, each known with what it was given before its connection is gone, as in a hand-over."""
    passed = []
    while (one := made.next(0.0, admissions)) is not None:
        user = admissions.user(one.uid)
        assert user is not None
        limits = made.limits_for(one, user, admissions)
        made.know(KnownProcess(one.pid, one.uid, one.uid, 5, 0.0, limits))
        made.remove(one.connection)
        passed.append(one.connection)
    return passed


def test_a_job_that_is_full_keeps_nobody_else_waiting() -> None:
    """Neither its user's other jobs nor the other users; and it is counted over its users."""
    made = queue(held(1, A), held(2, A), held(3, B), held(4, A), held(5, B), held(6, A))
    of = {1: "x", 2: "x", 3: "x", 4: "y", 5: "", 6: "y"}
    jobs = [Job("x", total=Total(25.0)), Job("y", max_clients=1)]
    assert served(made, of_jobs(jobs, of, A, B)) == [1, 2, 4, 5]
    made.forget((4, 5))
    assert served(made, of_jobs(jobs, of, A, B)) == [6]


def test_a_process_stays_in_its_job_while_the_agent_does_not_name_it() -> None:
    """Between its hand-over and the agent's next table; and what the agent says then counts."""
    made = queue(held(1, A), held(2, A))
    assert served(made, of_jobs([Job("x", max_clients=1)], {1: "x"}, A)) == [1]
    assert served(made, of_jobs([Job("x", max_clients=1)], {2: "x"}, A)) == []
    assert served(made, of_jobs([Job("x", max_clients=1)], {1: "y", 2: "x"}, A)) == [2]


def test_a_gate_that_begins_anew_counts_by_the_agents_last_table() -> None:
    made = queue(held(2, A))
    made.know(known(1, A))
    assert served(made, of_jobs([Job("x", total=Total(100.0))], {1: "x", 2: "x"}, A)) == []
