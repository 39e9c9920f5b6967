"""Percent, bytes and durations, as policies, MPS commands and people write them.

MPS itself takes memory limits safely only as whole numbers with ``M`` or ``G``: ``1.5G`` and ``512K`` silently become
1 MiB (recording 01, S2 and 02, R1). Everything that leaves for MPS therefore goes through :func:`limit_text`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

MIB = 1 << 20
GIB = 1 << 30
_SIZES = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB, "T": 1 << 40}
_SPANS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
LEAST = {132: 8}
"""Multiprocessors that MPS gives a client however small its percentage, by those present. An H200's 2 and 5 % are both
8 (driver 580.159.04: docs/measured/2026-11-23-H200-580.159.04/slurm-day.md). Other GPUs were not measured: a pair."""
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.ASCII)
_SPAN = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*(ms|s|min|m|h|d)", re.ASCII)


def parse_bytes(text: str) -> int:
    """``"20G"``, ``"1.5G"`` or ``"512M"`` in bytes (binary units). Raises ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'"{text[:40]}" is not a size; write it like "20G" or "512M"')
    return int(float(match[1]) * _SIZES[match[2]])


def parse_duration(text: str) -> float:
    """``"90s"``, ``"10m"``, ``"1h30m"`` in seconds. Raises ValueError for anything else."""
    rest, total = text.strip(), 0.0
    if not rest:
        raise ValueError('an empty text is not a duration; write it like "30s" or "10m"')
    while rest:
        match = _SPAN.match(rest)
        if match is None:
            raise ValueError(f'"{text[:40]}" is not a duration; write it like "30s", "10m" or "1h30m"')
        total += float(match[1]) * _SPANS[match[2]]
        rest = rest[match.end() :].lstrip()
    return total


def duration_text(seconds: float) -> str:
    """Seconds as a person reads them: ``0.35s``, ``12.0s``, ``3m05s``, ``2h10m``, ``14d06h``."""
    if seconds < 10:
        return f"{seconds:.2f}s"
    if seconds < 60:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def limit_text(size: int) -> str:
    """A memory limit in bytes in the only form MPS takes safely: whole ``G`` where exact, else whole ``M`` rounded
    down, never below ``1M`` (``0`` would remove the limit)."""
    if size >= GIB and size % GIB == 0:
        return f"{size // GIB}G"
    return f"{max(1, size // MIB)}M"


def limits_words(value: Any) -> str:
    """``20 %, 1G``; several devices with equal limits are said once. The lower client priority follows."""
    if not isinstance(value, Mapping) or value.get("threads") is None:
        return "-"
    memory = value.get("memory") or {}
    texts = [limit_text(int(size)) for size in memory.values()]
    if not texts:
        size = "no memory limit"
    elif len(set(texts)) == 1:
        size = texts[0] + (" on each GPU" if len(texts) > 1 else "")
    else:
        size = " ".join(f"{device}={text}" for device, text in zip(memory, texts, strict=True))
    lower = ", below normal" if value.get("below_normal") is True else ""
    return f"{float(value['threads']):g} %, {size}{lower}"


def percent_text(percent: float) -> str:
    """An active thread percentage as MPS prints it: one decimal (12.75 becomes 12.8, recording 04, T3)."""
    return f"{percent:.1f}"


def percent_for_multiprocessors(wanted: int, present: int) -> float:
    """The smallest percentage, to one decimal, that gives a client ``wanted`` of ``present`` multiprocessors.

    A client gets ``percent * present / 100`` rounded down to an even number (132 present: 10 % -> 12, 30 % -> 38,
    45 % -> 58, 90 % -> 118; recordings 01, 02 and 06). An odd wish is therefore served with one multiprocessor less,
    and one below :data:`LEAST` with more.
    """
    even = max(2, wanted - wanted % 2)
    if even >= present:
        return 100.0
    return -(-even * 1000 // present) / 10


def multiprocessors_for_percent(percent: float, present: int) -> int:
    """How many of ``present`` multiprocessors a client sees under ``percent`` (see above for the rounding)."""
    if percent >= 100.0:
        return present
    count = int(round(percent * 10) * present // 1000)
    return max(least(present), count - count % 2)


def least(present: int) -> int:
    """The fewest of ``present`` multiprocessors that a client sees."""
    return LEAST.get(present, 2)


def iso(at: float) -> str:
    """Seconds since the epoch as ISO 8601 in UTC with milliseconds, which is what the logs resolve."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


def nearest(word: str, known: list[str]) -> str | None:
    """The entry of ``known`` a person most likely meant by ``word``, or None when nothing is near."""
    best, best_distance = None, min(len(word) // 2, max(2, len(word) // 3)) + 1
    for candidate in known:
        row = list(range(len(candidate) + 1))
        for i, left in enumerate(word, 1):
            previous, row[0] = row[0], i
            for j, right in enumerate(candidate, 1):
                previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (left != right))
        if row[-1] < best_distance:
            best, best_distance = candidate, row[-1]
    return best
