"""The stage of the agent's tests: `mpsagent run` with its gate beside the simulator, and clients of several users.

Records are read from the history's file: they are there when an agent has been killed, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpsagent.agent.gate_keeper import is_keeper
from mpsagent.api import database
from mpsagent.linux.processes import parent
from tests.conformance import rig as rigs
from tests.scenes import stage as scenes
from tests.scenes.stage import USERS, A, Agent, B, C, Client, D, Machine, StageError

__all__ = ["USERS", "A", "Agent", "B", "C", "Client", "D", "Machine", "Stage", "StageError"]


class Stage(scenes.Stage):
    """What every test here needs beside clients and agents."""

    def with_agent(self, policy: str = "", *, control: str | None = None, extra: str = "") -> Agent:
        """The agent at work: its control daemon runs, and the gate has its admissions."""
        self.policy(policy, control=control, extra=extra)
        return self.again()

    def again(self, *, ready: bool = True) -> Agent:
        """Another agent on the same policy."""
        agent = self.start_agent()
        self.answering(agent)
        if ready:
            self.until(lambda: not self.waits_for(agent), "the agent is ready")
        return agent

    def waits_for(self, agent: Agent) -> str:
        """What is missing until clients are served."""
        status = agent.api.status()
        if "control" not in status:
            raise StageError(f"no status: {status}\n{self.last_words()}")
        if not status["control"] and status["mode"]["sharing"] != "per-user":
            return "a control daemon"
        return "" if status["gate"]["in_force"] else "the gate"

    def killed(self, agent: Agent) -> None:
        self.stop_agent(agent, signal.SIGKILL)

    def problem(self, agent: Agent, words: str) -> str:
        """Waits for a condition with these words, and returns all of it."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = [one for one in agent.api.problems() if words in one]
            return bool(found)

        self.until(is_there, f"a condition: {words}")
        return found[0]

    def no_problem(self, agent: Agent) -> None:
        self.until(lambda: not agent.api.problems(), f"healthy again, not {agent.api.problems()}")

    # What is on record

    def records(self, kind: str | None = None, **fields: object) -> list[dict[str, Any]]:
        """As far as they are on disk; of an agent that runs, all until now."""
        for agent in self.agents:
            agent.written_down()
        return self._records(kind, fields)

    def _records(self, kind: str | None, fields: Mapping[str, object]) -> list[dict[str, Any]]:
        try:
            found = database.find(self.place / "state-api" / database.NAME, database.Query(after=0, limit=1_000_000))
        except OSError:  # not there yet
            return []
        return [
            one
            for one in found
            if kind in (None, one["kind"]) and all(one.get(name) == value for name, value in fields.items())
        ]

    def record(self, kind: str, **fields: object) -> dict[str, Any]:
        """Waits for a record; the first one."""
        found: list[dict[str, Any]] = []

        def is_there() -> bool:
            found[:] = self._records(kind, fields)
            return bool(found)

        self.until(is_there, f"on record: {kind} {fields}")
        return found[0]

    def waiting(self, client: Client) -> None:
        """Waits until the gate holds it."""
        self.record("client.waiting", pid=client.pid)

    # Processes

    def gate(self, agent: Agent) -> int:
        """The gate's pid."""
        found = agent.api.status()["gate"]["pid"]
        assert isinstance(found, int)
        return found

    def keeper(self, agent: Agent) -> int:
        """The pid of the gate's keeper."""
        found = parent(self.gate(agent))
        assert found is not None
        assert is_keeper(found)
        return found

    def api(self, agent: Agent) -> int | None:
        """The api's pid: without systemd it is the agent's child."""
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"mpsagent.api.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found[0] if found else None

    def control(self, agent: Agent) -> int:
        """The control daemon's pid."""
        found = agent.api.status()["control"]["pid"]
        assert isinstance(found, int)
        return found

    def exact(self, uid: int, percent: float) -> None:
        """A new client gets what it is due."""
        client = self.client(uid)
        assert client.ended() == 0, client.text()
        assert client.inside(percent), client.text()

    def hidden(self) -> Path:
        return self.place / "run" / "instances" / "scene" / "pipe"

    def front_end(self, command: str) -> rigs.Reply:
        """NVIDIA's front-end of root on the hidden daemon."""
        started = self.rig.run(
            [self.backend.control], stdin=(command + "\n").encode(),
            env=self.rig.environment({"CUDA_MPS_PIPE_DIRECTORY": str(self.hidden())}),
        )  # fmt: skip
        return self.rig.finish(started)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
