"""What a running agent keeps: the same in report, history and metrics, and nothing twice after a SIGKILL."""

from __future__ import annotations

import json
import pwd
from typing import Any

import pytest

from tests.agent.stage import A, Agent, B, Stage

pytestmark = pytest.mark.root


def report(stage: Stage, agent: Agent) -> dict[int, dict[str, Any]]:
    status, text = stage.cli(agent, "report", "--json")
    assert status == 0, text
    return {row["uid"]: row for row in json.loads(text)["rows"]}


def test_a_turn_is_in_the_report_the_history_and_the_metrics(stage: Stage) -> None:
    """Two users, one after the other, and an agent that is killed between: each counts once."""
    agent = stage.with_agent()
    first = stage.client(A, "sleep", 600)
    first.working()
    second = stage.client(B, "sleep", 600)
    stage.waiting(second)
    stage.record("client.connected", pid=first.pid)
    at_work = report(stage, agent)[A]["gpu"]
    stage.until(lambda: report(stage, agent)[A]["gpu"] > at_work, "what is under way counts")
    stage.killed(agent)
    agent = stage.again()
    assert report(stage, agent)[A]["clients"] == 1
    series = f'user="{name(A)}"}}'
    stage.until(lambda: f"{series} 1.0" in stage.cli(agent, "metrics")[1], "the metrics have who was there before")
    first.kill()
    second.working()
    ended = stage.record("client.ended", pid=first.pid)
    stage.record("client.connected", pid=second.pid)
    rows = report(stage, agent)
    assert rows[A]["gpu"] == pytest.approx(ended["seconds"], abs=1.0)
    assert (rows[A]["clients"], rows[B]["clients"]) == (1, 1)
    assert rows[B]["waited"] > at_work
    assert rows[B]["longest"] == rows[B]["waited"]

    (one,) = agent.api.get(f"/v1/sessions?pid={first.pid}")["sessions"]
    assert (one["kind"], one["uid"], one["worked"]) == ("client", A, pytest.approx(ended["seconds"], abs=1.0))
    (two,) = agent.api.get(f"/v1/sessions?user={B}&kind=client")["sessions"]
    assert (two["pid"], two["ended"], two["waited"]) == (second.pid, None, pytest.approx(rows[B]["waited"], abs=0.01))

    status, text = stage.cli(agent, "events", "--pid", str(first.pid), "--json")
    events = [json.loads(line) for line in text.splitlines()]
    assert status == 0
    assert [one["kind"] for one in events if one["kind"].startswith("client.") and one["kind"] != "client.used"] == [
        "client.waiting", "client.connected", "client.ended",
    ]  # fmt: skip
    text = stage.cli(agent, "events", str(B), "--kind", "turn.", "--json")[1]
    assert [json.loads(line)["kind"] for line in text.splitlines()] == ["turn.began"]
    assert "nothing on record" in stage.cli(agent, "events", "--until", "2020-01-01")[1]

    text = stage.cli(agent, "metrics")[1]
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    instance = next(name for name in samples if name.startswith("mpsagent_control_up")).partition("{")[2][:-1]
    assert float(samples[f"mpsagent_user_changes_total{{{instance}}}"]) == 0, "this agent has seen one turn begin"
    assert float(samples[f"mpsagent_wait_seconds_count{{{instance}}}"]) == 1
    assert float(samples[f"mpsagent_handover_seconds_count{{{instance}}}"]) == 1
    assert float(samples[f'mpsagent_clients{{{instance},user="{name(B)}"}}']) == 1
    assert float(samples[f'mpsagent_gpu_seconds_total{{{instance},user="{name(A)}"}}']) > 0


def name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
