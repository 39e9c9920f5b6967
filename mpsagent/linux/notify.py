"""Messages to systemd: ready, reloading, stopping, a line of status, and the watchdog."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def address() -> str:
    """Return the address of the service manager's socket and remove NOTIFY_SOCKET, so that no child writes to it; empty
    without a service manager."""
    found = os.environ.pop("NOTIFY_SOCKET", "")
    return "\0" + found[1:] if found.startswith("@") else found


def send(to: str, message: bytes) -> None:
    """Send a message to this address, if there is one. Never blocks, never raises."""
    if to:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(message, to)


class Notifier:
    """``sd_notify`` of a service."""

    def __init__(self) -> None:
        self._address = address()
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        self.watchdog = int(microseconds) / 1e6 if microseconds.isdecimal() else None
        """Seconds within which systemd wants a message, or None."""

    def tell(self, *lines: str) -> None:
        """Send these lines. Never blocks, never raises."""
        send(self._address, "\n".join(lines).encode())
