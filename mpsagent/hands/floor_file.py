"""The floor, written down for systemd: when the agent dies, ``mpsagent-floor`` puts the limits back with it.

An agent that is killed right after it has armed for one user leaves that user's limits as the default for the next. Its
unit's ExecStopPost= runs within milliseconds of its death, whatever the reason, and needs nothing but this file.
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
        self._written = ""

    def keep(self, pipe_directory: str, commands: Sequence[str]) -> None:
        """Complete or not there at all; only written when it changes. Raises OSError, and ValueError for a name with a
        line break in it."""
        if any("\n" in line for line in (pipe_directory, *commands)):
            raise ValueError(f"{self.path}: no line may have a line break in it")
        text = "\n".join((pipe_directory, *commands)) + "\n"
        if text == self._written:
            return
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(text)
            fresh.rename(self.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        self._written = text

    def forget(self) -> None:
        """There is no control daemon to put back to anything."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        self._written = ""
