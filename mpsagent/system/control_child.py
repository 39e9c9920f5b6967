"""The control daemon as a process that the agent itself starts: for containers, the demo and machines without systemd.

``-d`` forks twice, so the daemon is a child of init and outlives the agent, which adopts it when it comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from mpsagent.system.control import (
    MULTIUSER,
    PID_FILE,
    PROGRAM,
    ControlProblem,
    ControlSupervisor,
    ProblemKind,
    Running,
    daemon_environment,
    installed,
    start_failure,
)
from mpsagent.system.control_search import search
from mpsagent.system.spawn import run_program

START_DEADLINE = 15.0
"""Seconds in which the call ends; 45 ms on an idle machine (recording 01, S1)."""
LOOKS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.45)
"""Seconds between the looks for a daemon whose first process has ended well: it has forked before that, so one that is
not there then has died."""


class ControlChild(ControlSupervisor):
    """Supervises the daemon of the hidden directory ``pipe_directory``. ``on_gone(pid)`` is called when it ends."""

    def __init__(self, pipe_directory: str, on_gone: Callable[[int], None], *, program: str = PROGRAM) -> None:
        super().__init__(pipe_directory, on_gone, program)

    async def start(
        self,
        environment: Mapping[str, str],
        threads: float,
        *,
        multiuser: bool = False,
        deadline: float = START_DEADLINE,
    ) -> Running | ControlProblem:
        """Starts a daemon. ``environment`` is all it gets, but for the pipe directory and ``threads``."""
        path = installed(self.program, environment)
        if isinstance(path, ControlProblem):
            return path
        try:  # of an earlier daemon; otherwise it might be taken for the new one's
            Path(self.pipe_directory, PID_FILE).unlink(missing_ok=True)  # noqa: ASYNC240
        except OSError as error:
            return _failed(f"{self.pipe_directory}/{PID_FILE} of an earlier daemon: {error.strerror}")
        own = daemon_environment(self.pipe_directory, threads)
        options = ["-d", *([MULTIUSER] if multiuser else [])]
        ended = await run_program([path, *options], {**environment, **own}, deadline=deadline)
        said = " ".join((ended.err + " " + ended.out).split())[:300]
        if ended.problem is not None:
            return _failed(ended.problem)
        if ended.code != 0:
            return start_failure(path, ended.code, said, multiuser)
        for pause in LOOKS:  # drivers 470 and 535 write no pid file: it is searched for
            found = await search(self.pipe_directory, self.program, "started by this agent")
            if isinstance(found, Running):
                return self.hold(found)
            if found.kind is ProblemKind.UNSAFE:
                return found
            await asyncio.sleep(pause)
        return _failed(f"{path} -d ended well, but no control daemon was there a second later. {said}".rstrip())

    async def adopt(self) -> Running | ControlProblem:
        found = await search(self.pipe_directory, self.program)
        return self.hold(found) if isinstance(found, Running) else found


def _failed(text: str) -> ControlProblem:
    return ControlProblem(ProblemKind.FAILED, text)
