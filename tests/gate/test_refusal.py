"""What a client hears that is told in its server's place that there are too many contexts."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mpsagent.gate.connection import accepted
from mpsagent.gate.refusal import RefusalHandshake
from mpsagent.mps.rendezvous import CREDENTIALS, DESCRIPTOR, TOO_MANY
from tests.lingering import needs_refusal


@contextmanager
def told() -> Iterator[socket.socket]:
    """The way to its server that a client is given."""
    client, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    refusal = RefusalHandshake(asyncio.get_running_loop(), accepted(ours, 1, lambda _: None, privileged=False))
    data, descriptors, _, _ = socket.recv_fds(client, 64, 1)
    assert data == DESCRIPTOR
    with client, ours, socket.socket(fileno=descriptors[0]) as server:
        assert server.getblocking(), "a client reads without asking whether there is something"
        server.setblocking(False)
        yield server
        refusal.close()


async def heard(*words: bytes) -> list[bytes]:
    """By a client that says these words to its server."""
    said = []
    with told() as server:
        for word in words:
            server.send(word)
        await asyncio.sleep(0.1)
        for _ in range(6):
            try:
                data, found, _, _ = socket.recv_fds(server, 64, 4)
            except BlockingIOError:
                break
            for descriptor in found:
                os.close(descriptor)
            said.append(data)
    return said


BEGINNING = [DESCRIPTOR] * 4 + [b"\0"]


def test_it_is_told_after_it_has_said_everything() -> None:
    """A word too early, and it takes its server for broken (contexts-refused.txt, an H200)."""
    words = (CREDENTIALS, b"\2\0\0\0", bytes(4))
    assert asyncio.run(heard(*words)) == [*BEGINNING, TOO_MANY]
    assert asyncio.run(heard(*words[:2])) == BEGINNING
    assert asyncio.run(heard()) == BEGINNING


def test_who_goes_on_talking_is_not_read() -> None:
    """One that did was read as fast as it wrote: 70% of a core of the gate's."""

    async def talk() -> None:
        with told() as server:
            for _ in range(20):
                try:
                    for _ in range(1000):
                        server.send(CREDENTIALS)
                except BlockingIOError:
                    await asyncio.sleep(0.01)
            with pytest.raises(BlockingIOError):
                server.send(CREDENTIALS)

    asyncio.run(talk())


def test_no_descriptor_can_be_sent_there() -> None:
    """It is a socket of the gate's, which stood still while one was closed that takes long (TCP with SO_LINGER)."""
    needs_refusal()

    async def send() -> None:
        with told() as server, pytest.raises(PermissionError):
            socket.send_fds(server, [CREDENTIALS], [0])

    asyncio.run(send())
