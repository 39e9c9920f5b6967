"""`mode = 'report'`: every client that would be held or terminated is reported, once for each rule."""

from __future__ import annotations

import pytest

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.policy.shares import Lease, Share
from mpsagent.policy.values import Percent
from tests.core.harness import ALICE, BOB, PATIENT, Stage

CHANGES = act.TerminateClient, act.SignalClient, act.QuitControl
TOGETHER = '[instance.gpu]\nsharing = "one-server"\nserver_scope = "all"\n'
TURNS = '[instance.gpu]\nsharing = "turns"\nserver_scope = "all"\n'
APART = '[instance.gpu]\nsharing = "per-user"\nserver_scope = "user"\n'


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
        ("active_threads = '30%'\ntotal_active_threads = '60%'", ["user.carol.total_active_threads"]),
        ('memory_limit = "10G"\ntotal_memory_limit = "20G"', ["user.carol.total_memory_limit"]),
        ("max_contexts = 2", ["user.carol.max_contexts"]),
        ('access = "deny"', ["user.carol.access"] * 3),
    ],
)
@pytest.mark.parametrize("off", ["mode = 'report'\n{}", "{}mode = 'report'\n"], ids=["everywhere", "for one user"])
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


LINES = "max_clients = 1\n", "active_threads = '20%'\ntotal_active_threads = '20%'\n"


@pytest.mark.parametrize("given", [{"max_clients": 1}, {"threads": Percent(20.0), "total_threads": Percent(20.0)}])
@pytest.mark.parametrize("how", ["cgroup", "lease"])
def test_a_process_beyond_what_its_job_may_have_is_reported(given: dict[str, float], how: str) -> None:
    text = f"mode = 'report'\n{PATIENT}{TOGETHER}"
    if how == "cgroup":
        text += '[cgroup."/job"]\n' + LINES["total_threads" in given]
    stage = Stage(text, together=True).up()
    if how == "lease":
        share = Share("lease 1", **given, job="lease 1")  # type: ignore[arg-type]
        stage.feed(inp.LeaseOrdered(stage.now, Lease(1, share, stage.now, stage.now + 3600, 0, cgroup="/job")))
    crowd = [stage.client(ALICE, cgroup="/job")]
    stage.run(1)
    crowd.append(stage.client(BOB, cgroup="/job"))
    outside = stage.client(BOB)
    stage.run(60)
    assert all(stage.working(one) for one in [*crowd, outside])
    key = "total_active_threads" if "total_threads" in given else "max_clients"
    source = 'cgroup."/job"' if how == "cgroup" else "lease 1"
    assert reported(stage) == [(crowd[1].pid, f"{source}.{key}")]


@pytest.mark.parametrize(
    ("way", "more", "key"),
    [
        (TURNS, "", "turn.time_limit"),
        (TOGETHER, "max_clients = 1\n", "user.bob.max_clients"),
        (
            TOGETHER,
            "active_threads = '20%'\ntotal_active_threads = '20%'\n",
            "user.bob.total_active_threads",
        ),
        (APART, "", "instance.gpu.sharing"),
    ],
    ids=["in another user's turn", "beyond max_clients", "beyond a total", "at another user's daemon"],
)
def test_a_client_that_came_through_another_process_is_reported(way: str, more: str, key: str) -> None:
    off, part = ("mode = 'report'\n", "") if way == APART else ("", "mode = 'report'\n")
    text = f'{off}[limits]\nmemory_limit = "10G"\n[turn]\ntime_limit = "1h"\n[user.bob]\n{part}'
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
    text = (
        '[limits]\nmemory_limit = "10G"\n[user.bob]\nmode = "report"\nactive_threads = "20%"\n'
        'total_active_threads = "60%"\n'
    )
    stage = Stage(f"{text}{TOGETHER}", together=True).up()
    alice = stage.client(ALICE)
    stage.run(3)
    through = [stage.relayed(BOB, alice), stage.relayed(BOB, alice)]
    stage.run(60)
    assert all(one.pid in stage.procs for one in through)
    assert reported(stage) == []
