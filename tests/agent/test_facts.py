"""Facts about living processes after the death of the agent, of the gate, and of both."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.stage import A, Agent, B, Client, Stage
from tests.conformance import rig as rigs

pytestmark = pytest.mark.root

POLICY = (
    f'[limits]\nactive_threads = "10%"\nmemory_limit = "2G"\n[user.{A}]\nactive_threads = "40%"\n'
    f'memory_limit = "20G"\n[user.{B}]\nactive_threads = "20%"\n'
)
POLICY += '[user.nobody]\nactive_threads = "5%"\nmemory_limit = "1G"\n'
"""A name, so that users have to be identified first."""
TURNS = 'sharing = "turns"\nserver_scope = "all"\n'


def row(agent: Agent, client: Client) -> dict[str, Any]:
    found = {one["pid"]: one for one in agent.api.get("/v1/clients")["clients"]}
    return found.get(client.pid, {})


def stop_both(stage: Stage, agent: Agent) -> None:
    """Neither the gate nor its descriptor store outlives this; MPS and its clients run on."""
    keeper, gate = stage.keeper(agent), stage.gate(agent)
    stage.killed(agent)
    for pid in (keeper, gate):
        rigs.send_signal(pid, signal.SIGKILL)
    stage.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (keeper, gate)), "the gate has gone")


def forget(stage: Stage) -> None:
    """As a purge does: the state directory has gone."""
    os.unlink(stage.place / "state" / "state.json")


def kept(stage: Stage, client: Client) -> None:
    """Waits until the agent has written down what it knows of this client."""
    path = stage.place / "state" / "state.json"
    stage.until(lambda: f"{client.pid}," in path.read_text(), "the client is in the state file")


FACTS = ("limits", "since", "waited", "command", "unseen")


@pytest.mark.parametrize("extra", [TURNS, 'sharing = "per-user"\n', 'sharing = "one-server"\n'])
def test_a_client_keeps_its_limits_and_its_history_when_agent_and_gate_are_stopped(stage: Stage, extra: str) -> None:
    """It was recorded with the fallback limits of the policy, and terminated for being above them."""
    agent = stage.with_agent(POLICY, extra=extra)
    client = stage.client(A, "sleep", 600)
    client.known()
    before = {key: row(agent, client)[key] for key in FACTS}
    assert before["limits"]["threads"] == 40
    kept(stage, client)
    stop_both(stage, agent)
    agent = stage.again(ready="apart" not in extra)
    stage.until(lambda: row(agent, client), "the client is known again")
    assert {key: row(agent, client)[key] for key in FACTS} == before
    assert stage.records("client.ended") == []
    assert [one["pid"] for one in stage.records("client.connected")] == [client.pid]
    found = json.loads(stage.cli(agent, "report", "--json")[1])["rows"]
    assert [(one["uid"], one["clients"]) for one in found] == [(A, 1)]
    assert client.finish() == 0, client.text()
    assert [one["pid"] for one in (stage.record("client.ended"),)] == [client.pid]
    times = [one["at"] for one in stage.records() if one["kind"].startswith("client.") and one["kind"] != "client.used"]
    assert times == sorted(times)


def test_limits_that_no_process_remembers_are_unknown(stage: Stage) -> None:
    agent = stage.with_agent(POLICY, extra=TURNS)
    client = stage.client(A, "sleep", 600)
    client.known()
    stop_both(stage, agent)
    forget(stage)
    agent = stage.again()
    stage.until(lambda: row(agent, client), "the client is known again")
    assert row(agent, client)["limits"] is None
    assert "unknown" in stage.cli(agent, "clients")[1]
    assert client.finish() == 0, client.text()


NOBODY = 65534


def test_users_have_their_names_after_a_restart(stage: Stage) -> None:
    """In status, the lease list and sessions, though they have no client now."""
    agent = stage.with_agent(POLICY, extra=TURNS)
    for uid in (NOBODY, A):
        assert stage.client(uid).ended() == 0
        stage.record("turn.began", uid=uid)
    words = ("--uid", "nobody", "--active-threads", "5%", "--until", "1h")
    assert stage.cli(agent, "lease", "add", *words)[0] == 0
    stage.killed(agent)
    agent = stage.again()
    assert f"from nobody to user {A}" in stage.cli(agent, "status")[1]
    assert "user nobody" in stage.cli(agent, "lease", "list")[1]
    status, text = stage.cli(agent, "lease", "add", "--uid", "nosuch", "--active-threads", "5%", "--until", "1h")
    assert (status, "there is no user 'nosuch'" in text) == (6, True)


def test_a_lease_lists_the_clients_that_came_with_it_in_every_lane(stage: Stage) -> None:
    """With a control daemon for each user there were none, and a client from before the lease was listed."""
    agent = stage.with_agent(POLICY, extra='sharing = "per-user"\n')
    before = stage.client(A, "sleep", 600)
    before.known()
    assert agent.api.order("lease", uid=A, active_threads="5%", until="1h")[0] == 200
    after = stage.client(A, "sleep", 600)
    after.known()

    def listed() -> list[int]:
        (lease,) = agent.api.get("/v1/leases")["leases"]
        found: list[int] = lease["clients"]
        return found

    assert listed() == [after.pid]
    kept(stage, after)
    stage.killed(agent)
    agent = stage.again(ready=False)
    stage.until(lambda: row(agent, after), "the client is known again")
    assert listed() == [after.pid]
    assert [before.finish(), after.finish()] == [0, 0]
