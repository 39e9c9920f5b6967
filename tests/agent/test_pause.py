"""Paused users with real processes: they stand and go on where they were; no death of the agent leaves one standing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from mpsagent.linux.processes import stopped
from tests.agent.stage import A, Agent, B, Client, Stage

OPEN = Path(__file__).resolve().parents[2] / "systemd" / "mpsagent-open"
LONG = 600


def policy(seconds: float, more: str = "") -> str:
    return f'[turn]\non_expiry = "pause"\npause_slice = "{seconds}s"\n{more}'


def standing(*clients: Client) -> list[bool]:
    return [stopped(client.pid) for client in clients]


def files(stage: Stage) -> list[Path]:
    return list((stage.place / "run").glob("instances/*/frozen/*"))


def unit_thaws(stage: Stage) -> None:
    """What ExecStopPost= of the unit does."""
    subprocess.run([OPEN, "thaw"], check=True, env={**os.environ, "MPSAGENT_RUN": str(stage.place / "run")}, timeout=60)


def pair(stage: Stage, seconds: float, more: str = "") -> tuple[Agent, Client, Client]:
    """alice works, and bob has come."""
    stage.policy(policy(seconds, more), extra='server_scope = "all"')
    agent = stage.again()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    bob = stage.client(B, "sleep", LONG)
    stage.waiting(bob)
    return agent, alice, bob


def in_turn(stage: Stage, alice: Client, bob: Client) -> None:
    """Each of them stands for a while, and goes on as if nothing had been."""
    for pair_of in ([True, False], [False, True]):
        stage.until(lambda wanted=pair_of: standing(alice, bob) == wanted, f"{pair_of} of alice and bob stand")  # type: ignore[misc]
    assert alice.rc is None
    assert bob.rc is None
    assert "work now" not in alice.text() + bob.text()


def test_two_users_work_in_slices_and_none_is_ended(stage: Stage) -> None:
    agent, alice, bob = pair(stage, 1)
    in_turn(stage, alice, bob)
    seen: set[object] = set()

    def both_paused() -> bool:
        seen.update(one["pid"] for one in agent.api.get("/v1/clients")["clients"] if one["state"] == "paused")
        return seen == {alice.pid, bob.pid}

    stage.until(both_paused, "the API says of each that it is paused")
    paused = [one for one in agent.api.status()["waiting"] if one["reason"] == "paused"]
    assert all("with their memory" in one["why"] or "with its memory" in one["why"] for one in paused)
    os.kill(bob.pid, signal.SIGKILL)
    stage.until(lambda: standing(alice) == [False] and not files(stage), "alice goes on alone")
    assert not stage.records("action", action="TerminateClient")
    resumed = stage.record("user.resumed", uid=A)
    assert 0.5 < resumed["seconds"] < 60
    stage.no_problem(agent)


def test_an_agent_killed_while_it_freezes_leaves_nobody_standing(stage: Stage) -> None:
    """In the moment in which the turn changes hands; the other phases are in tests/core, and frozen in the next one."""
    agent, alice, bob = pair(stage, 1)
    stage.until(lambda: files(stage), "alice is being frozen", every=0.001)
    stage.killed(agent)
    unit_thaws(stage)
    assert standing(alice, bob) == [False, False]
    assert not files(stage)
    stage.policy(policy(1), extra='server_scope = "all"')
    stage.again()
    stage.until(lambda: standing(alice, bob) == [True, False], "alice stands again")
    stage.until(lambda: standing(alice, bob) == [False, True], "then bob")


def test_an_agent_that_stops_lets_everybody_go_on(stage: Stage) -> None:
    """One that was killed cannot. The next one does, in that user's turn: two users never work at once, whatever the
    policy is by then."""
    agent, alice, bob = pair(stage, LONG, f'[user.{A}]\nturn.pause_slice = "1s"\n')
    stage.until(lambda: standing(alice, bob)[0], "alice stands")
    stage.stop_agent(agent)
    assert standing(alice, bob) == [False, False]
    assert not files(stage)
    agent = stage.again()
    stage.until(lambda: sum(standing(alice, bob)) == 1, "one of them stands again")
    stage.killed(agent)
    stage.policy("", extra='server_scope = "all"')
    stage.again()
    at_work = alice if standing(bob)[0] else bob
    assert sum(standing(alice, bob)) == 1
    os.kill(at_work.pid, signal.SIGKILL)
    stage.until(lambda: sum(standing(alice, bob)) == 0, "the other one goes on")
    stage.until(lambda: not files(stage), "nothing tells of a pause any more")
