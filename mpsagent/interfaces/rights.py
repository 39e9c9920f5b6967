"""Who asks, as the kernel says, and who may act: root, the admin group, and a user on what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from mpsagent.interfaces.backend import Problem
from mpsagent.interfaces.peers import Connection, Peer

IsAdmin = Callable[[int], Awaitable[bool]]
"""Whether a uid is in the admin group. May ask the name service, so it is awaited, with a deadline."""
ASK_NAMES = 5.0


def connection_of(request: web.Request) -> Connection:
    transport = request.transport
    connection = None if transport is None else transport.get_protocol()
    if not isinstance(connection, Connection):
        raise ConnectionResetError("the peer has gone")
    return connection


def peer_of(request: web.Request) -> Peer:
    return connection_of(request).peer


class Rights:
    def __init__(self, is_admin: IsAdmin) -> None:
        self._is_admin = is_admin

    async def acting(self, request: web.Request, what: str, owner: int | None = None) -> Peer:
        """The peer, if it may act: root, the admin group, or ``owner`` on what is its own."""
        peer = peer_of(request)
        if peer.uid == 0 or (owner is not None and peer.uid == owner):
            return peer
        async with asyncio.timeout(ASK_NAMES):
            if await self._is_admin(peer.uid):
                return peer
        raise Problem(
            403,
            f"uid {peer.uid} may not {what}",
            request.path,
            "ask an administrator: this needs root or mpsagent's admin group",
        )
