"""The control daemon as a process that the agent itself starts: for containers, the demo and machines without systemd.

``-d`` forks twice, so the daemon is nobody's child and outlives the agent, which adopts it when it comes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from mpsagent.mps.units import percent_text
from mpsagent.system.control import PID_FILE, PROGRAM, Held, Running, Trouble, TroubleKind, prove, read_pid_file, search
from mpsagent.system.spawn import find_program, run_program

START_DEADLINE = 15.0
"""Seconds from the call to a proved daemon; 45 ms on an idle machine (recording 01, S1)."""


class ControlChild(Held):
    """Supervises the daemon of ``pipe_directory``. ``on_gone(pid)`` is called when it ends, whatever the reason."""

    def __init__(self, pipe_directory: str, on_gone: Callable[[int], None], *, program: str = PROGRAM) -> None:
        super().__init__(on_gone)
        self.pipe_directory = pipe_directory
        self.program = program

    async def start(
        self, environment: Mapping[str, str], threads: float, *, deadline: float = START_DEADLINE
    ) -> Running | Trouble:
        """Starts a daemon. ``environment`` is all it gets, but for the pipe directory and ``threads``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + deadline
        path = find_program(self.program, environment)
        if path is None:
            return _failed(f"{self.program}: no such program, or not executable")
        try:  # of an earlier daemon; otherwise it might be taken for the new one's
            Path(self.pipe_directory, PID_FILE).unlink(missing_ok=True)  # noqa: ASYNC240
        except OSError as error:
            return _failed(f"{self.pipe_directory}/{PID_FILE} of an earlier daemon: {error.strerror}")
        own = {
            "CUDA_MPS_PIPE_DIRECTORY": self.pipe_directory,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent_text(threads),
        }
        ended = await run_program([path, "-d"], {**environment, **own}, deadline=deadline)
        said = " ".join((ended.err + " " + ended.out).split())[:300]
        if ended.code != 0:
            hint = " (it could not load libcuda.so.1)" if ended.code == 244 else ""
            return _failed(ended.problem or f"{path} -d ended with status {ended.code}{hint}: {said or 'no message'}")
        while loop.time() < until:
            pid = read_pid_file(self.pipe_directory)
            if pid is not None:
                found = await prove(pid, self.pipe_directory, "started by this agent", self.program)
                if isinstance(found, Running):
                    return self.hold(found)
                if found.kind is TroubleKind.UNSAFE:
                    return found
            await asyncio.sleep(0.005)
        return _failed(f"{path} -d ended well, but no control daemon was there after {deadline:g} s. {said}".rstrip())

    async def adopt(self) -> Running | Trouble:
        found = await search(self.pipe_directory, self.program)
        return self.hold(found) if isinstance(found, Running) else found


def _failed(text: str) -> Trouble:
    return Trouble(TroubleKind.FAILED, text)
