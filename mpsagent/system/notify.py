"""Telling systemd: ready, reloading, stopping, a line of status, and the watchdog."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


class Notifier:
    """``sd_notify`` on the socket that systemd gave; silent without one. Never blocks, never raises."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds = os.environ.pop("WATCHDOG_USEC", "")
        self.watchdog = int(microseconds) / 1e6 if microseconds.isdecimal() else None
        """Seconds within which systemd wants to hear something, or None."""

    def tell(self, *lines: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto("\n".join(lines).encode(), address)
