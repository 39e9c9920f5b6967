"""What the agent finds when it comes: daemons of others, rotated logs, what the agent before it had begun."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.scenes.stage import A, Agent, B, Stage

POLICY = f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n[user.{B}]\nthreads = 20\n'


def killed(stage: Stage, agent: Agent) -> None:
    stage.stop_agent(agent, signal.SIGKILL)


def again(stage: Stage) -> Agent:
    agent = stage.start_agent()
    stage.answering(agent)
    return agent


def exact(stage: Stage, uid: int, percent: float) -> None:
    """A new first client gets what it is due."""
    client = stage.client(uid)
    assert client.ended() == 0
    assert client.inside(percent), client.text()


def test_a_daemon_started_by_hand_is_taken_over_without_a_scratch(stage: Stage) -> None:
    """Whoever installs the agent on a node that works already; the open directory is closed to others."""
    stage.policy(POLICY)
    stage.rig.pipe.mkdir(exist_ok=True)
    stage.rig.pipe.chmod(0o777)
    stage.without_agent()
    client = stage.client(A, "sleep", 4)
    client.working()
    agent = again(stage)
    assert agent.found("control.adopted")
    stage.until(lambda: len(agent.api.get("/v1/clients")["clients"]) == 1, "the client is known")
    assert stage.rig.pipe.stat().st_mode & 0o777 == 0o755
    assert agent.api.status()["limits"]["drifted"], "it runs without limits, and that is said"
    assert client.ended() == 0
    exact(stage, B, 20)
    stage.until(lambda: not agent.api.problems(), "healthy once that server has gone")


def test_a_daemon_that_logs_elsewhere_is_refused_with_the_way_out(stage: Stage) -> None:
    """Following the wrong files would mean seeing nobody, without a word; its door stays as it is."""
    stage.policy(POLICY)
    elsewhere = stage.place / "elsewhere"
    elsewhere.mkdir()
    environment = {**stage.rig.environment(), "CUDA_MPS_LOG_DIRECTORY": str(elsewhere)}
    subprocess.run([stage.backend.control, "-d"], env=environment, check=True, timeout=30)
    stage.rig.pipe.chmod(0o755)
    agent = again(stage)
    stage.until(lambda: any("writes its logs to" in one for one in agent.api.problems()), "it says so")
    problem = next(one for one in agent.api.problems() if "writes its logs to" in one)
    assert f"writes its logs to {elsewhere}" in problem
    assert "quit -t 30" in problem
    time.sleep(2)
    assert stage.rig.pipe.stat().st_mode & 0o777 == 0o755, "shutting it out would send its clients outside MPS"


def test_after_a_rotation_the_next_agent_still_holds_the_limits(stage: Stage) -> None:
    """copytruncate removes the daemon's first line: its process and one question have to be enough."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 8)
    holder.working()
    killed(stage, agent)
    for name in ("control", "server"):
        os.truncate(stage.rig.log / f"{name}.log", 0)
    agent = again(stage)
    stage.until(lambda: agent.api.get("/v1/clients")["clients"], "the client is found by asking MPS")
    (server,) = agent.api.get("/v1/servers")["servers"]
    assert (server["uid"], server["limits"]["threads"], server["verified"]) == (A, 40.0, True)
    assert holder.ended() == 0
    exact(stage, B, 20)
    assert agent.api.problems() == []


