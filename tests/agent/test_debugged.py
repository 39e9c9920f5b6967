"""A program under cuda-gdb says that it is debugged. If the gate closed it, it ran without MPS (3 of 3 on an H100)."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.agent.stage import A, Agent, B, Client, Stage

SHARING = {
    "apart": 'sharing = "per-user"\n',
    "together": 'sharing = "one-server"\nserver_scope = "all"\n',
    "turns": 'sharing = "turns"\nserver_scope = "user"\n',
}


def row(agent: Agent, uid: int) -> dict[str, Any]:
    return next((dict(one) for one in agent.api.get("/v1/queue")["queue"] if one["uid"] == uid), {})


def is_held(stage: Stage, agent: Agent, client: Client) -> None:
    words = f"process {client.pid} is being debugged"
    stage.until(lambda: words in str(row(agent, A)), "the queue names it")
    assert words in str(agent.api.status()["waiting"])
    assert "cuInit" not in client.text(), "it runs without MPS"


@pytest.mark.parametrize("sharing", SHARING)
def test_it_is_held_with_the_reason_and_holds_up_nobody(stage: Stage, sharing: str) -> None:
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\nmax_clients = 1\n", extra=SHARING[sharing])
    debugged = stage.client(A, "sleep", 600, "--debugged")
    is_held(stage, agent, debugged)
    assert row(agent, A)["reason"] == "debugged"
    stage.exact(B, 50)
    stage.exact(A, 50)
    os.kill(stage.gate(agent), signal.SIGKILL)
    stage.killed(agent)
    agent = stage.again()
    is_held(stage, agent, debugged)
    stage.exact(A, 50)
    states = {one["pid"]: one["state"] for one in agent.api.get("/v1/clients")["clients"]}
    assert states[debugged.pid] == "waiting"
    debugged.kill()
    stage.until(lambda: not row(agent, A), "its end ends it")
    assert len(stage.records("client.held", pid=debugged.pid)) == 1
    assert stage.records("client.left", pid=debugged.pid)


def test_a_denied_users_debugger_is_not_closed_either(stage: Stage) -> None:
    agent = stage.with_agent(f'[limits]\nactive_threads = "50%"\n[user.{A}]\naccess = "deny"\n')
    debugged = stage.client(A, "sleep", 600, "--debugged")
    is_held(stage, agent, debugged)
    refused = stage.client(A)
    assert refused.ended() == 10
    is_held(stage, agent, debugged)
