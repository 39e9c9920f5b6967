"""Shares that are given to jobs until some time: whose they are, what they give, when they end."""

from __future__ import annotations

import json

import pytest

from mpsagent.agent import saved
from mpsagent.core import inputs as inp
from mpsagent.core import transitions as tr
from mpsagent.mps.limits import Limits
from mpsagent.policy.shares import Lease, Share
from mpsagent.policy.values import Percent
from tests.core.harness import ALICE, BOB, Stage
from tests.core.toy import Proc

TEXT = """
[limits]
active_threads = '20%'
memory_limit = "4G"
[user.alice]
active_threads = '60%'
[user.bob]
active_threads = '20%'
total_active_threads = '60%'
[turn]
time_limit = "never"
"""
GIB = 1 << 30


def started() -> Stage:
    return Stage(TEXT, together=True).up()


def give(stage: Stage, number: int, seconds: float, threads: float, **whose: object) -> None:
    lease = Lease(number, Share(f"lease {number}", Percent(threads)), stage.now, stage.now + seconds, 0, **whose)  # type: ignore[arg-type]
    stage.feed(inp.LeaseOrdered(stage.now, lease))
    stage.run(0.1)


def threads(stage: Stage, proc: Proc) -> float:
    stage.run(1)
    (found,) = {one.threads for one in stage.given(proc)}
    return found


def test_a_job_with_30_percent_inside_a_user_with_60() -> None:
    stage = started()
    give(stage, 1, 100, 30.0, uid=ALICE, cgroup="/slurm/job_17", name="slurm-17")
    job = stage.client(ALICE, cgroup="/slurm/job_17/step_0")
    assert threads(stage, job) == 30.0
    assert threads(stage, stage.client(ALICE, cgroup="/slurm/job_18")) == 60.0
    assert threads(stage, stage.client(BOB, cgroup="/slurm/job_17")) == 20.0
    (given,) = stage.happened(tr.LeaseGiven)
    assert (given.uid, given.cgroup, given.pid) == (ALICE, "/slurm/job_17", None)  # type: ignore[union-attr]
    stage.feed(inp.LeaseEndOrdered(stage.now, 1, 0))  # an epilog may come before the agent has seen the process end
    stage.ends(job)
    stage.run(1)
    connected, ended = stage.happened(tr.ClientConnected), stage.happened(tr.ClientEnded)
    assert [(one.lease, one.job) for one in connected] == [(1, "slurm-17"), *[(None, None)] * 2]  # type: ignore[union-attr]
    assert [(one.lease, one.job) for one in ended] == [(1, "slurm-17")]  # type: ignore[union-attr]


def test_it_raises_only_within_a_total() -> None:
    stage = started()
    give(stage, 1, 100, 40.0, uid=BOB)
    give(stage, 2, 100, 90.0, uid=ALICE)
    bob = stage.client(BOB)
    assert threads(stage, bob) == 40.0
    assert threads(stage, stage.client(ALICE)) == 60.0
    late = stage.client(BOB)
    stage.run(1)
    assert not stage.working(late), "80 of 60 % would be in use"
    stage.ends(bob)
    assert threads(stage, late) == 40.0


def test_it_ends_at_its_time_and_who_was_let_in_keeps_what_it_has() -> None:
    stage = started()
    give(stage, 1, 50, 30.0, uid=ALICE)
    before = stage.client(ALICE, contexts=2)
    assert threads(stage, before) == 30.0
    stage.run(60)
    assert [one.number for one in stage.happened(tr.LeaseEnded)] == [1]  # type: ignore[union-attr]
    assert stage.core is not None
    assert stage.core.state.leases == ()
    assert threads(stage, stage.client(ALICE)) == 60.0
    stage.gate.knock(before)  # a further context
    assert threads(stage, before) == 30.0


def test_it_can_be_ended_before() -> None:
    stage = started()
    give(stage, 1, 50, 30.0, uid=ALICE)
    stage.feed(inp.LeaseEndOrdered(stage.now, 1, 0), inp.LeaseEndOrdered(stage.now, 7, 0))
    stage.run(0.1)
    assert threads(stage, stage.client(ALICE)) == 60.0
    assert len(stage.happened(tr.LeaseEnded)) == 1


@pytest.mark.parametrize(
    ("lineage", "fits"),
    [(((9, 1), (5, 3), (1, 1)), True), (((5, 3),), True), (((9, 1), (5, 4)), False), ((), False)],
)
def test_a_process_and_what_descends_from_it(lineage: tuple[tuple[int, int], ...], fits: bool) -> None:
    lease = Lease(1, Share("lease 1", Percent(5.0)), 0.0, 9.0, 0, process=(5, 3))
    assert lease.fits(ALICE, None, lineage) is fits
    assert not Lease(1, Share("lease 1", Percent(5.0)), 0.0, 9.0, 0, uid=BOB, process=(5, 3)).fits(ALICE, None, lineage)


def test_the_fail_safe_limits_are_not_more_than_a_lease_gives() -> None:
    stage = started()
    assert stage.gate.table.fail_safe == Limits(20.0, {0: 4 * GIB})
    share = Share("lease 1", Percent(5.0), {"": GIB})
    stage.feed(inp.LeaseOrdered(stage.now, Lease(1, share, stage.now, stage.now + 9, 0, uid=ALICE)))
    stage.run(1)
    assert stage.gate.table.fail_safe == Limits(5.0, {0: GIB})


def test_another_agent_goes_on_with_them() -> None:
    stage = started()
    share = Share("lease 3", Percent(30.0), {"": 5 * GIB, "0": GIB}, Percent(60.0), Percent(25.0), 3, job="lease 3")
    whole = Lease(3, share, stage.now, stage.now + 50, 7, ALICE, "/a", (5, 3))
    stage.feed(
        inp.LeaseOrdered(stage.now, whole), inp.LeaseOrdered(stage.now, Lease(4, share, 0.0, stage.now + 9, 0, uid=1))
    )
    assert stage.core is not None
    rows = json.loads(json.dumps({"leases": saved.lease_rows(stage.core)}))
    (found,) = saved.leases(rows, stage.now + 10)
    assert isinstance(found, inp.LeaseOrdered)
    assert found.lease == whole


@pytest.mark.parametrize("rows", [None, 3, [3], [{}], [{"number": 1}], {"a": 1}])
def test_what_is_damaged_is_left_out(rows: object) -> None:
    assert saved.leases({"leases": rows}, 0.0) == []
