"""How much of the agent one user may have: a bucket of tokens for each, and turns of a millisecond for long answers.

A token is one request, one connection, 4 KiB of answer or a millisecond of work, whichever comes; so a request for
1,000 events costs what it costs and not what a ``/healthz`` does (11 ms of the loop, watched). Who is in debt waits;
who is deep in debt is turned away. Root is not counted. Work is processor time: a user is not in debt because other
programs had the processor meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

TOKEN_BYTES = 4096
TOKEN_SECONDS = 0.001
SLICE = 0.001
"""Seconds of work until the loop turns: the gate's messages are to be answered meanwhile."""
QUESTION = 20.0
"""Seconds for a question to the history, the wait for those before it included."""
_FORGET_ABOVE = 4096


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens: ``rate`` a second for each user after the first ``burst``; ``rate_all``, ``burst_all``: for all users
    together, because one may come with thousands of uids (subordinate ids). ``patience``: seconds that a request may
    wait for its own user's tokens before it is refused, ``patience_all``: for other users' at most; ``debt``: seconds
    of tokens that a user can owe at most."""

    rate: float = 50.0
    burst: float = 100.0
    rate_all: float = 400.0
    burst_all: float = 800.0
    patience: float = 10.0
    patience_all: float = 1.0
    debt: float = 30.0


class Allowances:
    """By user, until when what was used up is paid (virtual scheduling: no timers)."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self._due: dict[int, float] = {}
        self._due_all = float("-inf")

    def charge(self, uid: int, tokens: float, now: float, shared: bool = True) -> float:
        """Count ``tokens``; how many seconds the user has to wait before the next request. Root never waits. Not
        ``shared``: for an administrator, or for what costs next to nothing; other users' do not count then."""
        if uid == 0:
            return 0.0
        if len(self._due) > _FORGET_ABOVE:
            self._due = {one: due for one, due in self._due.items() if due > now}
        rates = self.rates
        due = max(self._due.get(uid, now), now) + tokens / rates.rate
        due = self._due[uid] = min(due, now + rates.burst / rates.rate + rates.debt)
        own = max(0.0, due - now - rates.burst / rates.rate)
        if not shared:
            return own
        due = max(self._due_all, now) + tokens / rates.rate_all
        self._due_all = min(due, now + rates.burst_all / rates.rate_all + rates.debt)
        others = self._due_all - now - rates.burst_all / rates.rate_all
        return max(own, min(others, rates.patience_all))


def cost(size: int, seconds: float) -> float:
    """Tokens for an answer of ``size`` bytes that took ``seconds`` of work."""
    return size / TOKEN_BYTES + seconds / TOKEN_SECONDS


class OneEach:
    """One at a time of each user."""

    def __init__(self) -> None:
        self._own: dict[int, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[None]:
        lock, users = self._own.get(uid, (asyncio.Lock(), 0))
        self._own[uid] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._own[uid][1] - 1
            if users:
                self._own[uid] = (lock, users)
            else:
                del self._own[uid]


class Questions:
    """To the history's file, each as much as seconds of a core (9 s was root's wait behind those of four users, who had
    asked 60 at once): one of each user, two of all users, and root's beside them. Raises TimeoutError."""

    def __init__(self) -> None:
        self._users, self._each = asyncio.Semaphore(2), OneEach()

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[None]:
        if uid == 0:
            yield
            return
        async with asyncio.timeout(QUESTION), self._each.of(uid), self._users:
            yield


class Slices:
    """Long answers are written a slice at a time. One slice of all users' goes between two turns of the loop, and each
    user has one place in the line; root's are beside them."""

    def __init__(self, span: float = SLICE) -> None:
        self._span = span
        self._line = asyncio.Lock()
        self._each = OneEach()

    async def lines(self, uid: int, items: Iterable[Any]) -> tuple[list[bytes], float]:
        """Each item as JSON, and how many seconds of work that was; bytes are written already."""
        if uid == 0:
            return await self._write(items, None)
        async with self._each.of(uid):
            return await self._write(items, self._line)

    async def _write(self, items: Iterable[Any], line: asyncio.Lock | None) -> tuple[list[bytes], float]:
        written: list[bytes] = []
        rest, work = iter(items), 0.0
        while True:
            if line is not None:
                await line.acquire()
            try:
                begun, used = time.perf_counter(), time.thread_time()
                end = True
                for item in rest:
                    ready = isinstance(item, bytes)
                    written.append(item if ready else json.dumps(item, separators=(",", ":")).encode())
                    if time.perf_counter() - begun >= self._span:
                        end = False
                        break
                work += time.thread_time() - used
                if end:
                    return written, work
                await asyncio.sleep(0)
            finally:
                if line is not None:
                    line.release()
