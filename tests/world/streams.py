"""Streams in a world: what ``loop.create_connection`` and a unix server have below them, on the model's sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tests.world.doors import SocketObject

if TYPE_CHECKING:
    from tests.world.loop import Loop

MOST = 1 << 30
"""What is written at once comes at once here, however long it is; the protocol has to find its own frames."""


class Transport(asyncio.Transport):
    """Of one connection. A peer that reads nothing makes its writer wait, as on Linux."""

    def __init__(self, loop: Loop, sock: Any, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._left: deque[bytes] = deque()
        self._open = True
        loop.add_reader(sock.fileno(), self._read)
        loop.call_soon(protocol.connection_made, self)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_closing(self) -> bool:
        return not self._open

    def close(self) -> None:
        self._end(None)

    abort = close

    def write(self, data: Any) -> None:
        if not self._open:
            return
        self._left.append(bytes(data))
        if len(self._left) == 1:
            self._write()
            if self._left and self._open:
                self._loop.add_writer(self._sock.fileno(), self._write)
                self._protocol.pause_writing()

    def _write(self) -> None:
        waited = len(self._left) > 1
        try:
            while self._left:
                self._sock.send(self._left[0])
                self._left.popleft()
                waited = True
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if waited and self._loop.remove_writer(self._sock.fileno()):
            self._protocol.resume_writing()

    def _read(self) -> None:
        try:
            data = self._sock.recv(MOST)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error)
            return
        if data:
            self._protocol.data_received(data)
        else:
            self._protocol.eof_received()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._open:
            self._open = False
            self._left.clear()
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._loop.call_soon(self._protocol.connection_lost, error)
            self._loop.call_soon(self._sock.close)


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def serve(loop: Loop, listener: int, each: Serve) -> None:
    """As asyncio.start_unix_server does, on a socket that listens already."""
    sock = SocketObject(fileno=listener)

    def accept() -> None:
        taken, _ = sock.accept()
        protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=loop), each, loop=loop)
        Transport(loop, taken, protocol)

    loop.add_reader(listener, accept)
