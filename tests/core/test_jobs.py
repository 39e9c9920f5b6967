"""Processes of one user with different limits: those of jobs and containers."""

from __future__ import annotations

import random

import pytest

from mpsagent.core import inputs as inp
from mpsagent.core.waiting import waiting
from mpsagent.gate.places import KEPT
from mpsagent.mps.limits import Limits, Total
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Lease, Share
from mpsagent.policy.values import Percent
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, Stage

TEXT = """
[limits]
active_threads = '20%'
[user.alice]
active_threads = '20%'
total_active_threads = '60%'
[cgroup."/jobs/small"]
active_threads = '5%'
[cgroup."/jobs"]
active_threads = '40%'
[turn]
time_limit = "never"
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


@both
def test_who_waits_for_a_context_when_it_is_released_is_named_again(together: bool) -> None:
    """The control daemon was killed, and its client waited for the next one until it ended."""
    stage = Stage(TEXT, together=together).up()
    small = stage.client(ALICE, cgroup="/jobs/small")
    stage.run(1)
    stage.detaches(small)
    stage.run(0.01)
    stage.start_fails = True
    stage.crash_control()
    stage.run(0.1)
    stage.comes_back(small)
    stage.run(2)
    assert [one.pid for one in stage.actions(link.Release)] == [small.pid]
    stage.start_fails = False
    stage.run(30)
    assert stage.working(small)
    assert threads(stage, small)[-1] == 5.0


def test_who_comes_in_a_crowd_is_told_of_to_the_gate_a_few_at_a_time() -> None:
    stage = Stage(TEXT.replace("total_active_threads = '60%'\n", ""), together=True).up()
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


def test_processes_that_may_not_pass_anyway_take_no_other_users_place() -> None:
    """16 users with one client each and eight more that wait took all places in the table that names processes: a 17th
    was not served in 600 s, with 16 of 48 places used."""
    stage = Stage(
        TEXT.replace("active_threads = '20%'\n[user", "active_threads = '2%'\nmax_clients = 1\n[user", 1), together=True
    )
    uids = range(2001, 2018)
    stage.identities.update({uid: Identity(uid, f"user{uid}") for uid in uids})
    stage.up()
    crowd = [stage.client(uid, cgroup="/jobs/small") for uid in uids[:-1] for _ in range(9)]
    stage.run(5)
    assert sum(map(stage.working, crowd)) == 16
    late = stage.client(uids[-1], cgroup="/jobs/small")
    stage.run(1)
    assert stage.working(late)


# --- what a job has in total ------------------------------------------------------------------------------------------

TOTALS = """
[limits]
active_threads = '10%'
memory_limit = "2G"
[user.bob]
max_clients = 2
[cgroup."/jobs/*"]
total_active_threads = '30%'
[cgroup."/mem"]
total_memory_limit = "5G"
[cgroup."/few"]
max_clients = 1
[turn]
time_limit = "never"
"""


def why(stage: Stage, uid: int) -> str:
    assert stage.core is not None
    return next(one.why.text for one in waiting(stage.core.view(), stage.now) if one.uid == uid)


@both
@pytest.mark.parametrize(
    ("cgroup", "fit", "words"),
    [
        ("/jobs/17/step_0", 3, "cgroup /jobs/17's total is in use: 30 of 30 % of threads, the next process needs 10"),
        ("/mem", 2, "cgroup /mem's total is in use: 4G of 5G on device 0, the next process needs 2G"),
        ("/few", 1, "cgroup /few may have 1 process at a time"),
    ],
)
def test_a_job_has_its_total_and_its_users_other_jobs_do_not_wait_for_it(
    cgroup: str, fit: int, words: str, together: bool
) -> None:
    stage = Stage(TOTALS, together=together).up()
    crowd = [stage.client(ALICE, cgroup=cgroup, contexts=2) for _ in range(20)]
    other, outside = stage.client(ALICE, cgroup="/jobs/18"), stage.client(ALICE)
    stage.run(2)
    assert [stage.working(one) for one in crowd] == [True] * fit + [False] * (20 - fit)
    assert stage.working(other)
    assert stage.working(outside)
    assert words in why(stage, ALICE)
    stage.ends(crowd[0])
    stage.run(1)
    assert [stage.working(one) for one in crowd[1:]] == [True] * fit + [False] * (19 - fit)


def test_who_waits_for_a_total_is_told_that_mps_gives_no_process_less() -> None:
    """40 % are six processes of 5: MPS gives each of them 8 of an H200's multiprocessors."""
    stage = Stage('[cgroup."/jobs/*"]\nactive_threads = "5%"\ntotal_active_threads = "40%"\n', together=True).up()
    crowd = [stage.client(ALICE, cgroup="/jobs/1") for _ in range(8)]
    stage.run(3)
    assert [stage.working(one) for one in crowd] == [True] * 6 + [False] * 2
    words = "36.6 of 40 % of threads, the next process needs 6.1 (its limit is 5, but MPS gives no process less)"
    assert words in why(stage, ALICE)
    names = ", ".join(str(one.pid) for one in crowd[:3])
    assert f"only this user's own processes {names} and 3 more can make room" in why(stage, ALICE)


