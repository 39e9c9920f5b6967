"""Actions that are asked for again, because the first answer was lost, are carried out once. Pure; time is an argument.

Who asks gives each action an ``Idempotency-Key`` of its own. What was carried out is remembered by uid and key, for a
while, in bounded memory; what was refused had no effect and is not remembered.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mpsagent.interfaces.backend import Problem

KEPT, OF_A_USER, USERS = 3600.0, 64, 256
"""Seconds for which an action is remembered; how many of a user, and of how many users. The oldest go first."""
_LONGEST = 128
Answer = tuple[int, bytes]
"""Status and body."""


@dataclass(slots=True)
class _Asked:
    """``answer`` None: it is being carried out."""

    at: float
    request: bytes
    answer: Answer | None = None


class Idempotency:
    """Actions by uid and key."""

    def __init__(self) -> None:
        self._users: OrderedDict[int, dict[str, _Asked]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._users.values()))

    def begin(self, uid: int, key: str, request: bytes, now: float) -> Answer | None:
        """The answer, if this was carried out before; None: carry it out, then :meth:`done` or :meth:`forget`.

        ``request``: what tells this action from others. Raises Problem: 400 for a key that is none, 409 while the first
        request with this key is being carried out, 422 when that was another request.
        """
        if not (key.isascii() and key.isprintable() and 0 < len(key) <= _LONGEST):
            raise _problem(400, f"it is not of 1 to {_LONGEST} printable characters", "a UUID is good")
        keys = self._users.setdefault(uid, {})
        for old in [one for one, asked in keys.items() if asked.answer is not None and asked.at < now - KEPT]:
            del keys[old]
        known = keys.get(key)
        if known is None:
            keys[key] = _Asked(now, request)
            return None
        if known.request != request:
            raise _problem(422, "it was given to another request before", "give each action a key of its own")
        if known.answer is None:
            raise _problem(409, "the first request with it is being carried out", "ask again in a moment")
        return known.answer

    def done(self, uid: int, key: str, answer: Answer) -> None:
        """It was carried out. Only now others make room for it: who may do nothing here pushes nothing out."""
        keys = self._users[uid]
        keys[key].answer = answer
        self._users.move_to_end(uid)
        answered = [one for one, asked in keys.items() if asked.answer is not None]
        for old in answered[:-OF_A_USER]:
            del keys[old]
        idle = [
            one for one, theirs in self._users.items() if all(asked.answer is not None for asked in theirs.values())
        ]
        for user in idle[:-USERS]:
            del self._users[user]

    def forget(self, uid: int, key: str) -> None:
        """It was not carried out."""
        keys = self._users[uid]
        del keys[key]
        if not keys:
            del self._users[uid]


def _problem(status: int, what: str, hint: str) -> Problem:
    return Problem(status, f"Idempotency-Key: {what}", "Idempotency-Key", hint)
