"""A clock that reads like the wall clock and does not jump.

Policies count in durations; a step of the machine's clock must neither end a user's turn nor freeze it. So time is
the wall clock at the agent's start plus what the monotonic clock has run since.
"""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since the epoch, as they were at the start, running evenly."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def shift(self) -> float:
        """What to add to a time that the wall clock has just stamped; 0.0 unless the clock was set since the start."""
        difference = self.now() - time.time()
        return difference if abs(difference) > 0.5 else 0.0

    def at(self, monotonic: float) -> float:
        """A reading of ``time.monotonic()`` in this clock."""
        return self._offset + monotonic
