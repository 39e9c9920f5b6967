"""Stops client processes for a while and lets them go on, so that none stays stopped when its agent dies.

Each process has an empty file ``PID.START`` in a directory of root's below /run for as long as it is stopped: it is
there before SIGSTOP is sent, and goes after SIGCONT. Who finds the files (an agent that starts; ``mpsagent-open thaw``,
which the agent's unit runs whenever the agent has ended) lets the processes go on. SIGKILL of the agent, at whatever
moment, so leaves no process stopped; a restart of the machine leaves neither files nor processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from mpsagent.linux.processes import Process

STOPS = 2.0
"""Seconds in which a process has to stand. One that is in the kernel stops when it comes back from there."""
LOOK_FIRST, LOOK_MOST = 0.001, 0.05


class Freezer:
    """``directory``: of one instance, made when it is needed."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    async def freeze(self, process: Process) -> str | None:
        """None when it stands, else why not. One that another program has stopped is left alone, now and by
        :meth:`thaw`."""
        if process.stopped():
            return None
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            os.close(os.open(self._file(process), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            return f"{self._directory} cannot be written: {error.strerror}"
        problem = process.send(signal.SIGSTOP)
        until, pause = time.monotonic() + STOPS, LOOK_FIRST
        while problem is None and not process.stopped():
            if not process.alive:
                problem = f"process {process.pid} has ended"
            elif time.monotonic() > until:
                problem = f"process {process.pid} did not stop within {STOPS:g} s"
            else:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LOOK_MOST)
        if problem is not None:
            self.thaw(process)
        return problem

    def thaw(self, process: Process) -> str | None:
        """None when it goes on, or was not stopped by us; else why not."""
        file = self._file(process)
        if not file.exists():
            return None
        problem = process.send(signal.SIGCONT)
        if problem is None or not process.alive:
            file.unlink(missing_ok=True)
        return problem

    def forget(self, pid: int, start: int) -> None:
        """The process has ended."""
        with suppress(OSError):
            (self._directory / f"{pid}.{start}").unlink(missing_ok=True)

    def thaw_all(self) -> int:
        """Every process that has a file; how many were found stopped."""
        found = 0
        with suppress(FileNotFoundError):
            for file in list(self._directory.iterdir()):
                pid, _, start = file.name.partition(".")
                if not (pid.isdecimal() and start.isdecimal()):
                    continue
                process = Process.open(int(pid), started=int(start))
                if process is not None:
                    found += process.stopped()
                    process.send(signal.SIGCONT)
                    process.close()
                file.unlink(missing_ok=True)
        return found

    def _file(self, process: Process) -> Path:
        return self._directory / f"{process.pid}.{process.started}"
