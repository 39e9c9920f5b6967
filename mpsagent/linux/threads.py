"""Calls that may block indefinitely (name services, D-Bus, /proc of a dying process), each in a thread of its own.

asyncio's executor has few threads, and waits for all of them at the end. The start of a `threading.Thread` waits until
the thread has run: if both cores are busy, this blocks the loop for 4 ms now and then. `_thread` blocks it for 0.03 ms.
"""

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
    """Return the result of ``function``, or raise its exception.

    Raises TimeoutError after ``deadline`` seconds: the thread keeps running, and its result is ignored. Raises it at
    once if all ``slots`` (of ``THREADS``) are in use. A call that a user can block has slots of its own, so that it
    cannot use up the slots of other calls.
    """
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