@both
def test_a_launcher_takes_no_part_of_its_cgroups_share(together: bool) -> None:
    """The share is that of one process, as a Slurm job has it by default."""
    stage = Stage(
        '[cgroup."/jobs/*"]\nactive_threads = "30%"\ntotal_active_threads = "30%"\nmax_clients = 1\n', together=together
    ).up()
    launcher = stage.client(ALICE, cgroup="/jobs/1", contexts=0)
    stage.run(KEPT + 1)
    rank, late = (stage.client(ALICE, cgroup="/jobs/1") for _ in range(2))
    stage.run(1)
    assert [stage.working(one) for one in (rank, late)] == [True, False]
    launcher.contexts = 1
    stage.gate.knock(launcher)
    stage.ends(late)
    stage.run(5)
    assert not launcher.made
    assert "has no context yet, and its first one waits: cgroup /jobs/1 may have 1 process" in why(stage, ALICE)
    stage.ends(rank)
    stage.run(1)
    assert launcher.made


def test_whom_the_gate_slows_down_learns_until_when() -> None:
    """By the gate's own word, which comes before what else bounds the user."""
    stage = Stage("[limits]\nactive_threads = '60%'\ntotal_active_threads = '60%'\n", together=True).up()
    for _ in range(2):
        stage.client(ALICE)
    stage.run(1)
    assert why(stage, ALICE).startswith("this user's total is in use")
    stage.feed(inp.GateSaid(stage.now, link.Slowed(ALICE, stage.now + 45)))
    assert stage.core is not None
    (alice,) = waiting(stage.core.view(), stage.now)
    assert (alice.why.word, alice.why.until) == ("slowed", stage.now + 45)
    assert "delayed other users" in alice.why.text
    (alice,) = waiting(stage.core.view(), stage.now + 45)
    assert alice.why.word == "total"


def test_what_a_client_really_uses_counts_in_its_jobs_total() -> None:
    stage = Stage(TOTALS.replace('"2G"', '"2G"\non_limit_exceeded = "report"', 1), together=True).up()
    one = stage.client(ALICE, cgroup="/mem")
    stage.run(3)
    stage.feed(inp.MemorySeen(stage.now, {one.pid: {"GPU-0": 4 << 30}}))
    stage.run(1)
    late = stage.client(ALICE, cgroup="/mem")
    stage.run(1)
    assert not stage.working(late), "4 of 5 GiB are in use, by NVML's word"
    assert stage.gate.table.jobs["/mem"].total == Total(None, {0: 3 << 30}), "so the gate counts what is left"


def test_a_gate_and_an_agent_that_begin_anew_know_whose_the_processes_are() -> None:
    """Also where the lease has been given again meanwhile, by the same name."""
    stage = Stage(TOTALS, together=True).up()

    def lease(number: int) -> None:
        share = Share(f"lease {number}", total_threads=Percent(20.0), job="slurm-17")
        whole = Lease(number, share, stage.now, stage.now + 1000, 0, cgroup="/slurm/job_17", name="slurm-17")
        stage.feed(inp.LeaseEndOrdered(stage.now, number - 1, 0), inp.LeaseOrdered(stage.now, whole))

    lease(1)
    crowd = [stage.client(ALICE, cgroup="/slurm/job_17") for _ in range(4)]
    stage.run(1)
    assert [stage.working(one) for one in crowd] == [True, True, False, False]
    lease(2)
    stage.run(1)
    assert [stage.working(one) for one in crowd] == [True, True, False, False]
    stage.gate.restarts()
    stage.kill_agent()
    stage.run(1)
    stage.start_agent()
    lease(3)
    stage.run(1)
    assert [stage.working(one) for one in crowd] == [True, True, False, False]
    stage.ends(crowd[1])
    stage.run(1)
    assert [stage.working(one) for one in crowd[2:]] == [True, False]


def test_a_job_that_is_given_again_has_nothing_of_the_one_before_that_it_does_not_cover() -> None:
    """The same name for another cgroup and user: whoever works on from the first one keeps nobody of the second."""
    stage = Stage(TOTALS, together=True).up()
    for number, uid, cgroup in ((1, ALICE, "/slurm/job_17"), (2, BOB, "/slurm/again_17")):
        share = Share(f"lease {number}", total_threads=Percent(10.0), job="slurm-17")
        lease = Lease(number, share, stage.now, stage.now + 1000, 0, uid, cgroup, name="slurm-17")
        stage.feed(inp.LeaseEndOrdered(stage.now, number - 1, 0), inp.LeaseOrdered(stage.now, lease))
        crowd = [stage.client(uid, cgroup=cgroup) for _ in range(2)]
        stage.run(1)
        assert [stage.working(one) for one in crowd] == [True, False]


def test_a_job_has_its_total_also_over_users_whom_nobody_can_name() -> None:
    """The name service is away when gate and agent begin anew: who works counts all the same."""
    stage = Stage(TOTALS, together=True).up()
    first = [stage.client(ALICE, cgroup="/jobs/17") for _ in range(3)]
    stage.run(1)
    bob = stage.client(BOB, cgroup="/jobs/17")
    stage.gate.restarts()
    stage.kill_agent()
    alice = stage.identities.pop(ALICE)
    stage.start_agent()
    stage.run(1)
    assert [stage.working(one) for one in (*first, bob)] == [True] * 3 + [False]
    stage.identities[ALICE] = alice


def test_a_long_name_of_a_cgroup_is_a_short_one_in_the_gates_table() -> None:
    """Users name cgroups, and with long names the jobs of a table would be too much for one message."""
    stage = Stage(TOTALS + '[cgroup."job-*"]\ntotal_active_threads = "10%"\n', together=True).up()
    crowd = [stage.client(ALICE, cgroup=f"/{chr(0x1F600) * 500}{n}/job-1") for n in (1, 2, 2)]
    stage.run(1)
    assert [stage.working(one) for one in crowd] == [True, True, False]
    table = stage.gate.table
    assert [len(name) for name in table.jobs] == [64, 64]
    assert {one.job for one in table.processes.values()} == set(table.jobs)
