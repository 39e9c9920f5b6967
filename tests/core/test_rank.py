"""Whose turn is next by priority and by GPU time, and that nobody waits for ever."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.agent import saved
from mpsagent.core import transitions as tr
from mpsagent.core import usage
from tests.core.harness import ALICE, BOB, CAROL, DAVE, PATIENT, POLICY, USERS, Stage

FAIR = '[instance.gpu]\nqueue_order = "fair-share"\n'
RANKS = "[user.carol]\nqueue_priority = 5\n[user.dave]\nqueue_priority = 9\n"


def one_after_the_other(stage: Stage) -> list[int]:
    """Whoever has the GPU ends, until nobody is left."""
    while stage.procs:
        stage.run(1)
        working = [proc for proc in stage.procs.values() if stage.working(proc)]
        assert working, (stage.core.state, stage.core.memories)  # type: ignore[union-attr]
        for proc in working:
            stage.ends(proc)
    return stage.turns()


def works(stage: Stage, uid: int, seconds: float) -> None:
    proc = stage.client(uid)
    stage.run(1)
    stage.run(seconds)
    stage.ends(proc)
    stage.run(1)


# --- priority ---------------------------------------------------------------------------------------------------------


def test_the_highest_priority_is_next_and_then_who_came_first() -> None:
    stage = Stage(PATIENT + RANKS).up()
    stage.client(ALICE)
    stage.run(1)
    for uid in (BOB, CAROL, DAVE):
        stage.client(uid)
        stage.run(1)
    assert one_after_the_other(stage) == [ALICE, DAVE, CAROL, BOB]


def test_who_has_the_gpu_keeps_it_as_long_as_the_policy_says() -> None:
    stage = Stage(POLICY + RANKS).up()
    alice = stage.client(ALICE)
    stage.run(1)
    bob = stage.client(BOB)
    stage.run(5)
    dave = stage.client(DAVE)
    stage.run(4)
    assert stage.working(alice)
    assert not stage.reports("turn.warning")
    stage.run(8)  # from Bob's arrival, not from Dave's: turn.time_limit 10 s and grace 5 s
    assert stage.working(dave)
    (warning,) = stage.times_of_reports("turn.warning")
    assert 10 <= warning - stage.came[bob.pid] < 11


def test_no_user_has_two_turns_while_another_waits() -> None:
    """Dave comes again and again; Bob is next after one turn of Dave's."""
    stage = Stage(PATIENT + RANKS).up()
    first = stage.client(ALICE)
    stage.run(1)
    stage.client(BOB)
    for _ in range(3):
        stage.client(DAVE)
        stage.run(0.5)
    stage.ends(first)
    stage.run(1)
    for proc in [p for p in stage.procs.values() if p.uid == DAVE]:
        stage.ends(proc)
    stage.run(0.2)
    stage.client(DAVE)
    stage.run(1)
    assert stage.turns() == [ALICE, DAVE, BOB]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.5, 3.0, 8.0]), st.sampled_from([*USERS] * 3 + [0, 1, 2, 3])),
        max_size=40,
    ),
    st.sampled_from([POLICY, PATIENT]),
    st.booleans(),
)
def test_nobody_is_overtaken_twice_by_the_same_user(steps: list[tuple[float, int]], text: str, fair: bool) -> None:
    """A user comes after a pause, or one of the processes ends."""
    stage = Stage(text + RANKS + (FAIR if fair else "")).up()
    for pause, who in steps:
        stage.run(pause)
        live = list(stage.procs.values())
        if who in USERS:
            stage.client(who)
        elif live:
            stage.ends(live[who % len(live)])
    stage.run(150)
    for one in stage.gate.given:
        came = stage.came[one.pid]
        earlier = [p for p, at in stage.came.items() if at <= came]
        began = [t.uid for t in stage.told if isinstance(t, tr.TurnBegan) and came < t.at <= one.at]
        others = [uid for uid in began if uid != one.uid]
        assert len(others) == len(set(others)), (came, began, earlier)


# --- GPU time ---------------------------------------------------------------------------------------------------------


def test_fair_is_who_has_had_the_least_gpu_time() -> None:
    stage = Stage(PATIENT + FAIR).up()
    for uid, seconds in ((ALICE, 500), (BOB, 20), (CAROL, 100)):
        works(stage, uid, seconds)
    first = stage.client(DAVE)
    stage.run(1)
    stage.told.clear()
    for uid in (ALICE, CAROL, BOB):
        stage.client(uid)
    stage.ends(first)
    assert one_after_the_other(stage) == [BOB, CAROL, ALICE]


