"""What `events` says of a client that is ended by order: each step in one line."""

from __future__ import annotations

import pytest

from tests.agent.stage import A, Stage

pytestmark = pytest.mark.root


@pytest.mark.parametrize("way", ['server = "own"', 'sharing = "apart"'])
def test_each_step_is_one_line_however_often_it_is_ordered(stage: Stage, way: str) -> None:
    agent = stage.with_agent('[hang]\nkill_grace = "1s"\n', extra=way)
    client, neighbour = stage.client(A, "sleep", 600), stage.client(A, "sleep", 600)
    client.known()
    neighbour.known()
    for _ in range(3):
        agent.api.order("terminate", pid=client.pid)
    client.ended()
    stage.record("client.ended", pid=client.pid)
    _, text = stage.cli(agent, "events", "-n", "100")
    for step in (f"asked MPS to end client {client.pid} ", f"sent SIGTERM to client {client.pid} "):
        assert len([line for line in text.splitlines() if step in line]) == 1, text
    assert neighbour.rc is None
