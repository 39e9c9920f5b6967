"""A crowd of one user: all its clients knock at the same time, and each is served."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.agent.stage import A, Stage

POLICY = f'[limits]\nthreads = 10\nmemory = "2G"\n[user.{A}]\nthreads = 40\n'
CROWD = 150


def knocking() -> int:
    """Connections at public sockets that the gate has not accepted yet."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(words[4:6] == ["0005", "02"] and words[-1].endswith("/control") for words in lines)


def test_a_crowd_that_knocks_while_the_gate_is_busy_is_served_to_the_last(stage: Stage) -> None:
    """They are greeted all together, and say what they are when the processors come to each."""
    agent = stage.with_agent(POLICY)
    gate = stage.gate(agent)
    os.kill(gate, signal.SIGSTOP)
    try:
        crowd = [stage.client(A, "query") for _ in range(CROWD)]
        stage.until(lambda: knocking() >= CROWD, "all have connected")
    finally:
        os.kill(gate, signal.SIGCONT)
    for one in crowd:
        assert one.ended(90) == 0, one.text()
        assert one.inside(40), one.text()
    assert not stage.records("client.refused")
    stage.no_problem(agent)
