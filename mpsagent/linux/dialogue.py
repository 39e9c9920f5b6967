"""A dialogue with a server at a SOCK_SEQPACKET socket, from the connection to its end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from mpsagent.linux.channel import Channel, as_user
from mpsagent.linux.peers import Credentials


class Speaker(Protocol):
    """A side of a dialogue, without I/O. ``greeting``: the first message of the other side. ``how`` is not None when
    the dialogue is over."""

    greeting: bytes | None

    @property
    def how(self) -> object | None: ...

    def message(self, data: bytes) -> Sequence[bytes]:
        """Return the messages that answer one of the other side."""

    def closed(self) -> None:
        """Note that the other side has closed the connection."""


S = TypeVar("S", bound=Speaker)


def connect(directory: Path, name: str) -> socket.socket:
    """Return a connection to a socket in a directory. Its path may be longer than the 107 bytes of an address.

    Raises OSError; BlockingIOError if the server's backlog is full.
    """
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


class Dialogue(Generic[S]):
    """``speaker`` answers each message, with the credentials ``asker``. ``done`` gets the speaker when the dialogue is
    over, never after :meth:`close`. ``greeted`` gets the greeting. ``longest``: bytes of a message.

    A dialogue that is closed early leaves nothing at the server: unsent messages are never sent, and a closed
    connection blocks no other client."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        speaker: S,
        asker: Credentials,
        done: Callable[[S], None],
        greeted: Callable[[bytes, socket.socket], None] = lambda _data, _sock: None,
        *,
        longest: int,
    ) -> None:
        self._speaker = speaker
        self._asker = asker
        self._done = done
        self._greeted = greeted
        self._channel = Channel(loop, sock, self._receive, self._closed, longest=longest)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _receive(self, data: bytes, _who: Credentials | None, _descriptors: list[int]) -> None:
        first = self._speaker.greeting is None
        for message in self._speaker.message(data):
            self._channel.send(message, as_user(self._asker))
        if first:
            self._greeted(data, self._channel.sock)
        if self._speaker.how is not None:
            self._channel.close()
            self._done(self._speaker)

    def _closed(self) -> None:
        self._speaker.closed()
        self._done(self._speaker)
