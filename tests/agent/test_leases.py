"""A lease that was given counts from its answer on: the job starts right after it."""

from __future__ import annotations

import os
import re
import signal

from mpsagent_sim import gpu
from tests.agent.stage import A, B, Stage

ALL = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}


def test_the_answer_waits_for_the_gate_and_not_for_ever(stage: Stage) -> None:
    """With a gate that is stopped it says that the lease is not in force yet; else it is."""
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n")
    client = stage.client(A, "sleep", 600)
    client.working()
    gate, body = stage.gate(agent), {"uid": A, "active_threads": "20%", "until": "10m"}
    os.kill(gate, signal.SIGSTOP)
    try:
        status, given = agent.api.order("lease", **body)
    finally:
        os.kill(gate, signal.SIGCONT)
    assert (status, given["in_force"]) == (200, False)
    stage.until(lambda: agent.api.status()["gate"]["in_force"], "the gate goes by the lease")
    assert agent.api.order("delete-lease", number=given["id"])[0] == 200
    status, given = agent.api.order("lease", **body)
    assert (status, given["in_force"]) == (200, True)
    assert agent.api.status()["gate"]["in_force"]


def test_a_job_never_has_more_than_its_total_whatever_it_exports(stage: Stage) -> None:
    """Also when agent and gate are killed, and when the lease is given again; and who leaves makes room."""
    agent = stage.with_agent("[limits]\nactive_threads = '20%'\n", extra='sharing = "one-server"\n')
    body = {"uid": A, "total_active_threads": "50%", "until": "10m", "name": "job"}
    assert agent.api.order("lease", **body)[0] == 200
    crowd = {one.pid: one for one in (stage.client(A, "sleep", 600, **ALL) for _ in range(4))}

    def at_work() -> list[int]:
        """Once the others wait for the job's total, and for nothing else."""
        stage.until(
            lambda: "job job's total is in use: 40 of 50 %" in str(agent.api.get("/v1/queue")["queue"]),
            "two processes have the job's total",
        )
        rows = agent.api.get("/v1/clients")["clients"]
        return [one["pid"] for one in rows if one["state"] != "waiting"]

    first = at_work()
    assert len(first) == 2
    given = [crowd[pid].seen() for pid in first if crowd[pid].working()]
    assert [one and one[0] for one in given] == [gpu.multiprocessors(20)] * 2
    os.kill(stage.gate(agent), signal.SIGKILL)
    stage.killed(agent)
    agent = stage.again()
    assert at_work() == first
    assert agent.api.order("lease", **body)[0] == 200
    assert at_work() == first
    crowd[first[0]].kill()
    stage.until(lambda: first[0] not in at_work() and len(at_work()) == 2, "another one has its place")
    there = stage.cli(agent, "policy", "explain", str(A), "--cgroup", "/anywhere")[1]
    assert "cgroup: each process of job job has 20 %, no memory limit\n" in there, there
    assert re.search(r"cgroup\.total_active_threads +50% +lease 2\n", there), there
    elsewhere = stage.cli(agent, "policy", "explain", str(B), "--cgroup", "/anywhere")[1]
    assert "no section and no lease is for it" in elsewhere
    (listed,) = agent.api.get("/v1/leases")["leases"]
    assert (listed["total_active_threads"], len(listed["clients"])) == ("50%", 2)
