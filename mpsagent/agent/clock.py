"""A clock that reads like the wall clock and does not jump.

Policies count in durations; a step of the machine's clock must neither end a user's turn nor freeze it. So time is
the wall clock at the agent's start plus what the monotonic clock has run since. The gate's times are of the
monotonic clock, and those of an earlier agent are moved where the wall clock was set between the two.
"""

from __future__ import annotations

import time

from mpsagent.linux.proc import boot_id

STEP = 0.5
"""Seconds; clocks that differ by less are the same."""


def until_next(span: float) -> float:
    """Seconds until the next full ``span``: all who look from time to time wake the machine together."""
    return span - time.monotonic() % span


class SteadyClock:
    """Seconds since the epoch, as they were at the start, running evenly."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()

    def shift(self) -> float:
        """Return the seconds to add to a time of the wall clock; 0.0 unless the clock was set since the start."""
        difference = self.now() - time.time()
        return difference if abs(difference) > STEP else 0.0

    def at(self, monotonic: float) -> float:
        """A reading of ``time.monotonic()`` in this clock."""
        return self._offset + monotonic

    def kept(self) -> list[str | float]:
        """Return the values for the next agent's :meth:`carry_on`."""
        return [boot_id(), self._offset]

    def same_boot(self, kept: object) -> bool:
        """Return whether the agent that kept this ran since the machine was started last."""
        return isinstance(kept, list) and kept[:1] == self.kept()[:1]

    def carry_on(self, kept: object) -> float:
        """Goes on as the clock of an agent before, unless the wall clock was set since that one's start. Returns what
        its times have to be moved by. Times of an earlier boot are taken as the wall clock's."""
        boot = self.kept()[0]
        if not isinstance(kept, list) or len(kept) != 2 or kept[0] != boot or not isinstance(kept[1], float):
            return 0.0
        by = self._offset - kept[1]
        if abs(by) > STEP:
            return by
        self._offset = kept[1]
        return 0.0
