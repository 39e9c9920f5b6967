"""All clients of a job, a cgroup or a user are ended by one order; who is no administrator ends the own ones alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.stage import A, B, Stage

pytestmark = pytest.mark.root


def test_all_of_one_job_and_nobody_else(stage: Stage) -> None:
    agent = stage.with_agent("", extra='sharing = "one-server"')
    for name, uid in (("one", A), ("two", B)):
        assert agent.api.order("lease", uid=uid, active_threads="50%", until="1h", name=name)[0] == 200
    mine, other = [stage.client(A, "mind", 600) for _ in range(2)], stage.client(B, "mind", 600)
    for one in (*mine, other):
        one.known()
    status, answer = agent.api.order("terminate-each", job="one", dry_run=True)
    assert (status, {one["pid"] for one in answer["ending"]}) == (200, {one.pid for one in mine})
    assert [one.rc for one in mine] == [None, None]
    for _ in range(5):
        agent.api.order("terminate-each", job="one")
    assert all(one.ended() is not None for one in mine)
    ordered = [one["pid"] for one in stage.records() if one["kind"] == "client.end_ordered"]
    assert sorted(ordered) == sorted(one.pid for one in mine), "once each, however often it is asked"
    cgroup = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
    assert agent.api.order("terminate-each", job="none")[1]["ending"] == []
    assert other.rc is None
    found = agent.api.order("terminate-each", cgroup=cgroup)[1]["ending"]
    assert [one["pid"] for one in found] == [other.pid]
    assert other.ended() is not None


def test_which_ones_must_be_said(stage: Stage) -> None:
    agent = stage.with_agent("")
    for body in ({}, {"mine": False}, {"job": "x", "mine": True}):
        status, answer = agent.api.order("terminate-each", **body)
        assert (status, "one of" in answer["hint"]) == (400, True), body
    for pattern in ("*a" * 300, "a[b]", "a/b"):
        status, answer = agent.api.order("terminate-each", cgroup=pattern)
        assert (status, answer["where"]) == (400, "cgroup"), pattern


def test_a_user_ends_the_own_ones_alone_and_a_program_those_below_it(stage: Stage) -> None:
    agent = stage.with_agent("", extra='sharing = "one-server"')
    mine, other = stage.client(A, "mind", 600), stage.client(B, "mind", 600)
    mine.known(), other.known()
    pid = os.fork()
    if not pid:  # a child that asks as that user
        os.setgid(A)
        os.setuid(A)
        status = 1
        try:
            below = agent.api.order("terminate-each", below=True, dry_run=True)
            asked = agent.api.order("terminate-each", cgroup="*", dry_run=True)
            mine_ = agent.api.order("terminate-each", mine=True, dry_run=True)
            pids = [[one["pid"] for one in found["ending"]] for _, found in (below, asked, mine_)]
            status = 0 if pids[0] == [] and other.pid not in (*pids[1], *pids[2]) and pids[2] == [mine.pid] else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert other.rc is None


def test_ended_now_they_do_not_wait_for_a_hook_that_hangs(stage: Stage) -> None:
    """The second order did nothing: a job that was cancelled lived on until the deadline of the hook."""
    hook = stage.place / "hook"
    hook.write_text("#!/bin/sh\nexec sleep 600\n")
    hook.chmod(0o755)
    agent = stage.with_agent(f"[hooks]\npre_terminate = '{hook}'\ntimeout = '9m'\n")
    assert agent.api.order("lease", uid=A, active_threads="50%", until="1h", name="one")[0] == 200
    client = stage.client(A, "mind", 600)
    client.known()
    agent.api.order("terminate-each", job="one")
    stage.record("action", action="RunHook")
    assert agent.api.order("terminate-each", job="one", now=True)[0] == 200
    assert client.ended() is not None
