"""Metrics over TCP, as packaged: off until asked for, on loopback, without rights; the history behind them is kept."""

from __future__ import annotations

import pytest

from tests.booted.machine import Machine
from tests.booted.service import ALICE, Worker, api, until
from tests.scenes.containers import why_not_mapped

ADDRESS = "http://127.0.0.1:9478"


def test_the_unit_serves_metrics_and_has_no_rights(running: Machine) -> None:
    """Its sandbox leaves it the agent's socket and loopback; the agent itself has no network."""
    if why := why_not_mapped():  # PrivateUsers=
        pytest.skip(why)
    assert running.systemctl("is-enabled", "mpsagent-metrics.service", check=False) == "disabled"
    Worker(running, ALICE).finish()
    running.run("ip", "link", "set", "lo", "up", check=False)
    running.systemctl("start", "mpsagent-metrics.service")
    until("metrics", lambda: "mpsagent_up 1" in fetched(running, "/metrics"))
    assert "mpsagent_build_info{" in fetched(running, "/metrics")
    assert "only GET /metrics" in fetched(running, "/v1/status")
    pid = running.show("mpsagent-metrics.service", "MainPID")["MainPID"]
    status = running.run("cat", f"/proc/{pid}/status").stdout
    assert "CapEff:\t0000000000000000" in status
    assert "Uid:\t0" not in status


def test_history_and_its_sums_outlive_a_boot(running: Machine) -> None:
    """In the place and with the mode that the docs say."""
    Worker(running, ALICE).finish()
    until("an end on record", lambda: api(running, "/v1/events?kind=client.ended")["events"])
    until("what it has used, too", lambda: api(running, "/v1/events?kind=client.used")["events"])
    before = api(running, "/v1/report")["rows"]
    assert before[0]["clients"] == 1
    mode = running.run("stat", "-c", "%a %U", "/var/lib/mpsagent-api/history.db").stdout.split()
    assert mode == ["600", "mpsagent-api"]
    running.reboot()
    until("the agent again", lambda: api(running, "/v1/report")["rows"] == before)


def fetched(node: Machine, path: str) -> str:
    return node.run("curl", "-sS", "-m", "5", f"{ADDRESS}{path}", check=False).stdout
