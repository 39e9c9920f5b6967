"""`enforce = false`: every client that would be held or terminated is reported, once for each rule."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.policy.shares import Lease, Share
from tests.core.harness import ALICE, BOB, PATIENT, Stage

CHANGES = act.TerminateClient, act.SignalClient, act.QuitControl
TOGETHER = '[instance.gpu]\nsharing = "together"\nserver = "shared"\n'
TURNS = '[instance.gpu]\nsharing = "turns"\nserver = "shared"\n'
APART = '[instance.gpu]\nsharing = "apart"\nserver = "own"\n'


def reported(stage: Stage) -> list[tuple[int, str]]:
    """The process and the key of each report."""
    reports = stage.reports("client.over")
    assert all("does not enforce this" in one.reason for one in reports)
    assert stage.actions(*CHANGES) == []
    return sorted((one.pid or 0, one.rule) for one in reports)


@pytest.mark.parametrize(
    ("rule", "keys"),
    [
        ("max_clients = 2", ["user.carol.max_clients"]),
        ("threads = 30\ntotal_threads = 60", ["user.carol.total_threads"]),
        ('memory = "10G"\ntotal_memory = "20G"', ["user.carol.total_memory"]),
        ("max_contexts = 2", ["user.carol.max_contexts"]),
        ('access = "deny"', ["user.carol.access"] * 3),
    ],
)
@pytest.mark.parametrize("off", ["enforce = false\n{}", "{}enforce = false\n"], ids=["everywhere", "for one user"])
def test_a_process_beyond_what_its_user_may_have_is_reported(rule: str, keys: list[str], off: str) -> None:
    stage = Stage(off.format(f"{PATIENT}{TOGETHER}[user.carol]\n{rule}\n"), together=True).up()
    crowd = []
    for _ in range(3):
        crowd.append(stage.client(1003))
        stage.run(1)
    assert all(stage.working(one) for one in crowd)
    stage.run(60)
    over = crowd[-len(keys) :]
    assert reported(stage) == sorted((one.pid, key) for one, key in zip(over, keys, strict=True))


@pytest.mark.parametrize("given", [{"max_clients": 1}, {"threads": 20.0, "total_threads": 20.0}])
@pytest.mark.parametrize("how", ["cgroup", "lease"])
def test_a_process_beyond_what_its_job_may_have_is_reported(given: dict[str, float], how: str) -> None:
    text = f"enforce = false\n{PATIENT}{TOGETHER}"
    if how == "cgroup":
        text += '[cgroup."/job"]\n' + "".join(f"{key} = {value:g}\n" for key, value in given.items())
    stage = Stage(text, together=True).up()
    if how == "lease":
        share = Share("lease 1", **given, job="lease 1")  # type: ignore[arg-type]
        stage.feed(inp.LeaseGiven(stage.now, Lease(1, share, stage.now, stage.now + 3600, 0, cgroup="/job")))
    crowd = [stage.client(ALICE, cgroup="/job")]
    stage.run(1)
    crowd.append(stage.client(BOB, cgroup="/job"))
    outside = stage.client(BOB)
    stage.run(60)
    assert all(stage.working(one) for one in [*crowd, outside])
    key = "total_threads" if "total_threads" in given else "max_clients"
    source = 'cgroup."/job"' if how == "cgroup" else "lease 1"
    assert reported(stage) == [(crowd[1].pid, f"{source}.{key}")]


@pytest.mark.parametrize(
    ("way", "more", "key"),
    [
        (TURNS, "", "switch.after"),
        (TOGETHER, "[user.bob]\nmax_clients = 1\n", "user.bob.max_clients"),
        (TOGETHER, "[user.bob]\nthreads = 20\ntotal_threads = 20\n", "user.bob.total_threads"),
        (APART, "", "instance.gpu.sharing"),
    ],
    ids=["in another user's turn", "beyond max_clients", "beyond a total", "at another user's daemon"],
)
def test_a_client_that_came_through_another_process_is_reported(way: str, more: str, key: str) -> None:
    off, part = ("enforce = false\n", "") if way == APART else ("", "enforce = false\n")
    text = f'{off}[limits]\n{part}memory = "10G"\n[switch]\n{part}after = "1h"\n'
    stage = Stage(f"{text}{more}{way}", together=way != TURNS, shared=True)
    stage.start_agent()
    stage.run(1)
    stage.overlaps = True
    alice = stage.client(ALICE)
    stage.run(3)
    if way == TOGETHER:
        stage.client(BOB)
        stage.run(3)
    through = stage.relayed(BOB, alice)
    stage.run(60)
    assert through.pid in stage.procs
    assert reported(stage) == [(through.pid, key)]


def test_a_client_that_came_through_another_process_and_fits_is_not_reported() -> None:
    """Its limits are not set, and count as those that it would have."""
    text = '[limits]\nenforce = false\nmemory = "10G"\n[user.bob]\nthreads = 20\ntotal_threads = 60\n'
    stage = Stage(f"{text}{TOGETHER}", together=True).up()
    alice = stage.client(ALICE)
    stage.run(3)
    through = [stage.relayed(BOB, alice), stage.relayed(BOB, alice)]
    stage.run(60)
    assert all(one.pid in stage.procs for one in through)
    assert reported(stage) == []
