"""Duplicates of the GPU's files that a client has open, kept while its work leaves the GPU.

A client whose process exits while its work is still on a busy GPU is a fatal fault for all its neighbours, even when
``terminate_client`` was answered and even when the process exits by itself (recording 16). As long as a duplicate of
its descriptors exists, the driver keeps its memory and its channels, and the process may exit.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal

from mpsagent.linux.processes import Process
from mpsagent.system.spawn import Child, find_program

MOST_OPEN = 16_384
"""Descriptors of a process that are looked at."""
MOST = 512
"""Files of the GPU that are held; a program of PyTorch has 35 open."""


class Hold:
    """A process that has the duplicates. It closes them, because the driver may take seconds for the last one."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @property
    def ended(self) -> asyncio.Future[int]:
        return self._child.ended

    def end_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._child.kill)


class GpuFiles:
    """``directory``: where the device files are."""

    def __init__(self, directory: str = "/dev") -> None:
        self._prefix = f"{directory}/nvidia"

    def hold(self, process: Process, seconds: float) -> Hold:
        """Return a hold on the files of the GPU that a process has open, for at most ``seconds``. Raises OSError: the
        process may not be looked into, has ended, has none open, or too many.

        The hold outlives a crash of the agent: SIGTERM, which systemd sends to the processes that a dead agent leaves,
        is blocked there."""
        found: list[int] = []
        try:
            self._duplicate(process, found)
            sleep = find_program("sleep", {"PATH": "/usr/bin:/bin"})
            if sleep is None:
                raise OSError(errno.ENOENT, "there is no program called sleep")
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            found.append(null)
            for one in found:
                os.set_inheritable(one, True)
            return Hold(Child([sleep, f"{seconds:g}"], {}, null, null, null, blocked={signal.SIGTERM}))
        finally:
            for one in found:
                os.close(one)

    def _duplicate(self, process: Process, found: list[int]) -> None:
        with os.scandir(f"/proc/{process.pid}/fd") as entries:
            for count, entry in enumerate(entries):
                if count >= MOST_OPEN or len(found) >= MOST:
                    raise OSError(errno.EMFILE, "it has too many files open")
                if self._is_ours(entry.path):
                    found.append(process.duplicate(int(entry.name)))
        if not any(self._is_ours(f"/proc/self/fd/{one}") for one in found):
            raise OSError(errno.ENOENT, "it has none open")

    def _is_ours(self, link: str) -> bool:
        try:
            return os.readlink(link).startswith(self._prefix)  # noqa: PTH115 - thousands of them
        except FileNotFoundError:
            return False
