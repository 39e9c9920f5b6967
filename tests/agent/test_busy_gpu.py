"""On a busy GPU the end of one client hurts none of its neighbours, by each way to end it (recording 16)."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.agent.stage import A, Agent, B, C, Client, Stage
from tests.conformance import rig as rigs

pytestmark = pytest.mark.root

POLICY = "[timeouts]\nsigkill_delay = '2s'\n"


def busy(stage: Stage) -> tuple[Agent, list[Client]]:
    agent = stage.with_agent(POLICY, extra='sharing = "one-server"')
    others = [stage.client(uid, "train", 600) for uid in (A, A, B, B, C)]
    for one in others:
        stage.until(lambda one=one: "launch" in one.text(), "its kernels run")  # type: ignore[misc]
    return agent, others


def unharmed(stage: Stage, agent: Agent, others: list[Client]) -> None:
    """A fault would follow within 0.6 s of the end, and the agent hears of it."""
    time.sleep(1)
    late = stage.client(B, "train", 0.5)
    assert late.ended() == 0, late.text()
    assert [one.rc for one in others] == [None] * len(others)
    assert stage.records("server.fault") == []
    assert agent.api.problems() == []


@pytest.mark.parametrize("mode", ["train", "spin"])
def test_a_client_that_is_ordered_to_end(stage: Stage, mode: str) -> None:
    """By its signal, or by its own exit as soon as it sees the error."""
    agent, others = busy(stage)
    victim = stage.client(A, mode, 600)
    stage.until(lambda: "launch" in victim.text(), "its kernels run")
    assert stage.cli(agent, "terminate", str(victim.pid))[0] == 0
    assert victim.ended() is not None
    unharmed(stage, agent, others)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_program_under_run_that_is_stopped(stage: Stage, number: signal.Signals) -> None:
    agent, others = busy(stage)
    victim = stage.run_verb(agent, A, "--", *stage.backend.client, "train", "600")
    stage.until(lambda: "launch" in victim.read(), "its kernels run")
    os.kill(victim.process.pid, number)
    assert rigs.exited(victim.process, 60)
    unharmed(stage, agent, others)
