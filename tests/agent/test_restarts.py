"""An agent that is killed in the middle of something: the next one goes on with it, and does nothing twice."""

from __future__ import annotations

import signal
import time

from tests.agent.stage import A, Agent, B, C, Client, Stage, alive

POLICY = f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n[user.{B}]\nthreads = 20\n'
TURNS = POLICY + '[switch]\nafter = "1s"\ngrace = "4s"\naction = "terminate"\n[hang]\nkill_grace = "1s"\n'


def counted(stage: Stage, pid: int) -> dict[str, int]:
    """What was begun against a process, by kind."""
    found: dict[str, int] = {}
    for one in stage.records("action", pid=pid):
        name = f"{one['action']} {one['signal']}" if "signal" in one else str(one["action"])
        if name not in ("RefuseConnection",):
            found[name] = found.get(name, 0) + 1
    return found


def ends(stage: Stage, agent: Agent, client: Client) -> None:
    stage.until(lambda: agent.api.ask("POST", f"/v1/clients/{client.pid}/terminate", {})[0] == 200, "it is a client")


# --- a drain ----------------------------------------------------------------------------------------------------------


def test_a_drain_outlives_agents_and_its_end_refuses_no_one(stage: Stage) -> None:
    """Maintenance with an upgrade in the middle: nothing is started, who comes waits, and is served when it is over."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 60)
    holder.working()
    assert stage.cli(agent, "drain")[0] == 0
    waiting = stage.client(B, "query")
    stage.waiting(waiting)
    stage.killed(agent)
    agent = stage.again(ready=False)
    assert agent.api.status()["drain"]["draining"]
    old = stage.control(agent)
    holder.kill()
    stage.until(lambda: not alive(old), "the control daemon quits when nothing works any more")
    stage.killed(agent)
    agent = stage.again(ready=False)
    status = agent.api.status()
    assert (status["drain"]["draining"], status["control"]) == (True, None), "it is not started during a drain"
    later = stage.client(C, "query")
    stage.waiting(later)
    assert (waiting.rc, later.rc) == (None, None)
    assert stage.cli(agent, "resume")[0] == 0
    for client, percent in ((waiting, 20), (later, 10)):
        assert client.ended() == 0, client.text()
        assert client.inside(percent), client.text()
    stage.killed(agent)
    assert not stage.again().api.status()["drain"]["draining"]


def test_resume_opens_at_once_while_earlier_work_goes_on(stage: Stage) -> None:
    """The first edition refused everybody until running work had ended."""
    agent = stage.with_agent(POLICY)
    holder = stage.client(A, "sleep", 60)
    holder.working()
    assert stage.cli(agent, "drain")[0] == 0
    waiting = [stage.client(A, "query"), stage.client(B, "query")]
    for one in waiting:
        stage.waiting(one)
    assert stage.cli(agent, "resume")[0] == 0
    assert waiting[0].ended() == 0, "of the user whose turn it is"
    assert waiting[0].inside(40)
    assert (holder.rc, waiting[1].rc) == (None, None)
    holder.kill()
    assert waiting[1].ended() == 0
    assert waiting[1].inside(20)
    assert stage.records("client.refused") == []


# --- a ladder ---------------------------------------------------------------------------------------------------------


def test_a_client_that_is_being_ended_is_ended_by_the_next_agent(stage: Stage) -> None:
    """It ignores SIGTERM, so the ladder is long; MPS is asked once, each signal is sent once."""
    agent = stage.with_agent(POLICY + '[hang]\nkill_grace = "4s"\n')
    stubborn = stage.client(A, "sleep", 60, "--ignore-term")
    stubborn.working()
    ends(stage, agent, stubborn)
    stage.record("action", action="SignalClient", pid=stubborn.pid, signal=int(signal.SIGTERM))
    stage.killed(agent)
    assert stubborn.rc is None
    stage.again()
    assert stubborn.ended() == -signal.SIGKILL
    stage.record("client.ended", pid=stubborn.pid)
    asked = counted(stage, stubborn.pid)
    assert asked["TerminateClient"] == 1
    assert asked[f"SignalClient {int(signal.SIGKILL)}"] == 1


def test_an_order_that_was_given_a_moment_before_is_carried_out(stage: Stage) -> None:
    """It was answered, so it holds."""
    agent = stage.with_agent(POLICY)
    client, other = stage.client(A, "sleep", 600), stage.client(A, "sleep", 600)
    client.working()
    other.working()
    ends(stage, agent, client)
    stage.killed(agent)
    stage.again()
    assert client.ended() is not None
    assert other.rc is None
    assert counted(stage, client.pid)["TerminateClient"] == 1
    assert counted(stage, other.pid) == {}


# --- a turn's grace ---------------------------------------------------------------------------------------------------


def test_a_grace_does_not_begin_anew_and_is_announced_once(stage: Stage) -> None:
    """Agents that are restarted every few seconds must not let a turn last for ever."""
    agent = stage.with_agent(TURNS)
    holder = stage.client(A, "sleep", 60)
    holder.working()
    waiting = stage.client(B, "query")
    warned = stage.record("turn.warning", uid=A)
    for _ in range(2):
        time.sleep(0.5)
        stage.killed(agent)
        agent = stage.again()
    assert holder.ended() is not None
    assert waiting.ended() == 0
    assert waiting.inside(20), waiting.text()
    stage.record("client.connected", pid=waiting.pid)
    assert len(stage.records("turn.warning")) == 1
    (ending,) = stage.records("turn.ending")
    assert ending["at"] - warned["at"] > 3.9, "all of its grace"
    assert counted(stage, holder.pid)["TerminateClient"] == 1
    assert stage.records("client.refused") == []
