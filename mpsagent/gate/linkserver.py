"""The gate's end of the link: one agent at a time, the latest wins; what it is sent is bounded and never waited for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mpsagent.linux import peers
from mpsagent.linux.channel import Channel, Opened
from mpsagent.linux.listen import bind_masked
from mpsagent.linux.peers import Credentials
from mpsagent.wire.codec import LONGEST_PACKET, LinkError, encode
from mpsagent.wire.link import FromAgent, FromGate, decode_from_agent

MOST_WAITING = 65_536
"""Messages that wait for an agent that does not read; beyond it the link is cut, and the next one starts afresh."""
AT_A_TIME = 64

Outgoing = tuple[FromGate, Opened | None]


@dataclass(eq=False, repr=False)
class LinkServer:
    """``sync`` says everything a new agent must hear; ``receive`` gets what the agent says."""

    _loop: asyncio.AbstractEventLoop
    _path: Path
    _sync: Callable[[], Iterable[Outgoing]]
    _receive: Callable[[FromAgent], None]
    _report: Callable[[str], None]
    _agent: Channel | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._listener = _listen(self._path)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def send(self, message: FromGate, pidfd: Opened | None = None) -> None:
        """``pidfd`` is called when the message goes out; the descriptor is closed then."""
        if self._agent is None:
            return
        if self._agent.waiting >= MOST_WAITING:
            self._cut(f"the agent has left {MOST_WAITING} messages unread; the link is closed")
            return
        try:
            self._agent.send(encode(message), opened=pidfd)
        except LinkError as error:
            self._report(f"a message to the agent is left out: {error}")

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        try:
            uid = peers.peer(sock).uid
        except OSError:
            uid = -1
        if uid not in (0, os.geteuid()):
            self._report(f"a process of user {uid} has connected to {self._path} and was refused")
            sock.close()
            return
        self._hang_up()
        self._agent = Channel(
            self._loop, sock, self._read, self._hang_up,
            longest=LONGEST_PACKET + 1, most_waiting=MOST_WAITING, at_a_time=AT_A_TIME,
        )  # fmt: skip
        for message, pidfd in self._sync():
            self.send(message, pidfd)

    def _hang_up(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None

    def _cut(self, why: str) -> None:
        self._report(why)
        self._hang_up()

    def _read(self, data: bytes, _who: Credentials | None, _descriptors: list[int]) -> None:
        try:
            message = decode_from_agent(data)
        except LinkError as error:
            self._cut(f"the agent sent a message that is not understood, and the link is closed: {error}")
            return
        self._receive(message)


def _listen(path: Path) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        bind_masked(listener, str(path))
        listener.listen(8)
    except OSError:
        listener.close()
        raise
    return listener
