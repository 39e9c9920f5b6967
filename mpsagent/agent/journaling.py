"""Records to the journal, in their order. The name service says a moment later who a new user is: the first line that
names the user, and the lines behind it, wait for the answer, though not for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from mpsagent.core.sentences import sentence
from mpsagent.core.words import Names as NameOf
from mpsagent.policy.identity import Identity
from mpsagent.system.names import Names

PATIENCE = 1.0
"""Seconds for the name service; then the line has the uid."""
MOST = 256
"""Records that wait; with more of them none does."""

log = structlog.get_logger("mpsagent")


class Telling:
    """Of one node; its instances' records are in one order. Without ``names`` nothing waits."""

    def __init__(self, names: Names | None = None) -> None:
        self._names = names
        self._waiting: deque[tuple[Mapping[str, Any], NameOf, Sequence[int]]] = deque()
        """With the users that each line names."""
        self._late: asyncio.TimerHandle | None = None
        self._answer: asyncio.Task[Identity | None] | None = None
        """The answer that the first line waits for."""

    def tell(self, record: Mapping[str, Any], name_of: NameOf) -> None:
        """``name_of`` is asked when the line is written. Raises what a field that cannot be shown raises; no other line
        waits for that one."""
        users: list[int] = []
        if self._names is not None:
            sentence(record, users.append)
        self._waiting.append((record, name_of, users))
        self._go_on()

    def close(self) -> None:
        self._write(len(self._waiting))

    def _go_on(self) -> None:
        while self._waiting and len(self._waiting) <= MOST:
            answer = self._awaited(self._waiting[0][2])
            if answer is not None:
                if self._late is None:
                    self._late = asyncio.get_running_loop().call_later(PATIENCE, self.close)
                if answer is not self._answer:
                    answer.add_done_callback(lambda _: self._go_on())
                    self._answer = answer
                return
            self._write(1)
        self.close()

    def _awaited(self, users: Sequence[int]) -> asyncio.Task[Identity | None] | None:
        """Return an answer that is awaited about one of these users."""
        return None if self._names is None else next(filter(None, map(self._names.awaited, users)), None)

    def _write(self, count: int) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        for _ in range(count):
            record, name_of, _ = self._waiting.popleft()
            rest = {key: value for key, value in record.items() if key != "kind"}
            log.info(record["kind"], **rest, sentence=sentence(record, name_of))
