"""A server's clients: processes and their connections."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpsagent_sim.host import Connection

MAX_CLIENTS = 48
"""Contexts on each device, channels apart (driver 580)."""


class Link:
    """A client's connection: its channel (number 0) or a context on a device (1 and up)."""

    def __init__(self, connection: Connection, client: Client, number: int, device: int) -> None:
        self.connection = connection
        self.client = client
        self.number = number
        self.device = device
        self.kernel = False  # a kernel is in flight
        self.sticky = False
        self.terminating = False  # asked to exit, no answer yet
        self.lost = False  # its end is in the log
        self.leaves_at = 0.0
        """When the last of its work has left the GPU, after its end was answered."""
        self.unread: deque[bytes] = deque()
        """Packets that came while the server waited for another client."""

    def read(self) -> None:
        """Read all packets that have come."""
        while (message := self.connection.next()) is not None:
            message.close()
            self.unread.append(message.data)


class Client:
    """A client process. It has the limits that the server had when its channel was connected (02 R2). ``percentage``
    None: that was an earlier server, which was killed during the client's start, and whose limits apply."""

    def __init__(self, pid: int, name: str, percentage: float | None, limits: dict[int, int]) -> None:
        self.pid, self.name = pid, name
        self.number = 0  # counted from the first context on
        self.percentage, self.limits = percentage, limits
        self.channel: Link | None = None
        self.contexts: dict[int, Link] = {}
        self.last_close = 0.0
