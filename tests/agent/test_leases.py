"""A lease that was given counts from its answer on: the job starts right after it."""

from __future__ import annotations

import os
import signal

from tests.agent.stage import A, Stage


def test_the_answer_waits_for_the_gate_and_not_for_ever(stage: Stage) -> None:
    """With a gate that is stopped it says that the lease is not in force yet; else it is."""
    agent = stage.with_agent("[limits]\nthreads = 50\n")
    client = stage.client(A, "sleep", 600)
    client.working()
    gate, body = stage.gate(agent), {"uid": A, "threads": 20, "until": "10m"}
    os.kill(gate, signal.SIGSTOP)
    try:
        status, given = agent.api.order("lease", **body)
    finally:
        os.kill(gate, signal.SIGCONT)
    assert (status, given["in_force"]) == (200, False)
    stage.until(lambda: agent.api.status()["gate"]["in_force"], "the gate goes by the lease")
    assert agent.api.order("end-lease", number=given["id"])[0] == 200
    status, given = agent.api.order("lease", **body)
    assert (status, given["in_force"]) == (200, True)
    assert agent.api.status()["gate"]["in_force"]
