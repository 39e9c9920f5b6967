"""Records to the journal, in their order. Who a new user is, a name service says a moment later: the first record about
that user, and those behind it, wait for it, though not for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

import structlog

from mpsagent.core.sentences import Names as NameOf
from mpsagent.core.sentences import sentence
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
        self._waiting: deque[tuple[Mapping[str, Any], NameOf]] = deque()
        self._late: asyncio.TimerHandle | None = None

    def tell(self, record: Mapping[str, Any], name_of: NameOf) -> None:
        """``name_of`` is asked when the line is written."""
        self._waiting.append((record, name_of))
        self._go_on()

    def close(self) -> None:
        self._write(len(self._waiting))

    def _go_on(self) -> None:
        while self._waiting and len(self._waiting) <= MOST:
            record = self._waiting[0][0]
            uid = record.get("uid", record.get("subject", {}).get("uid"))  # of a hook
            answer = self._names.awaited(uid) if self._names is not None and isinstance(uid, int) else None
            if answer is not None:
                if self._late is None:
                    self._late = asyncio.get_running_loop().call_later(PATIENCE, self.close)
                    answer.add_done_callback(lambda _: self._go_on())
                return
            self._write(1)
        self.close()

    def _write(self, count: int) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        for _ in range(count):
            record, name_of = self._waiting.popleft()
            rest = {key: value for key, value in record.items() if key != "kind"}
            log.info(record["kind"], **rest, sentence=sentence(record, name_of))
