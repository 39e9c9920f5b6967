"""The floor, written down for systemd: when the agent has ended, ``mpsagent-floor`` puts the limits back with it.

An agent that is killed right after it has armed for one user leaves that user's limits as the default for the next.
Its helper (:mod:`mpsagent.system.last_will`) sees to that at once, unless it is killed with it; its unit's ExecStopPost=
runs when no process of the agent is left whose command could come later, and needs nothing but this file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class FloorFile:
    """``directory``/floor.``instance``: the pipe directory on the first line, then the commands of the front-end."""

    def __init__(self, instance: str, directory: str = "/run/mpsagent") -> None:
        self.path = Path(directory, f"floor.{instance}")
        self._written: str | None = None

    def keep(self, pipe_directory: str, commands: Sequence[str]) -> str | None:
        """Complete or not there at all; only written when it changes; without commands there is none. None, or what is
        wrong."""
        text = "\n".join((pipe_directory, *commands)) + "\n" if commands else ""
        if text == self._written:
            return None
        if any("\n" in line for line in (pipe_directory, *commands)):
            return f"{self.path}: no line may have a line break in it"
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            if text:
                fresh.unlink(missing_ok=True)
                fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "w") as file:
                    file.write(text)
                fresh.rename(self.path)
            else:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            with suppress(OSError):
                fresh.unlink(missing_ok=True)
            return f"{self.path}: {error.strerror}"
        self._written = text
        return None
