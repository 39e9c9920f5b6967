"""One front-end session at a control daemon's socket, from connecting to its end: the gate asks so, and the agent."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from mpsagent.gate.channel import Channel, as_user
from mpsagent.mps.rendezvous import Credentials
from mpsagent.mps.session import Session

CONTROL = "control"
PRIVILEGED = "control_privileged"


def connect(directory: Path, name: str) -> socket.socket:
    """A connection to a socket of the hidden directory, by way of a descriptor of the directory, because a socket's
    path may have 107 bytes only. Raises OSError; BlockingIOError: its backlog is full."""
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(f"/proc/self/fd/{place}/{name}")
        except OSError:
            sock.close()
            raise
        return sock
    finally:
        os.close(place)


class Question:
    """``done`` gets the session when it is over, never after :meth:`close`; ``greeted`` hears the greeting. Closed
    early, it leaves nothing at the daemon: what was not sent is never sent, and a connection that has ended blocks no
    one. The constructor raises what :func:`connect` does, and ValueError for what is no command."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        directory: Path,
        commands: Sequence[str],
        asker: Credentials,
        done: Callable[[Session], None],
        greeted: Callable[[bytes, socket.socket], None] = lambda _data, _sock: None,
    ) -> None:
        self._session = Session(commands)
        self._asker = asker
        self._done = done
        self._greeted = greeted
        # the daemon takes its owner's settings at the privileged socket only (550), and no other's session there
        name = PRIVILEGED if asker.uid in (0, os.geteuid()) else CONTROL
        self._channel = Channel(loop, connect(directory, name), self._receive, self._closed)

    def close(self) -> None:
        self._channel.close()

    def _receive(self, data: bytes, _who: Credentials | None, _descriptors: list[int]) -> None:
        first = self._session.greeting is None
        for message in self._session.message(data):
            self._channel.send(message, as_user(self._asker))
        if first:
            self._greeted(data, self._channel.sock)
        if self._session.how is not None:
            self._channel.close()
            self._done(self._session)

    def _closed(self) -> None:
        self._session.closed()
        self._done(self._session)
