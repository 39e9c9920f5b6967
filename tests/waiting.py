"""How tests wait; in coroutines: tests/coroutines.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], what: str = "", seconds: float = 60.0) -> T:
    """Waits until something is so, and returns it; the time is a bound for failing, not a speed that is asserted."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what or true}"
        time.sleep(0.005)
    return found
