"""JSON that is nearly right: one that changes bytes hardly ever makes any."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, 0.0, -0.0, 0.1, 1e308, 1.5e9, 5e-324,
    float("nan"), float("inf"), float("-inf"), "", "0", "x", "\0", "\ud800", "\u202e", "é" * 40, "a" * 1025, "..", "/",
    "/*", "1h", "25%", "4G", "9" * 400, "2026-11-24T00:00:00Z", "left", [], {}, [[]], {"": 0}, [0], {"0": 1},
    {"0": "1G"},
)  # fmt: skip


def mutated(data: bytes, seed: int) -> bytes | None:
    """Another value somewhere in it; None: it is no JSON."""
    draw = random.Random(seed)
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return None
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        whole = _changed(whole, draw)
    try:
        text = json.dumps(whole)
    except (ValueError, RecursionError):
        return None
    return text.encode()


def _changed(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        value = value.copy()
        key: Any = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        what = draw.random()
        if what < 0.7:
            value[key] = _changed(value[key], draw)
        elif what < 0.8:
            del value[key]
        elif isinstance(value, list):
            value.insert(draw.randrange(len(value) + 1), _changed(value[key], draw))
        else:
            value[draw.choice((*value, "x", "\ud800"))] = value[key]
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.4:
        return value + draw.choice((-1, 1, 0.5)) if abs(value) < 1e300 else 0
    if isinstance(value, str) and value and draw.random() < 0.4:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(("", "0", "-", ".", "\n", " ", "é", "=", "%", value)) + value[at + 1 :]
    return draw.choice(ODD)
