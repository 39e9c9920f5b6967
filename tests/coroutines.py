"""Coroutines in tests: each test that is one (tests/conftest.py), and each that plays one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def play(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs it to its end in a loop of its own, and fails on whatever the loop had to report."""
    complaints: list[dict[str, Any]] = []

    async def main() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await asyncio.wait_for(coroutine, 90)

    result = asyncio.run(main())
    assert complaints == []
    return result


async def until(true: Callable[[], object]) -> None:
    """Waits until something is so; the time is a bound for failing, not a speed that is asserted."""
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)
