"""Clients that were announced to the daemon and must not get its answer: they have gone, or wait for another try.
The answer is awaited all the same, and each handshake finished for them, so that no server waits for ever."""

from __future__ import annotations

import asyncio

from mpsagent.gate.announcement import Announcement, Told
from mpsagent.gate.handshake_rescue import Rescuer
from mpsagent.linux.descriptors import close_all
from mpsagent.mps.rendezvous import ACKNOWLEDGED, DESCRIPTOR

MOST = 256


class Orphans:
    """In the background; each ends by itself, when its daemon does at the latest."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Announcement, None] = {}

    def add(self, announcement: Announcement, *, untouched: bool = True) -> None:
        """``untouched``: its client never had the answer."""
        acknowledged = announcement.told is Told.ACKNOWLEDGED
        if not acknowledged:
            announcement.told = Told.ABANDONED
        self._waiting[announcement] = None
        if len(self._waiting) > MOST:
            self._end(next(iter(self._waiting)))

        def answered(data: bytes, descriptors: list[int]) -> None:
            if data != DESCRIPTOR or len(descriptors) != 1:
                close_all(descriptors)
                self._end(announcement)
                return
            Rescuer(
                self._loop,
                descriptors[0],
                announcement.who,
                lambda _why: self._end(announcement, ACKNOWLEDGED),
                untouched=untouched,
                acknowledged=acknowledged,
            )

        announcement.await_answer(answered, lambda: self._end(announcement))

    def _end(self, announcement: Announcement, last: bytes = b"") -> None:
        self._waiting.pop(announcement, None)
        if last:
            announcement.acknowledge(last)
        announcement.close()
