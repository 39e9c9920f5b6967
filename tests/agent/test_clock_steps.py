"""The wall clock is set while people work: agent, gate and simulator see it, and nobody's turn does. A library below
them moves CLOCK_REALTIME; the machine's own clock is left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.agent.stage import A, Agent, B, Stage

LONG = 600
HOURS = 3 * 3600
AFTER = '[switch]\nafter = "1h"\ngrace = "1s"\n'


class Clock:
    """What the agents of a stage, their gate and their control daemon take for the wall clock."""

    def __init__(self, stage: Stage) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler, for the clock")
        self.stage = stage
        self.place = stage.place / "clock"
        self.place.mkdir()
        self.place.chmod(0o755)
        self.library = self.place / "clock.so"
        source = Path(__file__).with_name("clock.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", self.library, source, "-ldl"], check=True)
        self.set(0)
        self.control = self.place / "nvidia-cuda-mps-control"
        self.control.write_text(f'#!/bin/sh\nLD_PRELOAD={self.library} exec {stage.backend.control} "$@"\n')
        self.control.chmod(0o755)

    def set(self, seconds: int) -> None:
        fresh = self.place / "new"
        fresh.write_text(f"{seconds}\n")
        fresh.chmod(0o644)
        fresh.rename(self.place / "off")

    def agent(self) -> Agent:
        stage = self.stage
        agent = stage.start_agent(prefix=("env", f"LD_PRELOAD={self.library}"))
        stage.answering(agent)
        stage.until(lambda: not stage.waits_for(agent), "the agent is ready")
        return agent


def test_who_comes_after_the_clock_was_set_back_has_waited_since_then(stage: Stage) -> None:
    """By the gate's clock the next user had waited for as long as the holder worked, whose time was over at once."""
    clock = Clock(stage)
    stage.policy(AFTER.replace("1h", "3s"), control=str(clock.control), extra='server = "shared"')
    clock.agent()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    stage.rig.pause(3)
    clock.set(-HOURS)
    came = time.monotonic()
    stage.client(B, "sleep", LONG)
    stage.record("turn.warning")
    assert time.monotonic() - came >= 3


@pytest.mark.parametrize("step", [-HOURS, HOURS])
def test_a_lease_and_a_drain_end_when_their_time_has_passed_and_not_with_the_clock(stage: Stage, step: int) -> None:
    """Their ends were times of the wall clock: set ahead, a lease was over and a drain ended its clients at once."""
    clock = Clock(stage)
    stage.policy("[limits]\nthreads = 50\n", control=str(clock.control), extra='sharing = "together"')
    agent = clock.agent()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    assert agent.api.order("lease", uid=B, threads=20, until="1h")[0] == 200
    clock.set(step)
    stage.exact(B, 20)
    assert agent.api.order("drain", timeout="1h")[0] == 200
    clock.set(2 * step)
    stage.rig.pause(3)
    assert alice.rc is None
    assert agent.api.order("resume")[0] == 200
    stage.exact(B, 20)
    assert not stage.records("client.end_ordered")
    assert agent.api.order("drain", timeout="2s")[0] == 200
    stage.record("client.ended", pid=alice.pid)


@pytest.mark.parametrize("step", [-HOURS, HOURS])
def test_an_agent_that_comes_after_the_clock_was_set_goes_on(stage: Stage, step: int) -> None:
    """Nobody's wait ends or begins anew, and nothing is on record twice."""
    clock = Clock(stage)
    stage.policy(AFTER, control=str(clock.control))
    agent = clock.agent()
    alice = stage.client(A, "sleep", LONG)
    stage.record("client.connected", pid=alice.pid)
    clock.set(step)
    bob = stage.client(B, "sleep", LONG)
    stage.waiting(bob)
    stage.killed(agent)
    clock.set(0)
    clock.agent()
    stage.rig.pause(3)
    assert alice.rc is None
    assert not stage.records("turn.warning")
    assert len(stage.records("client.connected", pid=alice.pid)) == 1
    assert len(stage.records("client.waiting", pid=bob.pid)) == 1
    assert not stage.records("client.left")
    assert not stage.records("client.ended")
    os.kill(alice.pid, signal.SIGKILL)
    stage.record("client.connected", pid=bob.pid)
    waited = stage.record("client.connected", pid=bob.pid)["waited"]
    assert 3 <= waited < 600
