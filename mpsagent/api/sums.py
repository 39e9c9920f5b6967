"""What a report adds up: in the history's file, for the users of a group, and over several nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

SUMS = ("gpu", "waited", "longest", "clients", "left", "refused", "faults", "forced", "turns", "paused")
USED = ("counted", "busy", "energy", "memory_used", "shared")
"""What clients did with the GPU: busy seconds of those that were counted, joules, the most bytes of a process; shared:
these are those of several users."""
LARGEST = frozenset({"longest", "threads", "memory", "at", "memory_used", "shared", "users"})
"""Of several the largest counts; of the others the sum."""


def add(total: dict[str, Any], row: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        total[name] = max(total[name], row[name]) if name in LARGEST else total[name] + row[name]
