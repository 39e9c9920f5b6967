"""What a control daemon leaves behind that is killed: servers that stand, and clients that do not notice (recording 12,
H5 and H6)."""

from __future__ import annotations

import os
import signal

import pytest

from tests.agent.stage import A, Agent, B, Stage, alive

LONG = 600


def server_of(stage: Stage, agent: Agent) -> int:
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [one["pid"] for one in agent.api.status()["servers"]]
        return bool(found)

    stage.until(is_there, "a server")
    return found[0]


def test_a_server_that_was_stopped_before_its_daemon_was_killed_is_ended(stage: Stage) -> None:
    """It does not exit with its daemon, and kept its memory for good."""
    agent = stage.with_agent()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    server = server_of(stage, agent)
    os.kill(server, signal.SIGSTOP)
    os.kill(stage.control(agent), signal.SIGKILL)
    stage.until(lambda: not alive(server), "the server has ended")
    stage.exact(B, 100)


def test_a_server_that_was_stopped_is_ended_when_its_daemon_and_the_agent_have_died_together(stage: Stage) -> None:
    """Nobody has held it since; systemd, which ends a unit's processes, is not there."""
    agent = stage.with_agent()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    server, control = server_of(stage, agent), stage.control(agent)
    os.kill(server, signal.SIGSTOP)
    stage.killed(agent)
    os.kill(control, signal.SIGKILL)
    stage.again()
    stage.until(lambda: not alive(server), "the server has ended")
    stage.exact(B, 100)


@pytest.mark.parametrize("server", ["own", "shared"])
def test_clients_of_a_daemon_that_was_killed_with_the_agent_do_not_hold_the_gpu(stage: Stage, server: str) -> None:
    """The next user is served while the client lives on."""
    stage.policy("", extra=f'server = "{server}"')
    agent = stage.again()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    control = stage.control(agent)
    stage.killed(agent)
    os.kill(control, signal.SIGKILL)
    stage.again()
    bob = stage.client(B, "sleep", LONG)
    stage.record("client.connected", pid=bob.pid)
    assert alive(alice.pid)