def test_priority_counts_before_gpu_time() -> None:
    stage = Stage(PATIENT + FAIR + RANKS).up()
    works(stage, DAVE, 500)
    first = stage.client(ALICE)
    stage.run(1)
    stage.told.clear()
    for uid in (BOB, DAVE):
        stage.client(uid)
    stage.ends(first)
    assert one_after_the_other(stage) == [DAVE, BOB]


def test_a_day_later_it_is_forgotten() -> None:
    stage = Stage(PATIENT + FAIR).up()
    works(stage, ALICE, 500)
    assert stage.core is not None
    assert 499 <= stage.core.memories.usage.spent[ALICE] <= 504
    stage.run(23 * 3600)
    works(stage, BOB, 5)
    assert ALICE in stage.core.memories.usage.spent
    stage.run(3600)
    works(stage, BOB, 5)
    assert ALICE not in stage.core.memories.usage.spent


def test_who_asks_is_told_of_the_time_so_far() -> None:
    """It is counted when clients have left and once an hour; a user at work was told that there was none."""
    stage = Stage(PATIENT + FAIR).up()
    stage.client(ALICE)
    stage.run(500)
    assert stage.core is not None
    memory = stage.core.memories.usage
    assert ALICE not in memory.spent
    assert 499 <= usage.spent(memory, ALICE, stage.now) <= 501
    assert usage.spent(memory, BOB, stage.now) == 0


def test_several_clients_at_once_are_counted_once_and_long_work_hour_by_hour() -> None:
    stage = Stage(PATIENT + FAIR).up()
    crowd = [stage.client(ALICE) for _ in range(5)]
    stage.run(30 * 3600)
    for proc in crowd:
        stage.ends(proc)
    stage.run(1)
    assert stage.core is not None
    memory = stage.core.memories.usage
    assert 23 * 3600 <= memory.spent[ALICE] <= 24 * 3600
    assert len(memory.hours[ALICE]) == 24
    assert max(memory.hours[ALICE].values()) <= 3600


def test_another_agent_counts_on() -> None:
    stage = Stage(PATIENT + FAIR).up()
    works(stage, ALICE, 500)
    stage.client(BOB)
    stage.run(100)
    assert stage.core is not None
    rows = json.loads(json.dumps({"usage": saved.usage_rows(stage.core)}))
    stage.kill_agent()
    stage.start_agent()
    stage.run(1)
    saved.take_up_usage(stage.core, rows, stage.now)
    stage.client(CAROL)
    stage.run(50)
    spent = stage.core.memories.usage
    assert 499 <= spent.spent[ALICE] <= 504
    assert 99 <= spent.spent[BOB] + stage.now - spent.since[BOB] <= 155


def test_whatever_stands_in_the_store_the_agent_starts() -> None:
    stage = Stage().up()
    assert stage.core is not None
    for rows in (
        {},
        {"usage": 3},
        {"usage": {"hours": [[1]], "since": []}},
        {"usage": {"hours": [], "since": [["x", 1]]}},
    ):
        saved.take_up_usage(stage.core, rows, stage.now)
    assert stage.core.memories.usage.spent == {}


def test_what_is_remembered_is_bounded() -> None:
    spans = [(uid, 1000.0 - uid / 1000) for uid in range(usage.MOST_USERS + 500)]
    memory = usage.count(usage.Memory(), spans, 1000.0)
    assert len(memory.spent) == usage.MOST_USERS
    assert min(memory.spent) == 500  # those who used the most are kept
    assert set(USERS) <= set(range(2000))


def test_hours_of_the_future_are_forgotten() -> None:
    """Counted while the machine's clock was 90 days ahead, they would be "of the last day" until then."""
    stage = Stage(PATIENT + FAIR).up()
    hour = int(stage.now // usage.HOUR)
    hours = [[ALICE, [[hour - 1, 500.0], [hour + 90 * 24, 36000.0]]]]
    assert stage.core is not None
    saved.take_up_usage(stage.core, {"usage": {"hours": hours, "since": []}}, stage.now)
    memory = stage.core.memories.usage
    assert (memory.spent, usage.spent(memory, ALICE, stage.now)) == ({ALICE: 500.0}, 500.0)
