"""A client that is to be ended is resumed also when it is stopped only after the first look at it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from typing import Any

from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.performer import Performer
from mpsagent.decisions import actions as act
from mpsagent.decisions.policy import Policy
from mpsagent.hands.frontend import Reply, Status
from mpsagent.hands.processes import Process


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class OneProcess:
    def __init__(self, held: Process) -> None:
        self.held = held

    def get(self, pid: int) -> Process:
        return self.held


class Daemon:
    """Stops the client right after it was asked, and answers when the client runs again."""

    def __init__(self, client: subprocess.Popen[bytes]) -> None:
        self.client = client
        self.stopped = False

    async def run(self, commands: list[str], **_: Any) -> Reply:
        self.client.send_signal(signal.SIGSTOP)
        while not self.stopped or state_of(self.client.pid) == "T":
            self.stopped = self.stopped or state_of(self.client.pid) == "T"
            await asyncio.sleep(0.01)
        return Reply(Status.ANSWERED, "0\n", "", 0.01)


async def _terminate(client: subprocess.Popen[bytes]) -> act.Outcome:
    held = Process.open(client.pid)
    assert held is not None
    daemon = Daemon(client)
    performer = Performer(Policy(), daemon, None, OneProcess(held), SteadyClock(), lambda _: None)  # type: ignore[arg-type]
    action = act.TerminateClient(server=1, pid=client.pid, deadline=5.0, reason="", rule="")
    outcome = await asyncio.wait_for(performer.perform(action), 30)
    assert daemon.stopped
    return outcome


def test_a_client_that_stops_while_it_is_asked_is_resumed() -> None:
    """SIGSTOP takes effect a moment after it was sent; found by the demo on a busy machine, once in ten."""
    client = subprocess.Popen(["sleep", "60"])
    try:
        assert asyncio.run(_terminate(client)).ok
    finally:
        client.kill()
        client.wait()
