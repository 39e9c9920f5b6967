"""The API of a real agent, asked by its own OpenAPI document, rightly and wrongly: no fault, no growth."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.stage import A, Stage
from tests.interfaces.openapi_fuzz import Fuzz

REQUESTS = int(os.environ.get("MPSAGENT_FUZZ_REQUESTS", "3000"))
SEED = int(os.environ.get("MPSAGENT_FUZZ_SEED", "1"))
LEAK = 100
"""Bytes of each request that may stay, beside what is bounded."""
BOUNDED = 16 << 20
"""What the history's and Python's own stores may take."""


def memory(pid: int) -> int:
    """Resident bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(3600 if REQUESTS > 10_000 else 600)
def test_no_request_is_a_fault_of_ours_and_nothing_stays(stage: Stage) -> None:
    """While a client works and another waits, so that the answers have something in them."""
    agent = stage.with_agent("[limits]\nthreads = 50\n")
    client = stage.client(A, "sleep", 3600)
    client.working()
    fuzz = Fuzz(stage.place / "agent.sock", SEED, acts=4)
    fuzz.run(REQUESTS // 10)
    files, before = len(os.listdir(f"/proc/{agent.pid}/fd")), memory(agent.pid)
    fuzz.run(REQUESTS - REQUESTS // 10)
    grown = memory(agent.pid) - before
    print(f"{sum(fuzz.statuses.values())} requests, {dict(fuzz.statuses)}, grown by {grown} bytes, {fuzz.called}")
    assert grown < BOUNDED + LEAK * REQUESTS
    assert len(os.listdir(f"/proc/{agent.pid}/fd")) < files + 20
    assert fuzz.statuses[200] > REQUESTS / 5
    assert {400, 404, 405} <= set(fuzz.statuses)
    assert "fault in mpsagent" not in agent.log()
    assert agent.api.ask("GET", "/v1/status")[0] == 200
