"""What an agent finds when it comes: one before it, its gate and daemon, rotated logs, daemons of others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.agent.stage import A, B, C, Stage, alive
from tests.conformance import rig as rigs

POLICY = (
    f'[limits]\nactive_threads = "10%"\nmemory_limit = "2G"\n[user.{A}]\nactive_threads = "40%"\n[user.{B}]\n'
    'active_threads = "20%"\n'
)


@pytest.mark.parametrize("how", ["reload", "restart"])
def test_limits_that_are_enforced_no_more_are_lifted(stage: Stage, how: str) -> None:
    """Report mode in the middle of the day. The daemon kept the limits of the last user, for all users, and the status
    reported that nothing was enforced."""
    agent = stage.with_agent(POLICY)
    stage.exact(B, 20)
    stage.policy(f"mode = 'report'\n{POLICY}")
    if how == "reload":
        assert stage.cli(agent, "reload")[0] == 0
    else:
        stage.killed(agent)
        agent = stage.again()
    stage.exact(B, 100)
    stage.exact(C, 100)
    stage.no_problem(agent)
    status = agent.api.status()
    assert (status["limits"]["drifted"], "report mode" in str(status["not_guaranteed"])) == ([], True)


def test_after_a_rotation_the_next_agent_still_knows_everything(stage: Stage) -> None:
    """copytruncate removes the daemon's first line: its process, its gate and one question have to be enough."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 600)
    holder.working()
    stage.killed(agent)
    for name in ("control", "server"):
        os.truncate(stage.rig.log / f"{name}.log", 0)
    agent = stage.again()
    stage.until(lambda: agent.api.status()["servers"], "the server is found by asking MPS")
    (client,) = agent.api.get("/v1/clients")["clients"]
    assert (client["pid"], client["limits"]["threads"]) == (holder.pid, 40.0)
    assert holder.rc is None
    holder.kill()
    stage.exact(B, 20)
    stage.no_problem(agent)


def test_a_daemon_of_others_on_the_public_directory_is_left_until_it_goes(stage: Stage) -> None:
    """Whoever installs the agent on a node that works already: said at once, with the way out; its place is taken when
    it has gone, and its clients are not touched."""
    stage.policy(POLICY)
    stage.without_agent()
    theirs = int((stage.rig.pipe / "nvidia-cuda-mps-control.pid").read_text())
    client = stage.client(C, "sleep", 600)
    client.working()
    agent = stage.again(ready=False)
    problem = stage.problem(agent, "not by the gate")
    assert f"process {theirs} of root" in problem
    assert "echo quit | CUDA_MPS_PIPE_DIRECTORY=" in problem
    assert client.rc is None, "it was not disturbed"
    client.kill()
    assert alive(theirs)
    assert stage.rig.ctl("quit").rc == 0
    stage.until(lambda: not stage.waits_for(agent), "the agent takes the place")
    stage.exact(B, 20)
    stage.no_problem(agent)


def test_a_daemon_that_serves_other_gpus_than_the_policy_says_is_named_while_it_runs(stage: Stage) -> None:
    """Seen: "which runs already, serves GPU-…" and not what is wrong with that, also in a drain, when it had ended."""
    device = json.loads(Path(stage.backend.control).with_name("devices.json").read_text())[0]["uuid"]
    agent = stage.with_agent(POLICY)
    stage.killed(agent)
    stage.policy(POLICY, extra=f'devices = ["{device}"]')
    agent = stage.again()
    assert f"serves all GPUs, and the policy says {device}" in stage.problem(agent, "which runs already")
    assert stage.cli(agent, "drain")[0] == 0
    stage.no_problem(agent)


def test_without_its_logs_it_says_so_and_serves_exactly_all_the_same(stage: Stage) -> None:
    """MPS never opens them again. Who comes and with which limits is the gate's to know."""
    agent = stage.with_agent(POLICY)
    stage.killed(agent)
    for path in Path(stage.rig.log).iterdir():
        path.unlink()
    agent = stage.again()
    stage.problem(agent, "control.log has gone")
    stage.exact(A, 40)
    assert stage.cli(agent, "status")[0] == 1


def test_a_keeper_that_dies_is_said_and_its_gate_goes_on(stage: Stage) -> None:
    """The gate itself still serves; both are new when it has gone too."""
    agent = stage.with_agent(POLICY)
    keeper, gate = stage.keeper(agent), stage.gate(agent)
    holder = stage.client(A, "sleep", 600)
    holder.working()
    waiting = stage.client(B)
    stage.waiting(waiting)
    rigs.send_signal(keeper, signal.SIGKILL)
    stage.problem(agent, "without its parent process")
    assert stage.records("gate.lost") == [], "the look who is there took the agent's place at the gate"
    stage.killed(agent)
    agent = stage.again()
    stage.problem(agent, "without its parent process")
    assert holder.rc is None
    holder.kill()
    assert waiting.ended() == 0
    assert waiting.inside(20), waiting.text()
    rigs.send_signal(gate, signal.SIGKILL)
    stage.until(lambda: agent.api.status()["gate"]["pid"] not in (None, gate), "another gate")
    stage.until(lambda: not stage.waits_for(agent), "it is ready")
    stage.exact(A, 40)
    stage.no_problem(agent)
    assert stage.keeper(agent) != keeper
