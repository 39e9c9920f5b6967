"""Events as the lines of streams: each is written once for all who follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

KEPT = 512
"""The newest ones; who is further behind has them written for itself."""


class Streamed:
    """``shown``: a record as an event of the API."""

    def __init__(self, shown: Callable[[Any], Mapping[str, Any]]) -> None:
        self._shown = shown
        self._lines: dict[int, bytes] = {}

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
