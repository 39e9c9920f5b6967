"""Sections of cgroups: which processes they name, and what is left of them under the user's limits."""

from __future__ import annotations

import fnmatch
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Share, matches, named
from mpsagent.policy.values import Percent
from tests.policies import policy

GIB = 1 << 30
H200 = Device(0, "GPU-0", "NVIDIA H200", 140 * GIB, 132)
ALICE = Identity(1001, "alice")
SLURM = "/system.slice/slurmstepd.scope/job_17/step_0"


@pytest.mark.parametrize(
    ("pattern", "cgroup", "fits"),
    [
        ("/system.slice", SLURM, True),
        ("/system.slice/*/job_17", SLURM, True),
        ("/system.slice/*/job_1?", SLURM, True),
        ("/system.slice/*/job_18", SLURM, False),
        ("/system.slice/job_17", SLURM, False),  # a star is one part
        ("/slurm*", SLURM, False),
        ("/system.slice/slurmstepd.scope/job_17/step_0/deeper", SLURM, False),
        ("slurmstepd.scope", SLURM, True),
        ("job_*", SLURM, True),
        ("system.slice", "/user.slice/system.slice", True),  # wherever; so raise by paths only
        ("stepd", SLURM, False),
        ("docker-*.scope", "/system.slice/docker-abc.scope", True),
        ("*", "/", False),
        ("/*", "/", False),
        ("/*", "/a/b", True),
        ("/", "/", True),
        ("/", SLURM, True),
    ],
)
def test_which_processes_a_pattern_names(pattern: str, cgroup: str, fits: bool) -> None:
    assert matches(pattern, cgroup) is fits


@given(st.text("ab*?", min_size=1, max_size=8), st.text("ab", min_size=1, max_size=8))
def test_a_part_fits_as_the_shell_says(pattern: str, part: str) -> None:
    assert matches(pattern, part) is fnmatch.fnmatchcase(part, pattern)


def test_a_hostile_name_takes_no_time() -> None:
    begun = time.process_time()
    assert not matches("*a*a*a*a*a*a*a*a*a*b", "a" * 4096)
    deep = "/" + "/".join(["a" * 255] * 16)
    assert not any(matches(f"*{'a' * 127}b", deep) for _ in range(100))
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("name", ["a/b", "/a/", "//a", "", "a[b]", "/\\u0007"])
def test_what_is_no_cgroup_is_a_mistake(name: str) -> None:
    found, errors = load([("p.toml", f'[cgroup."{name}"]\nactive_threads = "5%"\n')])
    assert found is None
    assert [one.line for one in errors] == [1]


def test_only_limits_and_totals_stand_there() -> None:
    errors = load([("p.toml", '[cgroup."/a"]\nmax_contexts = 5\n')])[1]
    assert [(one.line, one.problem) for one in errors] == [(2, "unknown key")]


@pytest.mark.parametrize(
    ("pattern", "cgroup"),
    [("/system.slice", "/system.slice"), ("/system.slice/*/job_1?", "/system.slice/slurmstepd.scope/job_17"),
     ("job_*", "/system.slice/slurmstepd.scope/job_17"), ("*.slice", "/system.slice")],
)  # fmt: skip
def test_each_cgroup_that_a_pattern_names_has_a_total_of_its_own(pattern: str, cgroup: str) -> None:
    assert named(pattern, SLURM) == cgroup
    share = policy(
        f'[cgroup."{pattern}"]\ntotal_active_threads = "30%"\ntotal_memory_limit = "25%"\nmax_clients = 3\n'
    ).share(SLURM)
    assert share is not None
    assert (share.job, share.max_clients, share.total([H200])) == (cgroup, 3, Total(30.0, {0: 35 * GIB}, 6.1))


def test_no_process_has_more_than_its_job_has_in_total() -> None:
    made = policy(
        '[limits]\nactive_threads = "50%"\n[cgroup."/a"]\ntotal_active_threads = "30%"\ntotal_memory_limit = "4G"\n'
    )
    share = made.share("/a/b")
    assert share is not None
    assert made.rules(ALICE).limits_within(share, [H200]) == Limits(30.0, {0: 4 * GIB})
    assert made.fail_safe([H200]) == Limits(30.0, {0: 4 * GIB})


def test_the_first_section_that_fits_counts() -> None:
    made = policy('[cgroup."/a/b"]\nactive_threads = "5%"\n[cgroup."/a"]\nactive_threads = "7%"\n')
    assert [getattr(made.share(path), "threads", None) for path in ("/a/b/c", "/a/c", "/c", None)] == [
        Percent(5.0),
        Percent(7.0),
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("user", "asked", "given"),
    [
        (
            'active_threads = "20%"\nmemory_limit = "4G"',
            Share("x", Percent(10.0), {"": 1 * GIB}),
            Limits(10.0, {0: 1 * GIB}),
        ),
        (
            'active_threads = "20%"\nmemory_limit = "4G"',
            Share("x", Percent(50.0), {"": 8 * GIB}),
            Limits(20.0, {0: 4 * GIB}),
        ),
        ('active_threads = "20%"\nmemory_limit = "4G"', Share("x"), Limits(20.0, {0: 4 * GIB})),
        ("active_threads = '20%'\ntotal_active_threads = '60%'", Share("x", Percent(40.0)), Limits(40.0)),
        ("active_threads = '20%'\ntotal_active_threads = '60%'", Share("x", Percent(80.0)), Limits(60.0)),
        (
            'memory_limit = "4G"\ntotal_memory_limit = "16G"',
            Share("x", None, {"0": 8 * GIB}),
            Limits(100.0, {0: 8 * GIB}),
        ),
        (
            'memory_limit = "4G"\ntotal_memory_limit = "16G"',
            Share("x", None, {"": 80 * GIB}),
            Limits(100.0, {0: 16 * GIB}),
        ),
        (
            'memory_limit = "4G"\ntotal_memory_limit = "16G"',
            Share("x", None, {"1": 8 * GIB}),
            Limits(100.0, {0: 4 * GIB}),
        ),
        ("active_threads = '20%'", Share("x", None, {"": 8 * GIB}), Limits(20.0, {0: 8 * GIB})),
    ],
)
def test_a_share_lowers_and_raises_within_what_the_user_may_have(user: str, asked: Share, given: Limits) -> None:
    assert policy(f"[user.alice]\n{user}\n").rules(ALICE).limits_within(asked, [H200]) == given


def test_the_fail_safe_limits_are_not_more_than_any_job_may_have() -> None:
    assert (
        policy('[limits]\nactive_threads = "20%"\n[cgroup."/a"]\nactive_threads = "5%"\n').fail_safe([H200]).threads
        == 5.0
    )
