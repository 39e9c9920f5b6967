"""What goes into history and journal: transitions and actions, as flat fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.policy.policy import Policy

UNKNOWN_A_MINUTE = 30
"""Unknown lines on record; the record of everything else must outlive any number of them."""
UNSERVED = (tr.ClientWaiting, tr.ClientLeft, tr.ClientRefused, tr.FrontEndUsed)
UNSERVED_A_MINUTE = 300
"""Records of what one user can cause by coming and going alone. Five times that for all users together: one may come
with thousands of uids."""

LINES_AN_HOUR = 1000
"""Lines of the journal about one user's programs that start and exit, and as many about all else of that user. Five
times that for all users together. A line is 2.4 KB on disk, so one user writes at most 116 MB a day,
all users 580 MB."""
HOUR = 3600.0
MOST_NAMED = 20
"""Users of whom the journal says that lines were left out."""


def action_record(action: act.Action, policy: Policy) -> dict[str, object]:
    """An action as it is written down: with the line of the policy that it follows."""
    origin = policy.origin(action.rule)
    found = act.action_fields(action)
    return {**found, "policy": f"{origin.file}:{origin.line}"} if origin.file else found


class Sparingly:
    """At most so many in a ``period`` (seconds) of ``each`` source, and of all together."""

    def __init__(self, each: int, everyone: int, period: float = 60.0) -> None:
        self._each, self._everyone, self._period = each, everyone, period
        self._since = float("-inf")
        self._said: Counter[int] = Counter()
        self._all = 0

    def may(self, source: int, now: float) -> bool:
        if now >= self._since + self._period:
            self._since, self._all = now, 0
            self._said.clear()
        if self._said[source] >= self._each or self._all >= self._everyone:
            return False
        self._said[source] += 1
        self._all += 1
        return True


class Worth:
    """What is written down: everything, but not all of what a log or a user can say without end. The history has room
    for a while of it only, and what happened to others must stay in it."""

    def __init__(self) -> None:
        self._unknown = Sparingly(UNKNOWN_A_MINUTE, UNKNOWN_A_MINUTE)
        self._unserved = Sparingly(UNSERVED_A_MINUTE, 5 * UNSERVED_A_MINUTE)
        self._floods = Sparingly(1, 5)

    def may(self, one: tr.Transition | act.Report, now: float) -> bool:
        if isinstance(one, tr.LineUnknown):
            return self._unknown.may(0, now)
        uid = _unserved(one)
        return uid is None or uid == 0 or self._unserved.may(uid, now)

    def flood(self, one: tr.Transition | act.Report, now: float) -> int | None:
        """The user of whom something is left out, once a minute."""
        uid = _unserved(one)
        return uid if uid is not None and self._floods.may(uid, now) else None


def _unserved(one: tr.Transition | act.Report) -> int | None:
    """The user who can cause this by coming and going alone."""
    if isinstance(one, act.Report):
        return one.uid if one.kind == "client.environment" else None
    return one.uid if isinstance(one, UNSERVED) else None


class JournalLines:
    """The lines that the journal takes about a user: the history has the others. Lines about no user, and those about
    an order that another user or root gave, are always written."""

    def __init__(self) -> None:
        self._programs, self._rest = (Sparingly(LINES_AN_HOUR, 5 * LINES_AN_HOUR, HOUR) for _ in range(2))
        self._left_out: Counter[int] = Counter()
        """Lines by user, since ``_since``."""
        self._since = 0.0

    def may(self, record: Mapping[str, Any], now: float) -> bool:
        uid = record.get("uid")
        if not isinstance(uid, int) or record.get("by", uid) != uid:
            return True
        kinds = (
            self._programs
            if record["kind"] in (*tr.START_AND_EXIT, "client.environment", "outside_mps")
            else self._rest
        )
        if kinds.may(uid, now):
            return True
        self._since = self._since if self._left_out else now
        self._left_out[uid] += 1
        return False

    def left_out(self, now: float) -> Iterator[dict[str, object]]:
        """Yield a record for each user of whom lines were left out, an hour after the first of these."""
        if not self._left_out or now < self._since + HOUR:
            return
        counted, self._left_out = self._left_out, Counter()
        named = counted.most_common(MOST_NAMED)
        for uid, count in named:
            yield {"kind": "journal.left_out", "uid": uid, "count": count}
        if len(counted) > MOST_NAMED:
            rest = counted.total() - sum(count for _, count in named)
            yield {"kind": "journal.left_out", "users": len(counted) - MOST_NAMED, "count": rest}
