"""Pauses between attempts."""

from __future__ import annotations

import os


class Backoff:
    """Pauses that double from ``first`` to ``longest`` seconds.

    Each is up to a quarter shorter, at random, so that processes that failed at the same moment do not all try again at
    the same moment.
    """

    __slots__ = ("_first", "_longest", "_pause")

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest, self._pause = first, longest, first

    def pause(self) -> float:
        """Return the number of seconds until the next attempt."""
        pause, self._pause = self._pause, min(self._longest, 2 * self._pause)
        return pause * (1 - fraction() / 4)

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self._pause = self._first


def fraction() -> float:
    """Return a random number from 0 up to, but not including, 1. The module random takes too long to import."""
    return os.urandom(1)[0] / 256
