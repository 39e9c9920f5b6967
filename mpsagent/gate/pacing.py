"""How fast users go on: front-ends, whose commands make control.log grow, and new clients. No I/O, no clock.

What a command costs is what the control daemon writes about it: 270 bytes for a short one, 1.7 KB for a ``ps`` beside
10 clients, 6.7 KB beside 48. At 1 KiB a second a user's loop writes 88 MB a day, whatever it asks and by however many
connections (four users wrote 8 GB before). Short commands go on 3.8 times a second for ever and 980 times at once, so
three programs of one user that ask every second never wait; a ``ps`` every second beside 10 clients is answered at once
for six minutes, then every 1.6 s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

LINE = 41
"""Bytes before each line's text, its end included: ``[2026-11-20 23:56:21.459 Control   471] ``."""
SESSION = 4 * LINE + len("Accepting connection...NEW UICmd:UI closed")
"""Bytes for a session of one command, without the command itself and its answer."""
MOST_COUNTED = 32 * 1024
"""Of one command's answers. No daemon says more, and what a user owes must be paid in sensible time."""
MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Rates:
    """Of front-ends, in bytes of control.log: ``rate`` a second for each user after the first ``burst``; ``rate_all``,
    ``burst_all``: for all users together, because one may come with thousands of uids (subordinate ids)."""

    rate: float = 1024.0
    burst: float = 256 * 1024.0
    rate_all: float = 10 * 1024.0
    burst_all: float = 640 * 1024.0


NEW_CLIENTS = Rates(rate=20, burst=100, rate_all=200, burst_all=1000)
"""Each new client makes the logs grow by 2.4 KB: 133 to 203 a second of one user wrote 28 to 42 GB a day."""


def command_cost(command: str) -> int:
    """What is known before it is answered."""
    return SESSION + len(command)


def answers_cost(answers: Iterable[str]) -> int:
    return min(MOST_COUNTED, sum(LINE * (1 + text.count("\n")) + len(text) for text in answers))


class Account:
    """For each user until when what was used is paid; a user who owes nothing any more is forgotten. As each charge
    counts for all users too, few can owe anything at a time."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._paid: dict[int, float] = {}
        self._paid_all = float("-inf")

    def charge(self, uid: int, size: float, now: float, *, longest: float = float("inf")) -> None:
        """``longest``: seconds in which all is paid."""
        rates = self._rates
        if len(self._paid) >= MOST_REMEMBERED and uid not in self._paid:
            self._paid = {one: paid for one, paid in self._paid.items() if paid > now}
        self._paid[uid] = min(now + longest, max(self._paid.get(uid, now), now) + size / rates.rate)
        self._paid_all = max(self._paid_all, now) + size / rates.rate_all

    def free_from(self, uid: int) -> float:
        """When this user may go on by the user's own use."""
        return self._paid.get(uid, float("-inf")) - self._rates.burst / self._rates.rate

    def all_free_from(self) -> float:
        return self._paid_all - self._rates.burst_all / self._rates.rate_all


class PacedLine(Generic[T]):
    """Who waits, users by turns."""

    def __init__(self, rates: Rates | None = None) -> None:
        self._account = Account(rates or Rates())
        self._waiting: OrderedDict[int, dict[T, None]] = OrderedDict()

    def enter(self, uid: int, one: T) -> None:
        self._waiting.setdefault(uid, {})[one] = None

    def leave(self, uid: int, one: T) -> None:
        """Also when it does not wait."""
        line = self._waiting.get(uid, {})
        line.pop(one, None)
        if not line:
            self._waiting.pop(uid, None)

    def of(self, uid: int) -> list[T]:
        return list(self._waiting.get(uid, ()))

    def next(self, now: float) -> T | None:
        """Who may go on, and waits no more."""
        if self._account.all_free_from() > now:
            return None
        uid = next((one for one in self._waiting if self._account.free_from(one) <= now), None)
        if uid is None:
            return None
        one = next(iter(self._waiting[uid]))
        self._waiting.move_to_end(uid)
        self.leave(uid, one)
        return one

    def when(self) -> float | None:
        """When a user may go on; None: no user waits."""
        if not self._waiting:
            return None
        return max(self._account.all_free_from(), min(map(self._account.free_from, self._waiting)))

    def charge(self, uid: int, size: int, now: float) -> None:
        self._account.charge(uid, size, now)
