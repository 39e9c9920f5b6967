"""`server shutdown` on the simulator: a server that a person ends, with its clients and those who come meanwhile."""

from __future__ import annotations

import os
import signal

from tests.agent.stage import A, Agent, B, Stage, alive

POLICY = f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n[user.{B}]\nthreads = 20\n'


def server_of(stage: Stage, agent: Agent) -> int:
    """The pid of the only one, once it is there."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [one["pid"] for one in agent.api.ask("/v1/servers")[1]["servers"]]
        return len(found) == 1

    stage.until(is_there, "a server")
    return found[0]


def test_its_clients_end_by_themselves_and_who_comes_gets_the_next_one(stage: Stage) -> None:
    """Also when the agent is killed meanwhile: the order was answered."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 3600)
    holder.working()
    server = server_of(stage, agent)
    status, said = stage.cli(agent, "server", "shutdown")
    assert (status, "1 client of" in said, "would lose work" in said) == (2, True, True), said
    assert stage.cli(agent, "server", "shutdown", "--yes", "--timeout", "1h", "--no-wait")[0] == 0
    assert stage.record("server.shutdown_ordered", pid=server)["timeout"] == 3600
    comes = stage.client(A, "query")
    stage.waiting(comes)
    stage.killed(agent)
    agent = stage.again()
    stage.until(lambda: "is being shut down" in str(agent.api.ask("/v1/queue")[1]["queue"]), "it is said why it waits")
    assert (holder.rc, comes.rc, alive(server)) == (None, None, True)
    holder.kill()
    assert comes.ended() == 0, comes.text()
    assert comes.inside(40)
    assert not alive(server)
    assert stage.record("action", action="ShutdownServer", server=server)["force"] is False
    assert stage.records("client.refused") == []


def test_who_does_not_end_is_ended_and_it_is_said_what_became_of_it(stage: Stage) -> None:
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 3600)
    holder.working()
    server = server_of(stage, agent)
    status, said = stage.cli(agent, "server", "shutdown", str(server), "--yes", "--timeout", "1s")
    assert (status, f"server {server}" in said, "has ended" in said) == (0, True, True), said
    assert holder.ended() is not None
    assert stage.record("client.ended", pid=holder.pid)["outcome"] == "ended"
    stage.exact(B, 20)


def test_by_force_it_ends_under_its_clients_also_when_it_was_stopped(stage: Stage) -> None:
    """One that stands answers nothing, and the control daemon with it."""
    agent = stage.with_agent(POLICY + '[hang]\ncontrol = "2s"\nserver = "2s"\n')
    holder = stage.client(A, "sleep", 3600)
    holder.working()
    server = server_of(stage, agent)
    os.kill(server, signal.SIGSTOP)
    status, said = stage.cli(agent, "server", "shutdown", "--yes", "--force")
    assert status == 0, said
    assert not alive(server)
    assert stage.records("action", action="TerminateClient") == []
    holder.kill()
    stage.exact(B, 20)
