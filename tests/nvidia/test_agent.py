"""The whole agent beside NVIDIA's own control daemons of three drivers, without a GPU: servers start, and fail."""

from __future__ import annotations

import pytest

from tests.agent.stage import Stage
from tests.nvidia import abilities
from tests.nvidia.daemon import USER, client, result
from tests.nvidia.fetch import Driver
from tests.nvidia.page import saw

pytestmark = pytest.mark.root

NO_DEVICE = "no CUDA-capable device is detected"
REFUSED = 805


def test_it_starts_is_healthy_and_finds_its_daemon_again(stage: Stage, nvidia: Driver) -> None:
    """470 and 535 write no pid file. One start is enough, and the next agent takes the same daemon."""
    agent = stage.with_agent()
    stage.no_problem(agent)
    able = abilities.able(nvidia.version)
    assert (stage.hidden() / "nvidia-cuda-mps-control.pid").exists() is ("pid_file" in able)
    assert [one["ok"] for one in stage.records("action.done", action="StartControl")] == [True]
    files = "" if (stage.hidden() / "nvidia-cuda-mps-control.pid").exists() else ", without a pid file"
    saw(nvidia, "start, healthy, one start of the daemon", f"works{files}")
    daemon = stage.control(agent)
    stage.killed(agent)
    assert stage.control(stage.again()) == daemon
    saw(nvidia, "the next agent takes the same daemon", "works")


def test_servers_that_do_not_start(stage: Stage, nvidia: Driver) -> None:
    """MPS tries six times for who waits and drops the client, at once and for ever. Here: a few rounds with pauses,
    then who waits is turned away; the reason stands in `status`, in the queue and in the refusal."""
    agent = stage.with_agent("[limits]\nactive_threads = '20%'\n")
    waiting = client(nvidia, stage.rig.pipe, USER)
    stage.record("client.waiting", pid=waiting.pid, uid=USER)
    stage.until(
        lambda: any(NO_DEVICE in one["why"] for one in agent.api.get("/v1/queue")["queue"]), "who waits is told why"
    )
    assert waiting.poll() is None, "it is held meanwhile"
    assert NO_DEVICE in stage.problem(agent, "servers do not start")
    assert NO_DEVICE in stage.record("client.refused", pid=waiting.pid)["why"]
    assert result(waiting) == REFUSED
    assert "set_default_active_thread_percentage 20" in log(stage), "its limits were set"
    first = starts(stage)
    assert first == 18, "three rounds of MPS's six"
    saw(nvidia, "a client's threads, set before it is handed over", "works")
    words = f"{first} starts in {first // 6} rounds with pauses, then turned away with the reason"
    saw(nvidia, "servers that do not start", words)
    code, text = stage.cli(agent, "status")
    assert code == 1
    assert NO_DEVICE in " ".join(text.split())
    late = client(nvidia, stage.rig.pipe, USER + 1)
    assert result(late) == REFUSED, "who comes now hears it at once"
    assert starts(stage) == 18
    saw(nvidia, "who comes after that", "turned away at once, no start")
    unknown = agent.api.status()["unknown_lines"]
    saw(nvidia, "lines of the logs of these runs that were not understood", f"{unknown}")


def log(stage: Stage) -> str:
    return (stage.rig.log / "control.log").read_text()


def starts(stage: Stage) -> int:
    return log(stage).count("Starting new server ")


def test_memory_limits(stage: Stage, nvidia: Driver) -> None:
    """470 has none: who has one by the policy is turned away, and it is said why. Who has none is let in."""
    agent = stage.with_agent(f'[limits]\nmemory_limit = "100%"\n[user.{USER}]\nmemory_limit = "2G"\n')
    waiting = client(nvidia, stage.rig.pipe, USER)
    if "memory_limits" in abilities.able(nvidia.version):
        stage.until(lambda: starts(stage), "it is handed over")
        assert "set_default_device_pinned_mem_limit 0 2G" in log(stage) or "0 2048M" in log(stage)
        assert agent.api.status()["limits"]["unconfirmed"] == []
        saw(nvidia, "a client with one", "set and confirmed")
    else:
        assert result(waiting) == REFUSED
        assert "does not have" in stage.record("client.refused", pid=waiting.pid)["why"]
        assert "does not have" in stage.problem(agent, "does not confirm limits")
        assert starts(stage) == 0
        saw(nvidia, "a client with one", "turned away, and the reason is said")
    waiting.kill()
    waiting.communicate()
    stage.until(lambda: not agent.api.get("/v1/queue")["queue"], "it has left")
    before = starts(stage)
    other = client(nvidia, stage.rig.pipe, USER + 1)
    stage.until(lambda: starts(stage) > before, "the other user is handed over")
    saw(nvidia, "a client without a memory limit", "is handed over")
    other.kill()
    other.communicate()


def test_one_server_for_all_users(stage: Stage, nvidia: Driver) -> None:
    """These drivers cannot: there is a server for each turn instead, and that is said."""
    stage.policy("", extra='server_scope = "all"')
    agent = stage.again()
    stage.problem(agent, "does not know --multiuser-server")
    saw(nvidia, '`server_scope = "all"`', "a server for each turn, and that is said")