def test_the_lines_that_nobody_read_are_on_record_once(stage: Stage) -> None:
    """A night without an agent, and no gap in what is known of it."""
    agent = stage.with_agent(POLICY)
    killed(stage, agent)
    for uid in (A, B, A):
        assert stage.client(uid).ended() == 0
    stage.rig.drain()
    ready = sum("Ready" in line for line in stage.rig.logs["control"].lines)
    agent = again(stage)
    assert len(agent.found("server.ready")) == ready
    killed(stage, agent)
    agent = again(stage)
    assert len(agent.found("server.ready")) == ready
    numbers = [event["cursor"] for event in agent.news()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_drain_outlives_the_agent(stage: Stage) -> None:
    """An upgrade in the middle of maintenance must not let users back in."""
    agent = stage.with_agent(POLICY)
    assert stage.cli(agent, "drain")[0] == 0
    killed(stage, agent)
    agent = again(stage)
    assert agent.api.status()["drain"]["draining"]
    assert stage.cli(agent, "resume")[0] == 0
    killed(stage, agent)
    agent = again(stage)
    assert not agent.api.status()["drain"]["draining"]
    stage.parked(agent)


def test_when_the_agent_dies_the_defaults_go_back_to_the_floor(stage: Stage) -> None:
    """It dies after it has armed for A: the next user's server must not start with what was meant for A."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(B, "sleep", 3)
    holder.working()
    waiting = stage.client(A, "query")
    waiting.queued()
    stage.until(lambda: agent.found("action.done", action="SetDefaults", uid=A), "it has armed for A")
    killed(stage, agent)
    said = []

    def at_the_floor() -> bool:
        said.append(stage.rig.ctl("get_default_active_thread_percentage").out.strip())
        return said[-1] == "10.0"

    stage.until(at_the_floor, "the floor is set by what the agent left behind", 5)
    assert waiting.ended() == 0
    assert waiting.inside(10)


def test_a_daemon_replaced_by_hand_is_followed(stage: Stage) -> None:
    """An administrator restarts MPS under the agent."""
    agent = stage.with_agent(POLICY)
    old = agent.api.status()["control"]["pid"]
    assert stage.rig.ctl("quit").rc == 0
    stage.rig.start("-d")
    stage.until(lambda: (agent.api.status()["control"] or {}).get("pid") not in (None, old), "another daemon")
    stage.parked(agent)
    exact(stage, A, 40)
    assert agent.api.problems() == []


def test_another_daemon_in_the_same_logs_does_not_confuse(stage: Stage) -> None:
    """Somebody's second MPS with the default log directory: its start ends nothing of ours."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 5)
    holder.working()
    environment = {**stage.rig.environment(), "CUDA_MPS_PIPE_DIRECTORY": str(stage.place / "pipe2")}
    subprocess.run([stage.backend.control, "-d"], env=environment, check=True, timeout=30)
    stage.until(lambda: any("same log files" in one for one in agent.api.problems()), "it is said")
    status = agent.api.status()
    assert status["clients"] == 1
    assert status["control"]["socket"].startswith(str(stage.rig.pipe))
    assert holder.ended() == 0
    exact(stage, B, 20)


def test_without_its_directory_a_daemon_is_replaced_when_nobody_works_any_more(stage: Stage) -> None:
    """Somebody cleans /tmp: nobody reaches MPS, so new programs run outside it; those at work keep their work."""
    agent = stage.with_agent(POLICY + '[hang]\ncontrol = "2s"\n')
    holder = stage.client(A, "sleep", 6)
    holder.working()
    old = agent.api.status()["control"]["pid"]
    shutil.rmtree(stage.rig.pipe)
    stage.until(lambda: any("has gone" in one for one in agent.api.problems()), "it is said")
    assert holder.ended() == 0, holder.text()
    stage.until(lambda: (agent.api.status()["control"] or {}).get("pid") not in (None, old), "MPS is started anew")
    stage.parked(agent)
    exact(stage, B, 20)
    stage.until(lambda: not agent.api.problems(), "healthy again")


def test_without_its_logs_it_says_so_and_users_get_the_floor(stage: Stage) -> None:
    """MPS never opens them again; an agent that comes then cannot see who waits."""
    agent = stage.with_agent(POLICY)
    killed(stage, agent)
    for path in Path(stage.rig.log).iterdir():
        path.unlink()
    agent = again(stage)
    stage.until(lambda: any("control.log has gone" in one for one in agent.api.problems()), "it is said")
    client = stage.client(A)
    assert client.ended() == 0
    assert client.inside(10), client.text()
    assert stage.cli(agent, "status")[0] == 1
