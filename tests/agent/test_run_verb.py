"""`mpsagent-cli run`: what it says of a program that waits, how it ends one, and its exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agent.stage import A, Agent, B, Stage
from tests.conformance import rig as rigs
from tests.scenes.stage import multiprocessors_for_percent

root = pytest.mark.root


class Run:
    """One that was started, as a user."""

    def __init__(self, stage: Stage, agent: Agent, uid: int, *words: str) -> None:
        self.stage, self.started = stage, stage.run_verb(agent, uid, *words)

    @property
    def pid(self) -> int:
        return self.started.process.pid

    def said(self) -> str:
        return self.started.err.read_text()

    def says(self, words: str) -> None:
        self.stage.until(lambda: words in self.said(), f"{words!r} is said: {self.said()}")

    def prints(self, words: str) -> None:
        self.stage.until(lambda: words in self.started.read(), f"{words!r} is printed: {self.said()}")

    def ended(self) -> int:
        assert rigs.exited(self.started.process, 60), self.said()
        assert self.started.process.returncode is not None
        return self.started.process.returncode


@pytest.fixture
def start(stage: Stage) -> Callable[..., Run]:
    return lambda agent, uid, *words: Run(stage, agent, uid, *words)


@root
def test_why_it_waits_and_that_it_has_the_gpu_is_said_and_its_status_is_the_programs(
    stage: Stage, start: Callable[..., Run]
) -> None:
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n[turn]\ntime_limit = '1h'\n")
    holder = stage.client(A, "sleep", 600)
    holder.known()
    one = start(agent, B, "--", *stage.backend.client, "sleep", "4")
    one.says(f"it waits for the GPU, number 1 of 1: it is the turn of user {A}; its turn comes at ")
    holder.finish()
    assert one.ended() == 0
    one.says("it has the GPU")
    assert f"sms {multiprocessors_for_percent(50, stage.machine.multiprocessors)} " in one.started.read()


@root
def test_why_it_was_refused_is_said_and_once(stage: Stage, start: Callable[..., Run]) -> None:
    """Into a file, too: who starts a program with `run` wants to know."""
    agent = stage.with_agent(f'[user."{B}"]\naccess = "deny"\n')
    one = start(agent, B, "--", *stage.backend.client, "query")
    assert one.ended() != 0
    (said,) = [row for row in one.said().splitlines() if "was refused" in row]
    assert said.startswith("mpsagent-cli: process ")
    assert f'access = "deny" in the policy for user {B} (user.{B}.access, ' in said


@root
def test_while_the_gate_is_away_nothing_is_said_of_the_queue(stage: Stage, start: Callable[..., Run]) -> None:
    """Seen at each upgrade: "it has the GPU" was said to a program that went on waiting, "no user waits" to all."""
    agent = stage.with_agent("[turn]\ntime_limit = '1h'\n")
    holder = stage.client(A, "sleep", 600)
    holder.known()
    one = start(agent, B, "--", *stage.backend.client, "sleep", "4")
    one.says("it waits for the GPU, number 1 of 1")
    keeper, gate = stage.keeper(agent), stage.gate(agent)
    os.kill(keeper, signal.SIGSTOP)
    os.kill(gate, signal.SIGKILL)
    stage.until(lambda: not agent.api.status()["gate"]["connected"], "the gate is away")
    time.sleep(2.5)
    queue = [sys.executable, "-m", "mpsagent.cli.main", "--socket", str(agent.api.path), "queue"]
    told = subprocess.run(queue, capture_output=True, text=True, check=True, timeout=60).stdout
    os.kill(keeper, signal.SIGCONT)
    assert "the queue is not known" in told
    assert "has the GPU" not in one.said()
    holder.finish()
    one.says("it has the GPU")
    assert one.ended() == 0


@root
def test_who_waits_longer_than_they_want_ends_with_75(stage: Stage, start: Callable[..., Run]) -> None:
    agent = stage.with_agent("[turn]\ntime_limit = '1h'\n")
    holder = stage.client(A, "sleep", 600)
    holder.known()
    one = start(agent, B, "--timeout", "1s", "--", *stage.backend.client, "query")
    assert one.ended() == 75
    assert "it has waited too long" in one.said()
    assert holder.rc is None


@root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_its_clients_through_mps_first_and_no_neighbour_is_hurt(
    stage: Stage, start: Callable[..., Run], number: int
) -> None:
    """The simulated server faults when a client with a kernel in flight is killed, as the real one does."""
    agent = stage.with_agent("", extra='sharing = "one-server"')
    neighbour = stage.client(A, "mind", 600)
    neighbour.known()
    one = start(agent, B, "--", *stage.backend.client, "spin", "600")

    def of_b() -> list[dict[str, object]]:
        return [row for row in agent.api.get("/v1/clients")["clients"] if row["uid"] == B]

    # without a context MPS is not asked: nothing of it could be at work
    stage.until(lambda: any(row["contexts"] for row in of_b()), "its client works")
    os.kill(one.pid, number)
    assert one.ended() in (-number, 16), "the signal that came, or what the program says of CUDA's error"
    stage.until(lambda: not of_b(), "its client has gone")
    stage.record("action.done", action="TerminateClient")
    assert not stage.records("server.fault")
    assert neighbour.rc is None
    neighbour.kill()


@root
def test_programs_that_are_stopped_all_at_once_hurt_no_neighbour(stage: Stage, start: Callable[..., Run]) -> None:
    """More than the orders that a user may give at a time."""
    agent = stage.with_agent("", extra='sharing = "one-server"')
    neighbour = stage.client(A, "mind", 600)
    neighbour.known()
    programs = [start(agent, B, "--", *stage.backend.client, "spin", "600") for _ in range(12)]

    def working() -> int:
        rows = agent.api.get("/v1/clients")["clients"]
        return sum(row["uid"] == B and bool(row["contexts"]) for row in rows)

    stage.until(lambda: working() == len(programs), "all work")
    for one in programs:
        os.kill(one.pid, signal.SIGTERM)
    for one in programs:
        one.ended()
    assert "not ended through MPS" not in "".join(one.said() for one in programs)
    assert not any(one["kind"].startswith("server.fault") for one in stage.records())
    assert neighbour.rc is None
    neighbour.kill()


@root
def test_without_an_agent_it_runs_all_the_same(stage: Stage, start: Callable[..., Run], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mpsagent.cli.main", "--socket", str(tmp_path / "none"), "run", "--"]
    env = {**os.environ, **stage.python_environment()}
    done = subprocess.run([*command, "sh", "-c", "sleep 1; exit 7"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "")
    assert "the program runs all the same" in done.stderr
    done = subprocess.run([*command, "/none/such"], env=env, capture_output=True, text=True)
    assert (done.returncode, "No such file" in done.stderr) == (127, True)
    done = subprocess.run([*command, "sh", "-c", "kill -9 $$"], env=env, capture_output=True, text=True)
    assert done.returncode == -9


@root
def test_one_that_stops_itself_is_not_left_behind(stage: Stage, start: Callable[..., Run]) -> None:
    """Ctrl-Z: the program stands with it, and goes on with it."""
    agent = stage.with_agent("")
    one = start(agent, A, "--", "/bin/sh", "-c", "echo there; sleep 600")
    one.prints("there")
    child = int(Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split()[0])
    os.kill(one.pid, signal.SIGTSTP)
    stage.until(lambda: _state(child) == "T" and _state(one.pid) == "T", "both stand")
    os.kill(one.pid, signal.SIGCONT)
    stage.until(lambda: _state(child) == "S", "it goes on")
    os.kill(one.pid, signal.SIGTERM)
    time.sleep(0.1)
    assert one.ended() == -signal.SIGTERM


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
