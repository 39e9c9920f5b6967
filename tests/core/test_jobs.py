"""Processes of one user with different limits: those of jobs and containers."""

from __future__ import annotations

import random

import pytest

from mpsagent.mps.limits import Limits
from mpsagent.policy.identity import Identity
from tests.core.harness import ALICE, BOB, Stage

TEXT = """
[limits]
threads = 20
[user.alice]
threads = 20
total_threads = 60
[cgroup."/jobs/small"]
threads = 5
[cgroup."/jobs"]
threads = 40
[switch]
after = "never"
"""
both = pytest.mark.parametrize("together", [False, True], ids=["turns", "together"])


def threads(stage: Stage, proc: object) -> list[float]:
    return [one.threads for one in stage.given(proc)]  # type: ignore[arg-type]


@both
def test_each_process_gets_what_its_job_gets_within_its_users(together: bool) -> None:
    stage = Stage(TEXT, together=together).up()
    plain = stage.client(ALICE, cgroup="/user.slice")
    small = stage.client(ALICE, cgroup="/jobs/small/17")
    nowhere = stage.client(ALICE)
    stage.run(1)
    assert [threads(stage, one) for one in (plain, small, nowhere)] == [[20.0] * 2, [5.0] * 2, [20.0] * 2]
    for proc in (plain, small, nowhere):
        stage.ends(proc)
    stage.run(1)
    raised = stage.client(ALICE, cgroup="/jobs/large")
    stage.run(1)
    assert threads(stage, raised) == [40.0] * 2
    bob = stage.client(BOB, cgroup="/jobs/large")
    stage.ends(raised)
    stage.run(1)
    assert threads(stage, bob) == [20.0] * 2, "he has no total: his own limit is the most"


def test_a_process_keeps_what_it_was_let_in_with() -> None:
    stage = Stage(TEXT).up()
    proc = stage.client(ALICE, cgroup="/jobs/small", contexts=4)
    stage.run(0.153)
    stage.reload(TEXT.replace("threads = 5", "threads = 9"))
    stage.run(1)
    assert threads(stage, proc) == [5.0] * 5


def test_what_jobs_have_counts_for_the_total() -> None:
    stage = Stage(TEXT).up()
    crowd = [stage.client(ALICE, cgroup=path) for path in ("/jobs/a", "/a", "/a", "/jobs/small")]
    stage.run(1)
    assert [stage.working(one) for one in crowd] == [True, True, False, False]
    stage.ends(crowd[0])
    stage.run(1)
    assert [stage.working(one) for one in crowd[1:]] == [True, True, True]


def test_who_comes_in_a_crowd_is_told_of_to_the_gate_a_few_at_a_time() -> None:
    stage = Stage(TEXT.replace("total_threads = 60\n", ""), together=True).up()
    draw = random.Random(5)
    crowd = [stage.client(draw.choice((ALICE, BOB)), cgroup=draw.choice(["/jobs/small", "/a"])) for _ in range(200)]
    for _ in range(60):
        stage.run(1)
        assert len(stage.gate.table.processes) <= 16
        for proc in [one for one in crowd if stage.working(one)][:10]:
            stage.ends(proc)
    assert not stage.procs
    for proc in crowd:
        right = 5.0 if proc.cgroup == "/jobs/small" else 20.0
        assert set(threads(stage, proc)) == {right}


def test_without_an_agent_no_new_process_passes_with_limits_that_may_not_be_its_own() -> None:
    stage = Stage(TEXT).up()
    works = stage.client(ALICE, contexts=2, cgroup="/jobs/small")
    stage.run(1)
    stage.kill_agent()
    late = stage.client(ALICE, cgroup="/jobs/small")
    stage.run(10)
    assert not stage.given(late)
    assert stage.working(works)
    stage.start_agent()
    stage.run(1)
    assert stage.given(late)[0] == Limits(5.0)


def test_only_reported_limits_stay_off() -> None:
    stage = Stage(TEXT.replace("threads = 20\n[user", "threads = 20\nenforce = false\n[user")).up()
    proc = stage.client(BOB, cgroup="/jobs/small")
    stage.run(1)
    assert stage.given(proc)[0] == Limits()


def test_processes_that_may_not_pass_anyway_take_no_other_users_place() -> None:
    """16 users with one client each and eight more that wait took all places in the table that names processes: a 17th
    was not served in 600 s, with 16 of 48 places used."""
    stage = Stage(TEXT.replace("threads = 20\n[user", "threads = 2\nmax_clients = 1\n[user", 1), together=True)
    uids = range(2001, 2018)
    stage.identities.update({uid: Identity(uid, f"user{uid}") for uid in uids})
    stage.up()
    crowd = [stage.client(uid, cgroup="/jobs/small") for uid in uids[:-1] for _ in range(9)]
    stage.run(5)
    assert sum(map(stage.working, crowd)) == 16
    late = stage.client(uids[-1], cgroup="/jobs/small")
    stage.run(1)
    assert stage.working(late)
