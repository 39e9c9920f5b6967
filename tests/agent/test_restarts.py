"""An agent that is killed in the middle of something: the next one goes on with it, and does nothing twice."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.agent.stage import A, Agent, B, Stage, alive

POLICY = (
    f'[limits]\nactive_threads = "10%"\nmemory_limit = "2G"\n[user.{A}]\nactive_threads = "40%"\n[user.{B}]\n'
    'active_threads = "20%"\n'
)


def test_a_client_keeps_its_name_and_its_wait_beyond_an_agent(stage: Stage) -> None:
    """COMMAND was "-" and WAITED 0.00s for good after an agent's restart."""
    agent = stage.with_agent(POLICY)
    first = stage.client(A, "sleep", 600)
    first.working()
    second = stage.client(B, "sleep", 600)
    stage.waiting(second)
    time.sleep(1)
    first.kill()
    second.known()  # what it had waited in all is said when it works

    def row(agent: Agent) -> dict[str, Any]:
        found = agent.api.ask("/v1/clients")[1]["clients"]
        return next(one for one in found if one["pid"] == second.pid)

    before = row(agent)
    assert before["command"]
    assert before["waited"] >= 1
    kept = stage.place / "state" / "state.json"
    stage.until(lambda: f'"pid": {second.pid},' in kept.read_text(), "how long it had waited is kept")
    stage.killed(agent)
    agent = stage.again()
    assert {key: row(agent)[key] for key in ("command", "waited")} == {
        key: before[key] for key in ("command", "waited")
    }


def test_a_restart_that_goes_well_says_of_nothing_that_it_failed(stage: Stage) -> None:
    """ "Asked the control daemon for its servers; it failed: no control daemon": that it has ended was the order."""
    agent = stage.with_agent(POLICY)
    client = stage.client(A, "sleep", 600)
    client.working()
    status, body = agent.api.order("restart-mps")
    assert status == 200, body

    def started() -> bool:
        return len([one for one in stage.records("action.done") if one["action"] == "StartControl"]) == 2

    stage.until(started, "the control daemon is started again")
    stage.until(lambda: not stage.waits_for(agent), "the agent is ready")
    assert stage.records("action.failed") == []


# --- a drain ----------------------------------------------------------------------------------------------------------


def test_a_restart_in_a_drain_is_refused_and_takes_no_work(stage: Stage) -> None:
    """It ended everybody's work, answered "restarting: yes", and started nothing."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 600)
    holder.known()
    assert stage.cli(agent, "drain")[0] == 0
    for words in (["--yes"], []):  # and nobody is asked before
        status, said = stage.cli(agent, "restart-mps", *words)
        assert (status, "no control daemon is started in a drain" in said, "lose" in said) == (7, True, False)
    assert stage.cli(agent, "resume")[0] == 0
    time.sleep(1)
    assert (holder.rc, stage.records("control.restart_ordered")) == (None, [])


def test_a_restart_waits_for_clients_as_long_as_it_is_told(stage: Stage) -> None:
    """The next daemon starts when the last client has ended, long before the time is over, also by the next agent; who
    comes waits."""
    agent = stage.with_agent(POLICY)
    old = stage.control(agent)
    holder = stage.client(A, "sleep", 8)
    holder.known()
    assert stage.cli(agent, "restart-mps", "--yes", "--timeout", "1h", "--no-wait")[0] == 0
    waits = stage.client(B, "query")
    stage.waiting(waits)
    stage.killed(agent)
    agent = stage.again()
    assert holder.ended() == 0, holder.text()
    assert "last CUDA_SUCCESS" in holder.text(), "longer than kill_grace, and undisturbed"
    assert waits.ended() == 0, waits.text()
    assert not alive(old)
    assert waits.inside(20)
    new, kept = stage.control(agent), stage.place / "state" / "state.json"
    stage.until(lambda: '"drain"' not in kept.read_text(), "that the order has been carried out is kept")
    stage.killed(agent)
    assert not stage.again().api.status()["drain"]["draining"]
    assert alive(new)


# --- a ladder ---------------------------------------------------------------------------------------------------------


def test_a_control_daemon_whose_sockets_have_gone_is_replaced_and_who_waits_is_served(stage: Stage) -> None:
    """An `rm` too many in /run: it lives, nobody can reach it, and all waited until somebody restarted it by hand."""
    stage.with_agent(f"{POLICY}[timeouts]\ncontrol_daemon = '2s'\n")
    for path in stage.hidden().iterdir():
        if path.is_socket():
            path.unlink()
    client = stage.client(A, "query")
    assert client.ended() == 0
    assert [one["action"] for one in stage.records("action.done") if one["action"].startswith("Kill")] == [
        "KillControl"
    ]


@pytest.mark.parametrize("before", ["user", "all"])
def test_a_control_daemon_that_cannot_be_reached_is_replaced_also_where_another_form_of_server_is_wanted(
    stage: Stage, before: str
) -> None:
    """Each `quit` that found no control daemon began the time of its silence anew, every 5 s: it was never over."""
    after = "all" if before == "user" else "user"
    stage.with_agent(
        f"{POLICY}[timeouts]\ncontrol_daemon = '6s'\n", extra=f'sharing = "turns"\nserver_scope = "{before}"'
    )
    for path in stage.hidden().iterdir():
        if path.is_socket():
            path.unlink()
    stage.policy(f"{POLICY}[timeouts]\ncontrol_daemon = '6s'\n", extra=f'sharing = "turns"\nserver_scope = "{after}"')
    assert stage.agents[-1].api.order("reload")[0] == 200
    client = stage.client(A, "query")
    assert client.ended() == 0
