"""A queue that is asked one thing at a time."""

from __future__ import annotations

from mpsagent.gate.queue import Held, Queue
from mpsagent.wire.link import Admissions


class Asked(Queue):
    def next(self, now: float, admissions: Admissions) -> Held | None:
        """The connection to hand over now."""
        return self.choose(now, admissions)[0]

    def wake(self, now: float, admissions: Admissions) -> float | None:
        """When a connection that only pauses may be tried again; None when none does."""
        chosen, wake, _ = self.choose(now, admissions)
        return now if chosen is not None else wake
