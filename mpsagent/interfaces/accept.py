"""Taking connections off a listening socket, a few at a time.

asyncio takes all that have come at once, and a process that connects in a loop can fill the loop with nothing else (261
of 338 of root's connections were refused that way). Here a millisecond of accepting is followed by a pause, and a user
who is in debt is cut off before anything is made for the connection.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

SLICE, PAUSE = 0.001, 0.004
"""Seconds of accepting, and of everything else before the next."""
NO_DESCRIPTORS = 1.0
"""Seconds until it is tried again when the process or the system has no descriptors left."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Listener:
    """``take(sock)`` is given each connection and owns it."""

    def __init__(self, sock: socket.socket, take: Callable[[socket.socket], None]) -> None:
        self._sock = sock
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        with suppress(ValueError, OSError):
            self._loop.remove_reader(self._sock)
        self._sock.close()

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._sock, self._ready)

    def _ready(self) -> None:
        end = time.perf_counter() + SLICE
        while time.perf_counter() < end:
            try:
                taken, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(NO_DESCRIPTORS if error.errno in _EXHAUSTED else PAUSE)
                return
            self._take(taken)
        self._pause(PAUSE)

    def _pause(self, span: float) -> None:
        self._loop.remove_reader(self._sock)
        self._again = self._loop.call_later(span, self._listen)


class Tasks:
    """Tasks that are kept until they end."""

    def __init__(self) -> None:
        self._all: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._all.add(task)
        task.add_done_callback(self._all.discard)
