"""What the gate knows of living processes, and what a gate that comes after a kill knows of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpsagent.wire.link import Applied, Found, Knock, Known, Named, Passed, Synced, User
from tests.gate.rig import A, Agent, B, Rig, admissions, limits

pytestmark = pytest.mark.root

USER = User(A, "all", limits(60, 20))


def next_gate(rig: Rig) -> Agent:
    """The gate is killed; the agent's end of the link to the next one."""
    rig.kill_gate()
    agent = rig.agent()
    agent.wait(Synced)
    return agent


def test_limits_of_its_own_stay_after_the_gate_was_killed(rig: Rig) -> None:
    """A lease or a [cgroup] section gives a process limits of its own. Its next context had those of its user."""
    _, agent = rig.start(admissions(replace(USER, named=True)))
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    named = Named(client.pid, knock.start, limits(20, 4))
    agent.say(admissions(replace(USER, named=True), processes={named.key: named}, number=1))
    assert client.served()["threads"] == "20.0"
    agent = next_gate(rig)
    agent.say(admissions(replace(USER, named=True), number=2))
    client.more()
    second = client.served(2)
    assert (second["threads"], second["memory"]) == ("20.0", {"0": 4096})
    assert agent.wait(Passed).limits == limits(20, 4)


def test_limits_of_its_own_stay_when_only_the_agent_knows_them(rig: Rig) -> None:
    """The gate and its descriptor store were lost. Its next context had those of its user (world, seed 99211075)."""
    _, agent = rig.start()
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    agent.say(Found(client.pid, A, knock.start, limits(20, 4), connections=2, own=True))
    agent.say(admissions(replace(USER, named=True), number=1))
    served = client.served()
    assert (served["threads"], served["memory"]) == ("20.0", {"0": 4096})


def test_limits_of_its_own_stay_when_those_before_are_not_known_and_the_gate_is_killed(rig: Rig) -> None:
    """Gate and agent were installed again: the most that it was given stays unknown, and its limits do not."""
    _, agent = rig.start()
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    agent.say(Found(client.pid, A, knock.start, None, connections=2, own=True))
    named = Named(client.pid, knock.start, limits(20, 4))
    agent.say(admissions(replace(USER, named=True), processes={named.key: named}, number=1))
    client.served()
    agent = next_gate(rig)
    known = agent.wait(Known)
    assert (known.limits, known.most) == (limits(20, 4), None)
    agent.say(admissions(replace(USER, named=True), number=2))
    client.more()
    second = client.served(2)
    assert (second["threads"], second["memory"]) == ("20.0", {"0": 4096})


def test_limits_that_are_enforced_no_more_are_lifted_by_a_later_gate_too(rig: Rig) -> None:
    """bob had alice's limits, in a policy with `mode = 'report'`."""
    _, agent = rig.start(admissions(User(A, "all", limits(20, 4))))
    client = rig.client(A)
    client.served()
    agent.say(admissions(User(B, "all", limits(100)), set_limits=False, number=1))
    agent.wait(Applied, number=1)
    agent = next_gate(rig)
    agent.say(admissions(User(B, "all", limits(100)), set_limits=False, number=2))
    served = rig.client(B).served()
    assert (served["threads"], served["memory"]) == ("100.0", {"0": 0}), "a limit of 0 is none"


def test_the_most_that_a_process_was_given_is_known_after_each_death(rig: Rig) -> None:
    """Its memory is judged by that: a reload that lowers the limit reaches its next context alone."""
    _, agent = rig.start(admissions(User(A, "all", limits(60, 20))))
    client = rig.client(A)
    client.served()
    agent.say(admissions(User(A, "all", limits(60, 10)), number=1))
    agent.wait(Applied, number=1)
    client.more()
    client.served(2)
    agent.wait(Passed, 2)
    assert [one.limits for one in agent.all(Passed)] == [limits(60, 20), limits(60, 10)]
    for again in (rig.agent, lambda: next_gate(rig), lambda: next_gate(rig)):
        known = again().wait(Known)
        assert (known.limits, known.most) == (limits(60, 10), limits(60, 20))


def test_a_process_that_the_agent_knows_is_known_with_all_that_it_says(rig: Rig) -> None:
    """The gate's descriptor store was lost: the agent tells what it has kept."""
    _, agent = rig.start()
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    agent.say(Found(client.pid, A, knock.start, limits(30, 2), most=limits(30, 4), connections=3))
    for again in (lambda: agent, rig.agent):
        known = again().wait(Known)
        assert (known.limits, known.most, known.connections) == (limits(30, 2), limits(30, 4), 3)
    known = next_gate(rig).wait(Known)
    assert (known.limits, known.most, known.connections) == (limits(30, 2), limits(30, 4), 1)


def test_limits_that_nobody_knows_stay_unknown(rig: Rig) -> None:
    _, agent = rig.start()
    client = rig.waiting_client(A)
    knock = agent.wait(Knock)
    agent.say(Found(client.pid, A, knock.start))
    for again in (lambda: agent, rig.agent, lambda: next_gate(rig)):
        known = again().wait(Known)
        assert (known.limits, known.most, known.connections) == (None, None, 0)
