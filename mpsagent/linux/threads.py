"""Calls that may block for ever (name services, D-Bus, /proc of a dying process), each in a thread that can be left.

Threads of our own, whose end is not waited for, not asyncio's executor: that one has few and waits for all of them at
the end. Nor `threading.Thread`, whose start waits until the thread has run: the loop stands still for 4 ms now and then
where both cores are busy, and 0.03 ms this way."""

from __future__ import annotations

import _thread
import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

THREADS = 32
Slots = threading.BoundedSemaphore
_slots = Slots(THREADS)


async def in_thread(function: Callable[..., T], *arguments: object, deadline: float, slots: Slots = _slots) -> T:
    """The result of ``function``, or its exception. Raises TimeoutError after ``deadline`` seconds (the thread is left
    alone and its result dropped), or at once while as many others as there are ``slots`` (``THREADS``) are at work or
    stuck. Slots of their own are for what a user can make hang: it must not use up those of all else."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = function(*arguments)
        except Exception as error:
            deliver, value = _fail, error
        else:
            deliver, value = _succeed, result  # type: ignore[assignment]
        finally:
            slots.release()
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(deliver, future, value)

    if not slots.acquire(blocking=False):
        raise TimeoutError("too many earlier calls have not come back")
    try:
        _thread.start_new_thread(work, ())
    except RuntimeError as error:  # the machine has no thread left
        slots.release()
        raise TimeoutError(str(error)) from error
    async with asyncio.timeout(deadline):
        return await future


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
