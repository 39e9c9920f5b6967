"""Who listens goes on where the socket's file is gone, or closed to users: healthy means that they can come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.agent.stage import A, Agent, Stage


@contextmanager
def away(path: Path) -> Iterator[None]:
    aside = path.with_name("aside")
    path.rename(aside)
    yield
    aside.rename(path)


@contextmanager
def mode(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    yield
    path.chmod(before)


def unsure(agent: Agent, words: str) -> list[str]:
    return [one["what"] for one in agent.api.status()["not_guaranteed"] if words in one["what"]]


def test_sockets_for_orders_that_are_gone_or_closed_are_said(stage: Stage) -> None:
    """Removed, stopped or masked alone, each left a status that said healthy."""
    agent = stage.with_agent()
    orders, admin = (agent.api.path.with_name(f"agent-{name}.sock") for name in ("orders", "admin"))
    with mode(orders, 0o600):
        stage.problem(agent, f"{orders} is closed to users (mode 0600): users cannot end their own clients")
    with away(orders):
        stage.problem(agent, f"{orders} has gone: users cannot end their own clients")
    with away(admin):
        stage.until(lambda: unsure(agent, f"{admin} has gone"), "said")
        stage.no_problem(agent)
        assert stage.cli(agent, "drain")[0] == stage.cli(agent, "resume")[0] == 0, "root's come by the other one"
    stage.until(lambda: not unsure(agent, "agent-admin.sock"), "nothing to say")


def test_a_gate_that_is_stopped_is_said(stage: Stage) -> None:
    """systemd's watchdog ends it; without systemd nobody does, and who came waited beside a healthy status."""
    agent = stage.with_agent()
    gate = stage.gate(agent)
    os.kill(gate, signal.SIGSTOP)
    stage.problem(agent, f"the gate (process {gate}) is stopped: new clients wait")
    os.kill(gate, signal.SIGCONT)
    stage.no_problem(agent)


def test_a_public_directory_that_keeps_users_out_or_lets_them_replace_its_sockets_is_said(stage: Stage) -> None:
    """A program that may not connect runs outside MPS, without limits."""
    agent = stage.with_agent("[limits]\nactive_threads = '20%'\n")
    public, words = Path(stage.rig.pipe), "programs that start now run outside MPS, without limits"
    for path, closed in ((public / "control", 0o600), (public, 0o700)):
        with mode(path, closed):
            stage.problem(agent, f"{path} is closed to users (mode {closed:04o}): {words}")
    with mode(public, 0o777):
        stage.problem(agent, f"{public} can be written to by others (mode 0777)")
    with away(public / "control"):
        (public / "control").write_text("")
        stage.problem(agent, f"{public / 'control'} is no socket: {words}")
    stage.no_problem(agent)
    stage.exact(A, 20)


def test_a_hidden_directory_that_lets_nobody_or_everybody_in_is_said(stage: Stage) -> None:
    """Who came waited beside a healthy status, or could go past the gate."""
    agent = stage.with_agent()
    hidden = stage.hidden()
    with mode(hidden, 0o711):
        stage.problem(agent, f"{hidden} has mode 0711: users may go past the gate")
    with mode(hidden.parent, 0o700):
        stage.problem(agent, f"{hidden.parent} has mode 0700: MPS's servers cannot start")
    stage.no_problem(agent)
    (hidden / "control").unlink()
    stage.problem(agent, f"{hidden}/control has gone: no client can be handed over; mpsagent-cli restart-mps")
    assert stage.cli(agent, "restart-mps")[0] == 0
    stage.no_problem(agent)
    stage.exact(A, 100)
