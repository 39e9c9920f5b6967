"""What users make of the GPU, by the counters of the simulated one: from the helper's answer to the report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpsagent.agent.clients import CPU_STEP, ClientProcesses
from mpsagent.mps.work import Work
from mpsagent.system.devices import simulated_work
from tests.agent.stage import A, Agent, B, Stage

pytestmark = pytest.mark.root


def counters(stage: Stage) -> Work:
    (work,) = simulated_work(str(Path(stage.backend.control).with_name("devices.json"))).values()
    return work


def report(agent: Agent) -> dict[int, dict[str, Any]]:
    return {row["uid"]: row for row in agent.api.get("/v1/report?by=user")["rows"]}


def ended(stage: Stage, agent: Agent, count: int) -> list[dict[str, Any]]:
    """The sessions of so many processes, when it is known what these have used."""

    def known() -> list[dict[str, Any]]:
        found = agent.api.get("/v1/sessions?kind=client")["sessions"]
        return [one for one in found if one["ended"] and len(stage.records("client.used", pid=one["pid"], over=True))]

    stage.until(lambda: len(known()) == count, f"what {count} processes have used is on record")
    return known()


def at_work(stage: Stage) -> float:
    """Lets who is there work for some seconds; joules of the GPU meanwhile."""
    begun = counters(stage).energy
    stage.until(lambda: counters(stage).energy > begun + 1000, "the GPU has worked for a while")
    return counters(stage).energy - begun


def test_two_users_in_turns_of_whom_one_does_nothing(stage: Stage) -> None:
    """Each has what the GPU did in the own turn, and both together what it did."""
    agent = stage.with_agent()
    before = counters(stage)
    alice = stage.client(A, "duty", 0.8, 600)
    alice.known()
    hers = at_work(stage)  # the last look at the counters may be late, so that a part of it is nobody's
    assert agent.api.order("terminate", pid=alice.pid)[0] == 200
    bob = stage.client(B, "duty", 0, 2)
    assert None not in (alice.ended(), bob.ended())
    sessions = {one["uid"]: one for one in ended(stage, agent, 2)}
    after, rows = counters(stage), report(agent)
    assert rows[A]["utilization"] > 0.3
    assert rows[B]["utilization"] < 0.1
    assert sessions[A]["utilization"] == pytest.approx(rows[A]["utilization"], abs=0.001)
    assert not rows[A]["shared"]
    assert rows[A]["busy"] + rows[B]["busy"] < 1.02 * (after.busy - before.busy)
    assert (
        0.5 * hers < rows[A]["energy"] < rows[A]["energy"] + rows[B]["energy"] < 1.02 * (after.energy - before.energy)
    )
    text = agent.api.text("/metrics")
    assert f'mpsagent_energy_joules_total{{job="",mps_instance="scene",namespace="",pod="",user="{A}"}}' in text
    assert "UTIL" in stage.cli(agent, "report")[1]


def test_an_agent_that_is_stopped_leaves_what_it_has_counted(stage: Stage) -> None:
    """The next one goes on: nothing of an hour's work is lost with a restart, and nothing counts twice."""
    agent = stage.with_agent()
    alice = stage.client(A, "duty", 0.5, 600)
    alice.known()
    stage.until(lambda: report(agent).get(A, {}).get("energy"), "something has been counted")
    stage.stop_agent(agent)
    (first,) = stage.records("client.used")
    assert (first["pid"], first["over"]) == (alice.pid, False)
    agent = stage.again()
    stage.until(lambda: report(agent)[A]["energy"] > first["energy"] + 1, "it is counted on")
    begun = counters(stage)
    alice.kill()
    (session,) = ended(stage, agent, 1)
    told = stage.records("client.used")
    assert session["energy"] == pytest.approx(sum(one["energy"] for one in told), abs=0.1)
    assert session["energy"] < counters(stage).energy
    assert begun.energy > first["energy"]


def test_the_housekeeping_of_an_idle_interpreter_is_no_work() -> None:
    """A notebook that does nothing uses some milliseconds of CPU time: by these no client were ever idle."""
    used, clients = (
        iter([5.0, 5.005, 5.012, 5.012 + 2 * CPU_STEP, 5.06]),
        ClientProcesses(lambda pid, start, lives: None),
    )
    process = SimpleNamespace(pid=70, started=7, cpu_seconds=lambda: next(used), close=lambda: None)
    clients._clients[70] = process  # type: ignore[assignment]
    since = [clients.idle_since([70], now)[70] for now in (10.0, 20.0, 30.0, 40.0, 50.0)]
    assert since == [10.0, 10.0, 10.0, 40.0, 40.0]
