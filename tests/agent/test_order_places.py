"""Connections to a socket for orders: a user with many of them keeps no other user's orders out."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from pathlib import Path

import pytest

from mpsagent.agent import orders

pytestmark = pytest.mark.root


def connect(path: Path, uid: int) -> socket.socket:
    """Connect as this user: the kernel reports the effective uid of that moment."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.seteuid(uid)
    try:
        sock.connect(str(path))
    finally:
        os.seteuid(0)
    sock.setblocking(False)
    return sock


async def answers(path: Path, uid: int) -> int:
    """Return the status of an order that nothing knows: 400 if it was read."""
    sock = connect(path, uid)
    with sock:
        sock.send(b'{"order": "unknown"}')
        try:
            data = await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
        except ConnectionResetError:  # it was refused, and its message was not read
            return 429
    return int(json.loads(data)["status"])


@pytest.mark.parametrize(("users", "each"), [(16, 4), (64, 1)])
def test_the_user_with_most_silent_connections_gives_way(users: int, each: int) -> None:
    """19 of 20 orders of another user were refused beside 16 users with 4 silent connections each."""

    async def play(path: Path) -> list[int]:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listening.bind(str(path))
        path.chmod(0o666)
        listening.listen(256)
        places = orders.Orders(None, None, lambda error: None)  # type: ignore[arg-type]
        places.listen(listening)
        silent = [connect(path, 30_000 + number % users) for number in range(users * each)]
        found = [await answers(path, 40_000) for _ in range(20)]
        for one in silent:
            one.close()
        places.close()
        listening.close()
        return found

    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        assert asyncio.run(play(Path(directory) / "orders.sock")) == [400] * 20
