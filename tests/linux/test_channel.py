"""One peer's socket: what it sent last is read, however it hung up."""

from __future__ import annotations

import asyncio
import socket

from mpsagent.linux.channel import Channel


def test_the_last_message_of_a_peer_that_left_ours_unread_is_taken() -> None:
    """As the daemon's exit status after `quit`. The kernel reports ECONNRESET once, before the message."""

    async def scenario() -> list[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        said: list[bytes] = []
        closed = asyncio.Event()
        channel = Channel(
            asyncio.get_running_loop(), ours, lambda data, _who, _fds: said.append(data), closed.set, longest=64
        )
        channel.send(b"never read")
        theirs.send(b"last word")
        theirs.close()
        await asyncio.wait_for(closed.wait(), 60)
        assert not channel.open
        return said

    assert asyncio.run(scenario()) == [b"last word"]
