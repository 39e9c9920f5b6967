"""Processes that come through another process of their user's (recording 12, H1): the gate sees one, MPS has many. They
are clients of their user, and their user's turn, pause and policy are theirs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.agent.stage import A, Agent, B, Client, Stage
from tests.conformance.backends import other_users_python

PROGRAM = Path(__file__).parents[1] / "conformance/user_relay.py"
LIMITS = '[limits]\nactive_threads = "20%"\nmemory_limit = "8G"\n'
FAST = '[timeouts]\nsigkill_delay = "1s"\n'
TOGETHER = 'sharing = "one-server"\n'


def user(stage: Stage, uid: int, what: str, *arguments: object) -> Client:
    """user_relay.py of this user at work."""
    place = stage.place / f"of-{uid}"
    if not place.exists():
        place.mkdir()
        os.chown(place, uid, uid)
        shutil.copy(PROGRAM, place)
        (place / PROGRAM.name).chmod(0o644)
    command = [other_users_python(uid), "-S", "-E", str(place / PROGRAM.name), what, *map(str, arguments)]
    started = stage.rig.run(command, uid=uid)
    return Client(stage, stage.rig._client(started, uid, (what,), None), uid)


def relay(stage: Stage, uid: int) -> Client:
    found = user(stage, uid, "relay", stage.place / f"of-{uid}", stage.rig.pipe / "control")
    assert found.saw("listens"), found.started.err.read_text()
    return found


def through(stage: Stage, uid: int, mode: str = "sleep", *arguments: float, of: int | None = None) -> Client:
    """A client through the relay of this user, or ``of`` another."""
    return stage.client(uid, mode, *(arguments or (600,)), CUDA_MPS_PIPE_DIRECTORY=str(stage.place / f"of-{of or uid}"))


def listed(agent: Agent) -> dict[int, dict[str, Any]]:
    return {one["pid"]: one for one in agent.api.get("/v1/clients")["clients"]}


def unseen(stage: Stage, agent: Agent, *clients: Client) -> None:
    """Waits until these are clients that the gate has not seen."""
    stage.until(
        lambda: all(listed(agent).get(one.pid, {}).get("unseen") for one in clients),
        f"not seen by the gate: {[one.pid for one in clients]}, not {listed(agent)}",
    )


def test_an_innocent_proxy_goes_on_and_its_clients_count(stage: Stage) -> None:
    """A sandbox whose processes all come through one: no limit of theirs is passed, so nothing happens to them. They
    outlive a new agent and a new gate, and are known to both."""
    agent = stage.with_agent(LIMITS + f"[user.{A}]\nmax_clients = 3\n", extra=TOGETHER)
    relay(stage, A)
    clients = [through(stage, A), through(stage, A)]
    assert all(one.working() for one in clients)
    unseen(stage, agent, *clients)
    stage.until(lambda: "did not pass the gate" in str(agent.api.status()["not_guaranteed"]), "status says it")
    assert stage.cli(agent, "clients")[1].count("not seen by the gate") == 2
    stage.killed(agent)
    agent = stage.again()
    unseen(stage, agent, *clients)
    killed = stage.gate(agent)
    os.kill(killed, 9)
    stage.until(lambda: agent.api.status()["gate"]["pid"] not in (None, killed), "another gate is there")
    stage.until(lambda: not stage.waits_for(agent), "and knows whom to let in")
    unseen(stage, agent, *clients)
    one = stage.client(A, "sleep", 600)
    assert one.working(), one.text()
    two = stage.client(A)  # not before: it could be the third
    stage.waiting(two)
    assert [c.finish() for c in clients] == [0, 0], [c.text() for c in clients]
    assert two.ended() == 0, two.text()
    assert not stage.records("action", action="TerminateClient")
    assert not stage.records("outside_mps")
    stage.no_problem(agent)


def test_a_pid_that_has_come_to_be_another_users_is_not_taken_for_the_client(stage: Stage) -> None:
    """MPS lists the number of a client that has ended as long as a fork of it holds its connection; alice waits until
    the number is bob's, whom the policy denies, so that his process would be ended."""
    agent = stage.with_agent(LIMITS + FAST + f'[user.{B}]\naccess = "deny"\n', extra=TOGETHER)
    relay(stage, A)
    hers = through(stage, A, "leave", 600)
    assert hers.ended() == 0, hers.text()
    for _ in range(50):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(hers.pid - 1))
        his = stage.rig.run(["/bin/sleep", "600"], uid=B)
        if his.process.pid == hers.pid:
            break
        his.process.kill()
        his.process.wait()
    else:
        pytest.skip("the number was another's each time")
    since = len(stage.records("action", action="Reconcile"))

    def asked() -> bool:
        later = stage.records("action", action="Reconcile")[since:]
        return sum(f"process {hers.pid}" in one["reason"] for one in later) >= 3

    stage.until(asked, "MPS was asked about that number")
    assert hers.pid not in listed(agent)
    assert his.process.poll() is None
