"""The values in messages of agent and gate: each read by its type and its bounds. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpsagent.mps.limits import Limits, Total

LONGEST_TEXT = 1024
MOST_DEVICES = 64


class LinkError(ValueError):
    """A packet that is not one of the messages of `link`."""


def integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise LinkError(f'"{name}" is not a whole number that makes sense')
    return value


def number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise LinkError(f'"{name}" is not a number')
    return float(value)


def text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_TEXT:
        raise LinkError(f'"{name}" is not a text of at most {LONGEST_TEXT} characters')
    return value


def truth(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise LinkError(f'"{name}" is neither true nor false')
    return value


def read_limits(value: Any, name: str = "limits") -> Limits:
    """Limits as JSON says them. Raises LinkError."""
    if not isinstance(value, dict) or not isinstance(value.get("memory", {}), dict):
        raise LinkError(f'"{name}" are not limits')
    threads = number(value.get("threads"), f"{name}.threads")
    if not 0 < threads <= 100:
        raise LinkError(f'"{name}.threads" is not a percentage: {threads}')
    return Limits(threads, _memory(value, name), truth(value.get("below_normal", False), f"{name}.below_normal"))


def _memory(value: Mapping[str, Any], name: str) -> dict[int, int]:
    memory: dict[int, int] = {}
    for device, size in value.get("memory", {}).items():
        if not (device.isascii() and device.isdecimal() and len(device) <= 4) or len(memory) >= MOST_DEVICES:
            raise LinkError(f'"{name}.memory" names a device "{device[:20]}"')
        memory[int(device)] = integer(size, f"{name}.memory")
    return memory


def total(value: Any) -> Total | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("memory", {}), dict):
        raise LinkError('"total" is no total')
    threads = value.get("threads")
    return Total(None if threads is None else number(threads, "total.threads"), _memory(value, "total"))
