"""Who the users are that have to do with MPS now. A name service may hang, so it is asked aside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable

from mpsagent.policy.identity import Identity
from mpsagent.system.names import Names

AGAIN = 5.0
"""Seconds until a silent name service is asked again."""
KEPT = 1000
MOST_QUESTIONS = 16
"""Users asked about at a time; with a range of uids of their own a user may come as thousands."""


class People:
    """Identities by uid. ``on_known`` is called when an answer is there."""

    def __init__(self, names: Names, on_known: Callable[[], None]) -> None:
        self._names = names
        self._on_known = on_known
        self._pending: set[asyncio.Task[None]] = set()
        self._asking: set[int] = set()
        self._again: dict[int, float] = {}
        """By user about whom the name service was silent: when it is asked again, on the loop's clock."""
        self.known: dict[int, Identity] = {}

    def name(self, uid: int) -> str | None:
        who = self.known.get(uid) or self._names.known(uid)
        return None if who is None else who.name

    def meet(self, uids: Iterable[int]) -> bool:
        """Make sure that all these users are known, now or soon. Groups change: a new answer of the name service about
        a known user counts from then on. True when ``known`` has changed."""
        changed, unknown = False, []
        for uid in uids:
            identity = self._names.known(uid)
            if identity is not None:
                if self.known.get(uid) != identity:
                    self.known[uid] = identity
                    changed = True
            elif uid not in self.known:
                unknown.append(uid)
        if len(self._asking) < MOST_QUESTIONS:
            # no silence keeps another from being asked
            for uid in sorted(unknown, key=lambda uid: self._again.get(uid, 0.0)):
                self._start(uid)
        return changed

    def keep(self, uids: Collection[int]) -> None:
        """Forget all others, when they are many."""
        if len(self.known) > KEPT + len(uids):
            self.known = {uid: identity for uid, identity in self.known.items() if uid in uids}
        if len(self._again) > KEPT + len(uids):
            self._again = {uid: at for uid, at in self._again.items() if uid in uids}

    def refresh(self) -> None:
        """Names and groups may have changed: ask again; until the answer is there the old one counts."""
        self._names.forget()
        for uid in list(self.known):
            self._start(uid)

    def close(self) -> None:
        for task in self._pending:
            task.cancel()

    async def _ask(self, uid: int) -> None:
        try:
            await self._names.look_up(uid)
            identity = self._names.known(uid)
            if identity is None:
                self._again[uid] = asyncio.get_running_loop().time() + AGAIN
            elif self.known.get(uid) != identity:
                self.known[uid] = identity
                self._on_known()
        finally:
            self._asking.discard(uid)

    def _start(self, uid: int) -> None:
        loop = asyncio.get_running_loop()
        if uid in self._asking or len(self._asking) >= MOST_QUESTIONS or loop.time() < self._again.get(uid, 0.0):
            return  # when it is met again
        self._asking.add(uid)
        self._names.ask(uid)  # at once: lines about this user wait for the answer from now on
        task = loop.create_task(self._ask(uid))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
