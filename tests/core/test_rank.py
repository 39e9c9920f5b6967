"""The next turn by priority and arrival. No user waits indefinitely."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.core import transitions as tr
from tests.core.harness import ALICE, BOB, CAROL, DAVE, PATIENT, POLICY, USERS, Stage

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


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.5, 3.0, 8.0]), st.sampled_from([*USERS] * 3 + [0, 1, 2, 3])),
        max_size=40,
    ),
    st.sampled_from([POLICY, PATIENT]),
)
def test_nobody_is_overtaken_twice_by_the_same_user(steps: list[tuple[float, int]], text: str) -> None:
    """A user comes after a pause, or one of the processes ends."""
    stage = Stage(text + RANKS).up()
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
