"""The gate's end of the link: one agent at a time, the latest wins; what it is sent is bounded and never waited for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mpsagent.gate import identity
from mpsagent.gate.channel import close_all, take
from mpsagent.wire.codec import LONGEST_PACKET, LinkError, encode
from mpsagent.wire.descriptors import with_descriptors
from mpsagent.wire.link import FromAgent, FromGate, decode_from_agent

MOST_WAITING = 65_536
"""Messages that wait for an agent that does not read; beyond it the link is cut, and the next one starts afresh."""
AT_A_TIME = 64

Pidfd = Callable[[], int | None]
Outgoing = tuple[FromGate, Pidfd | None]


class LinkServer:
    """``sync`` says everything a new agent must hear; ``receive`` gets what the agent says."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        path: Path,
        sync: Callable[[], Iterable[Outgoing]],
        receive: Callable[[FromAgent], None],
        report: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._path = path
        self._sync = sync
        self._receive = receive
        self._report = report
        self._agent: socket.socket | None = None
        self._waiting: deque[Outgoing] = deque()
        self._listener = _listen(path)
        loop.add_reader(self._listener.fileno(), self._accept)

    def send(self, message: FromGate, pidfd: Pidfd | None = None) -> None:
        """``pidfd`` is called when the message goes out; the descriptor is closed then."""
        if self._agent is None:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._report(f"the agent has left {MOST_WAITING} messages unread; its link is cut")
            self._hang_up()
            return
        self._waiting.append((message, pidfd))
        if len(self._waiting) == 1:
            self._flush()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        try:
            uid = identity.peer(sock).uid
        except OSError:
            uid = -1
        if uid not in (0, os.geteuid()):
            self._report(f"a process of user {uid} has connected to {self._path} and was turned away")
            sock.close()
            return
        self._hang_up()
        self._agent = sock
        self._waiting.extend(self._sync())
        self._loop.add_reader(sock.fileno(), self._read)
        self._flush()

    def _hang_up(self) -> None:
        if self._agent is not None:
            self._loop.remove_reader(self._agent.fileno())
            self._loop.remove_writer(self._agent.fileno())
            self._agent.close()
            self._agent = None
            self._waiting.clear()

    def _read(self) -> None:
        for _ in range(AT_A_TIME):
            if self._agent is None:
                return
            try:
                data, _, _ = take(self._agent, LONGEST_PACKET + 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._hang_up()
                return
            try:
                message = decode_from_agent(data)
            except LinkError as error:
                self._report(f"the agent said what is not understood, its link is cut: {error}")
                self._hang_up()
                return
            self._receive(message)

    def _flush(self) -> None:
        """Sends what can be sent, some at a time; the rest when the agent has read."""
        for _ in range(AT_A_TIME):
            if self._agent is None or not self._waiting:
                break
            message, pidfd = self._waiting[0]
            descriptor = pidfd() if pidfd is not None else None
            descriptors = () if descriptor is None else (descriptor,)
            try:
                self._agent.sendmsg([encode(message)], with_descriptors(descriptors))
            except (BlockingIOError, InterruptedError):
                break
            except (OSError, LinkError) as error:
                if isinstance(error, OSError):
                    self._hang_up()
                    return
                self._report(f"a message to the agent is left out: {error}")
            finally:
                close_all(descriptors)
            self._waiting.popleft()
        if self._agent is None:
            return
        if self._waiting:
            self._loop.add_writer(self._agent.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._agent.fileno())


def _listen(path: Path) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(8)
    except OSError:
        listener.close()
        raise
    return listener
