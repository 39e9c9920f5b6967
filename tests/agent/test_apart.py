"""A control daemon for each user on one GPU: all at once, each exactly its limits, and what goes wrong stays there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from mpsagent.mps.units import multiprocessors_for_percent
from tests.agent.stage import A, Agent, B, C, Client, Stage
from tests.conformance import rig as rigs

pytestmark = pytest.mark.root

SHARES = {A: 60.0, B: 20.0, C: 10.0}
POLICY = "".join(f"[user.{uid}]\nthreads = {share:g}\n" for uid, share in SHARES.items())
POLICY += '[hang]\nfault = "1s"\nkill_grace = "1s"\n'
APART = 'sharing = "apart"\n'


def apart(agent: Agent) -> dict[int, dict[str, Any]]:
    """The users with control daemons, as the status has them."""
    (page,) = agent.api.status()["instances"]
    return {one["uid"]: one for one in page["apart"]}


def working(stage: Stage, uid: int, *mode: float | str) -> Client:
    client = stage.client(uid, *(mode or ("sleep", 600)))
    client.known()
    assert client.seen() is not None
    assert client.seen()[0] == multiprocessors_for_percent(SHARES[uid], stage.machine.multiprocessors)  # type: ignore[index]
    return client


def directories(stage: Stage) -> set[str]:
    return {path.name for path in Path(stage.place, "run", "instances").iterdir()}


def daemons(stage: Stage) -> set[int]:
    return {one.pid for one in stage.rig.ours() if rigs.CONTROL in one.arguments}


def test_users_work_at_once_and_a_fault_of_one_is_nobody_elses(stage: Stage) -> None:
    agent = stage.with_agent(POLICY, extra=APART + 'apart_idle_timeout = "2s"\n')
    assert not daemons(stage)
    a, b = working(stage, A), working(stage, B)
    culprit = stage.client(C, "oob", 0.1)
    culprit.ended()
    assert culprit.rc != 0
    assert stage.record("server.fault")["uid"] == C
    c = working(stage, C)
    users = apart(agent)
    assert set(users) == {A, B, C}
    assert len({one["control"] for one in users.values()}) == 3
    one_each = {str(uid): 1 for uid in SHARES}
    stage.until(lambda: agent.api.status()["clients_by_uid"] == one_each, "the culprit has gone from the page")
    status = agent.api.status()
    assert status["mode"]["sharing"] == "apart"
    assert {one["uid"] for one in status["servers"]} == {A, B, C}  # as their users, not as root
    assert a.rc is None
    assert b.rc is None
    rigs.send_signal(users[C]["control"], signal.SIGKILL)  # a crash of one daemon
    rigs.send_signal(c.pid, signal.SIGKILL)  # it would notice only when it wakes
    c.ended()
    assert apart(agent)[A]["control"] == users[A]["control"]
    working(stage, C)
    stage.stop_agent(agent, signal.SIGKILL)
    agent = stage.again()
    stage.until(lambda: set(apart(agent)) == {A, B, C}, "the users are known again")
    assert [apart(agent)[uid]["control"] for uid in (A, B)] == [users[uid]["control"] for uid in (A, B)]
    assert a.rc is None
    working(stage, A)


def test_an_idle_daemon_ends_and_others_get_its_place(stage: Stage) -> None:
    agent = stage.with_agent(POLICY, extra=APART + 'apart_idle_timeout = "1s"\napart_users = 2\n')
    a, b = working(stage, A), working(stage, B)
    late = stage.client(C, "sleep", 600)
    waits = (C, "apart", True)
    stage.until(
        lambda: (
            [(one["uid"], one["reason"], "apart_users" in one["why"]) for one in agent.api.get("/v1/queue")["queue"]]
            == [waits]
        ),
        "a third one waits, and sees why",
    )
    assert agent.api.status()["waiting_users"] == 1
    rigs.send_signal(a.pid, signal.SIGKILL)
    late.working()
    stage.until(lambda: set(apart(agent)) == {B, C}, "the first one's has gone")
    for client in (b, late):
        rigs.send_signal(client.pid, signal.SIGKILL)
    stage.until(lambda: not daemons(stage) and directories(stage) == {"scene"}, "nothing is left")
    stage.no_problem(agent)
    working(stage, A)


def test_a_change_of_the_way_of_sharing_waits_for_those_at_work(stage: Stage) -> None:
    agent = stage.with_agent(POLICY, extra=APART)
    a = working(stage, A)
    stage.policy(POLICY, extra='sharing = "together"\n')
    assert agent.api.order("reload")[0] == 200
    said = stage.problem(agent, 'sharing = "together" takes hold later')
    assert "until 1 process of 1 user apart has ended; new clients" in said
    b = stage.client(B, "sleep", 600)
    stage.until(lambda: agent.api.get("/v1/queue")["queue"], "who comes is held")
    assert a.rc is None
    rigs.send_signal(a.pid, signal.SIGKILL)
    b.working()
    assert agent.api.status()["mode"]["sharing"] == "together"
    assert apart(agent) == {}
    stage.policy(POLICY, extra=APART)
    assert agent.api.order("reload")[0] == 200
    stage.problem(agent, 'sharing = "apart" with a control daemon for each user takes hold later')
    c = stage.client(C, "sleep", 600)
    rigs.send_signal(b.pid, signal.SIGKILL)
    c.working()
    stage.until(lambda: set(apart(agent)) == {C}, "apart again")
    stage.until(lambda: len(daemons(stage)) == 1, "the one for all has ended")
    stage.no_problem(agent)
