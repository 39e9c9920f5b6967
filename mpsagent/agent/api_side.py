"""The way to the api. Under systemd it is a unit of its own, started by its sockets; without systemd the agent starts
it, with the sockets that it is to serve, and it ends with the agent."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import sys
from contextlib import suppress
from pathlib import Path

from mpsagent.agent.settings import Settings

USER, NOBODY = "mpsagent-api", 65534
"""The user of its process; where there is no such user, uid 65534 (nobody)."""
PROGRAM = "mpsagent.api.main"
ENDS = 3.0
"""Seconds that it has to write down what it was told, after the agent."""


class ApiSide:
    """``public``: the listening socket for readers, where the agent has it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.public: socket.socket | None = None
        self._child: asyncio.subprocess.Process | None = None

    async def connect(self) -> socket.socket:
        """Raises OSError."""
        if self.public is not None:
            return await self._start(self.public)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._settings.pages)
        except OSError:
            sock.close()
            raise
        return sock

    async def close(self) -> None:
        if self._child is not None:
            with suppress(TimeoutError, ProcessLookupError):
                async with asyncio.timeout(ENDS):
                    await self._child.wait()
                return
            self._child.kill()
        if self.public is not None:
            self.public.close()

    async def _start(self, public: socket.socket) -> socket.socket:
        if self._child is not None and self._child.returncode is None:
            await self._child.wait()
        user, words = self._user(), []
        if self._settings.api_directory is not None:
            words = ["--state-directory", self._settings.api_directory]
            _prepare(Path(self._settings.api_directory), self._settings.state_directory, user)
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", PROGRAM, "--pages", str(theirs.fileno()), "--user", str(user)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            environment.pop("NOTIFY_SOCKET", None)
            self._child = await asyncio.create_subprocess_exec(
                *command, "--public", str(public.fileno()), *words, env=environment,
                pass_fds=(theirs.fileno(), public.fileno()), stdin=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        return ours

    def _user(self) -> int:
        if os.geteuid():
            return os.geteuid()
        with suppress(KeyError):
            return pwd.getpwnam(USER).pw_uid
        return NOBODY


def _prepare(directory: Path, before: str | None, user: int) -> None:
    """The api's own directory; a history that an earlier agent has written itself goes there."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.geteuid():
        return  # it is the api's already, and so is what lies there
    for old in sorted(Path(before).glob("history.db*")) if before else ():
        old.rename(directory / old.name)
        os.chown(directory / old.name, user, -1, follow_symlinks=False)
    os.chown(directory, user, -1)
