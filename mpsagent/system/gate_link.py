"""The agent's end of the link to the gate: it connects, comes back after each break, and never makes the loop wait.

Each message of the gate is delivered with the process that it speaks of, held by the pidfd that the gate took when
that process connected. Whatever is sent fits into bounded buffers; what does not is a break, and after a break
everything is said anew by both sides."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from mpsagent.linux.backoff import Backoff
from mpsagent.linux.channel import Channel
from mpsagent.linux.descriptors import close_all, may_keep
from mpsagent.linux.peers import Credentials, peer
from mpsagent.linux.processes import Process
from mpsagent.wire.codec import LONGEST_PACKET, LinkError, encode
from mpsagent.wire.link import VERSION, Admissions, FromAgent, FromGate, Hello, Knock, Known, Synced, decode_from_gate

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.1
"""Seconds until a connection is tried again, doubling: a gate that comes back serves at once, by what it was told last,
and what passes before the agent is there again is not heard."""
GOOD = 1.0
"""Seconds after which a link counts as one that had worked."""
AT_A_TIME = 64
"""Packets read before everything else has its turn."""
MOST_UNSENT = 256
_DESCRIPTORS = 8


class GateLink:
    """``receive(message, process)`` gets every message, in order; ``process`` belongs to the receiver, who closes it.
    ``read()`` comes after those that lay there together. ``connected()`` comes after each ``Hello``, ``lost(why)``
    when the link has broken: what was known by it may be out of date from then on. All are called in the loop of
    :meth:`start`. ``synced``: the gate has said all that it holds."""

    def __init__(
        self,
        path: str,
        receive: Callable[[FromGate, Process | None], None],
        *,
        read: Callable[[], None] = lambda: None,
        connected: Callable[[], None] = lambda: None,
        lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.path = path
        self.problem: str | None = "not connected yet"
        """Why there is no link, in words; None while there is one."""
        self.synced = False
        self._receive, self._received = receive, read
        self._connected, self._lost = connected, lost
        self._channel: Channel | None = None
        self._greeted = False
        self._pauses, self._since = Backoff(FIRST_PAUSE, LONGEST_PAUSE), 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Connects now, or as soon as the gate is there."""
        self._loop = asyncio.get_running_loop()
        self._connect()

    def close(self) -> None:
        """For good; nothing is called any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._hang_up()
        self._loop = None

    def send(self, message: FromAgent) -> bool:
        """Says it to the gate, now or as soon as it reads. False when there is no link (say it after ``connected()``),
        or the gate has stopped reading and the link is cut. Raises LinkError for a message that is too long."""
        data = encode(message)
        if self._channel is None or not self._greeted:
            return False
        table = message.instance if isinstance(message, Admissions) else None
        if table is None and self._channel.waiting >= MOST_UNSENT:
            self._break(f"the gate has left {MOST_UNSENT} messages unread")
            return False
        # a table is a whole each time: an older one that was not sent yet is out of date
        return self._channel.send(data, of=table) is None

    # --- the connection ---

    def _connect(self) -> None:
        self._timer = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(self.path)
            uid = peer(sock).uid
            if uid not in (0, os.geteuid()):
                raise PermissionError(0, f"a process of uid {uid} listens there, and not the gate")
        except OSError as error:
            sock.close()
            self.problem = f"the gate cannot be reached at {self.path}: {error.strerror}"
            self._again()
            return
        assert self._loop is not None
        self._since = self._loop.time()
        self.problem = "the gate has not answered yet"
        self._channel = Channel(
            self._loop, sock, self._take, self._closed,
            longest=LONGEST_PACKET + 1, descriptors=_DESCRIPTORS, at_a_time=AT_A_TIME, after=self._received,
        )  # fmt: skip

    def _again(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(self._pauses.pause(), self._connect)

    def _hang_up(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._greeted = self.synced = False

    def _break(self, why: str) -> None:
        greeted = self._greeted
        self._hang_up()
        self.problem = why
        if self._loop is not None and self._timer is None:
            if self._loop.time() - self._since > GOOD:
                self._pauses.reset()
            self._again()
        if greeted:
            self._lost(why)

    # --- packets ---

    def _closed(self) -> None:
        self._break("the gate has closed the link: it ended, or another agent has taken it over")

    def _take(self, data: bytes, _who: Credentials | None, descriptors: list[int]) -> None:
        """Delivers one packet."""
        try:
            message = decode_from_gate(data)
            why = self._deliver(message, _process(message, descriptors))
        except LinkError as error:
            why = f"the gate sent a message that is not understood: {error}"
        finally:
            close_all(descriptors)
        if why is not None:
            self._break(why)

    def _deliver(self, message: FromGate, process: Process | None) -> str | None:
        if isinstance(message, Hello):
            if message.version != VERSION:
                older = ("gate", "mpsagent-gate") if message.version < VERSION else ("agent", "mpsagent")
                said = f"the gate speaks version {message.version} of the link, this agent {VERSION}"
                return f"{said}: the {older[0]} is older and has to be restarted (systemctl restart {older[1]})"
            self._greeted, self.problem = True, None
            self._receive(message, None)
            self._connected()
            return None
        if not self._greeted:
            if process is not None:
                process.close()
            return "the gate did not say hello"
        self._receive(message, process)
        if isinstance(message, Synced) and self._channel is not None:
            self.synced = True
        return None


def _process(message: FromGate, descriptors: list[int]) -> Process | None:
    """The process of a ``Knock`` or ``Known``, whose pidfd is taken out of ``descriptors``. A descriptor that is not
    the pidfd of that process is dropped: then nothing can be done to it, which is the safe side. One of the last
    descriptors is dropped, too."""
    if not isinstance(message, Knock | Known) or not descriptors or not may_keep(descriptors[0]):
        close_all(descriptors)
        descriptors.clear()
        return None
    with suppress(ValueError):
        return Process.from_pidfd(descriptors.pop(0), message.pid, message.uid, message.start)
    return None
