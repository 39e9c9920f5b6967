"""`mpsagent-cli top` beside a real agent: what it shows is so, and what it is told to end ends."""

from __future__ import annotations

from tests.agent.stage import A, B, Stage
from tests.cli.test_top import Screen, with_tmux


@with_tmux
def test_a_client_is_found_and_ended(stage: Stage) -> None:
    """A works and B waits; after the question and a yes A's process is gone, and B works."""
    stage.with_agent("[limits]\nthreads = 50\n")
    first = stage.client(A, "sleep", 600)
    first.working()
    second = stage.client(B, "sleep", 600)
    stage.waiting(second)
    screen = Screen(stage.place / "agent.sock", 100, 30)
    try:
        screen.shows(lambda lines: any("waiting" in line and str(second.pid) in line for line in lines), "B waits")
        screen.keys("/", *str(first.pid), "Enter")
        screen.has("1 client, by state")
        screen.keys("k")
        screen.has(f"y/N: end client {first.pid} of ")
        assert first.rc is None
        screen.keys("y")
        screen.has(f"client {first.pid} is being ended")
        stage.record("client.ended", pid=first.pid, outcome="ended")
        screen.keys("Escape")
        screen.shows(lambda lines: any("running" in line and str(second.pid) in line for line in lines), "B works")
        second.working()
    finally:
        screen.close()
