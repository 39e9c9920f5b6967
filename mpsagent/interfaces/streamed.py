"""Events as the lines of streams: each is written once for all who follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

KEPT = 512
"""The newest ones; who is further behind has them written for itself."""
EACH, LONGEST = 0.0002, 0.025
"""Seconds for which an event waits for others to go with it: so much for each stream that is open, and at most."""


class Streamed:
    """``shown``: a record as an event of the API."""

    def __init__(self, shown: Callable[[Any], Mapping[str, Any]]) -> None:
        self._shown = shown
        self._lines: dict[int, bytes] = {}
        self._open = 0

    @contextmanager
    def following(self) -> Iterator[None]:
        """While a stream is open."""
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def gather(self) -> None:
        """Many streams that are each told of each event by itself take a core."""
        await asyncio.sleep(min(LONGEST, self._open * EACH))

    def line(self, record: Mapping[str, Any]) -> bytes:
        """Without the end of the line."""
        number = int(record["seq"])
        found = self._lines.get(number)
        if found is None:
            found = json.dumps(self._shown(record), separators=(",", ":")).encode()
            self._lines[number] = found
            if len(self._lines) > KEPT:
                del self._lines[min(self._lines)]
        return found
