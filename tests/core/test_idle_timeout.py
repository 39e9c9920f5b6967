"""``idle_timeout``: a holder whose clients use no CPU while others wait gives the GPU up."""

from __future__ import annotations

import dataclasses

from mpsagent.core import actions as act
from mpsagent.core import caps
from mpsagent.core.ladder import LadderMemory
from mpsagent.core.model import Client, Server, State, Status, Waiting
from mpsagent.core.world import Process, World
from mpsagent.policy.files import load

ALICE, BOB = 1001, 1002
POLICY, ERRORS = load([("policy.toml", '[limits]\nidle_timeout = "60s"\n')])


def world(idle_since: tuple[float | None, ...], *, waiting: bool = True) -> World:
    """Alice holds the GPU with a client for each entry; Bob waits."""
    assert POLICY is not None, ERRORS
    server = Server(pid=10, uid=ALICE, status=Status.ACTIVE, started=0.0, ready=0.2)
    clients = {100 + n: Client(pid=100 + n, uid=ALICE, server=10, since=1.0) for n in range(len(idle_since))}
    processes = {100 + n: Process(ALICE, 1, cpu_idle_since=since) for n, since in enumerate(idle_since)}
    queue = (Waiting(200, BOB, 5.0),) if waiting else ()
    state = State(servers={10: server}, clients=clients, waiting=queue)
    return World(state=state, policy=POLICY, processes=processes)


def ended(at: World, now: float) -> list[int]:
    _memory, ladders, todo, _ = caps.decide(at, caps.CapsMemory(), LadderMemory(), now)
    assert not any(isinstance(action, act.TerminateClient) for action in todo)  # the ladder does that
    return sorted(ladders.climbs)


def test_idle_clients_of_a_holder_are_ended_when_the_time_is_over() -> None:
    assert ended(world((10.0, 20.0)), 79.9) == []
    assert ended(world((10.0, 20.0)), 80.0) == [100, 101]


def test_the_next_look_is_at_the_edge() -> None:
    *_, wake = caps.decide(world((10.0,)), caps.CapsMemory(), LadderMemory(), 30.0)
    assert wake == 70.0


def test_one_that_works_keeps_them_all() -> None:
    """Only a user all of whose clients are idle holds the GPU for nothing."""
    assert ended(world((10.0, 75.0)), 100.0) == []
    assert ended(world((10.0, None)), 1000.0) == []  # not known is not idle


def test_nobody_is_ended_while_nobody_waits() -> None:
    assert ended(world((10.0,), waiting=False), 1000.0) == []


def test_what_is_not_enforced_is_only_reported_once() -> None:
    policy, _ = load([("policy.toml", '[limits]\nidle_timeout = "60s"\nenforce = false\n')])
    assert policy is not None
    at = dataclasses.replace(world((10.0,)), policy=policy)
    memory, ladders, todo, _ = caps.decide(at, caps.CapsMemory(), LadderMemory(), 80.0)
    assert not ladders.climbs
    assert [action.kind for action in todo if isinstance(action, act.Report)] == ["client.over"]
    _, _, again, _ = caps.decide(at, memory, ladders, 81.0)
    assert again == []
