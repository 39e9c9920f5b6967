"""Who may be connected: so many connections for each user, and for all of them together. When all places are taken,
the oldest connection makes way: no user is locked out by others, however many they are."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import hdrs, web

from mpsagent.api.http import PROBLEM, line
from mpsagent.linux.peers import peer
from mpsagent.snapshot.problem import Problem


@dataclass(frozen=True, slots=True)
class Bounds:
    """Sizes in bytes, spans in seconds. ``connections``: places of all users together; ``ahead``: requests of one
    connection that wait behind another one's answer."""

    connections: int = 256
    connections_per_uid: int = 16
    ahead: int = 16
    header_size: int = 16 * 1024
    header_time: float = 5.0
    idle_time: float = 15.0
    heartbeat: float = 15.0


def uid_of(transport: asyncio.BaseTransport | None) -> int:
    """The user at the other end, as the kernel says. Raises OSError."""
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None:
        raise ConnectionResetError("the peer has gone")
    return peer(sock).uid


class Peers:
    """All connections, in the order in which they came."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._by_uid: Counter[int] = Counter()
        self._all: dict[Handler, int] = {}
        self.dropped = self.turned_away = 0

    @property
    def connected(self) -> int:
        return len(self._all)

    def take(self, uid: int, one: Handler) -> Problem | None:
        """A place for one more connection, or why there is none."""
        if self._by_uid[uid] >= self.bounds.connections_per_uid:
            self.turned_away += 1
            where = f"uid {uid} has {self._by_uid[uid]} of {self.bounds.connections_per_uid}"
            return Problem(429, "too many connections to mpsagent", where, "one `events -f` per user is enough")
        if len(self._all) >= self.bounds.connections:
            self.dropped += 1
            oldest = next(iter(self._all))
            self.leave(oldest)
            oldest.force_close()
        self._all[one] = uid
        self._by_uid[uid] += 1
        return None

    def leave(self, one: Handler) -> None:
        uid = self._all.pop(one, None)
        if uid is not None:
            self._by_uid[uid] -= 1
            self._by_uid += Counter()


class _Unannounced(web.Response):
    async def _prepare_headers(self) -> None:
        await super()._prepare_headers()
        self.headers.pop(hdrs.SERVER, None)


class Handler(web.RequestHandler):
    """aiohttp's protocol for one connection that has a place. What it cannot read (it never becomes a request) is
    answered in our form too."""

    __slots__ = ("_late", "_peers", "refused")

    def __init__(self, server: web.Server, peers: Peers, logger: logging.Logger) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), auto_decompress=False, lingering_time=1.0,
            keepalive_timeout=peers.bounds.idle_time, max_field_size=peers.bounds.header_size,
            access_log=None, logger=logger,  # type: ignore[arg-type]  # no access log is what None means
        )  # fmt: skip
        self._peers = peers
        self.refused: Problem | None = None
        """Why it has no place: the answer to whatever it asks."""
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        try:
            self.refused = self._peers.take(uid_of(transport), self)
        except OSError:
            transport.abort()
            return
        transport.max_size = self._peers.bounds.header_size  # type: ignore[attr-defined]  # of a read; else 256 KiB
        super().connection_made(transport)
        self._late = asyncio.get_running_loop().call_later(self._peers.bounds.header_time, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self._messages) > self._peers.bounds.ahead and self.transport is not None:
            self.transport.abort()

    def has_asked(self) -> None:
        """A request has come whole."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self.has_asked()
        self._peers.leave(self)
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        self.has_asked()
        super().handle_error(request, status, exc, message)  # raises when part of an answer is on its way
        what = HTTPStatus(status).phrase if status >= 500 else "this is not HTTP as it should be"
        problem = Problem(status, what, hint="curl --unix-socket, or any HTTP client")
        answer = _Unannounced(body=line(problem.body()), status=status, content_type=PROBLEM)
        answer.force_close()
        return answer
