"""What goes into history and journal: transitions and actions, as flat fields."""

from __future__ import annotations

from collections import Counter

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.policy.policy import Policy

UNKNOWN_A_MINUTE = 30
"""Unknown lines on record; the record of everything else must outlive any number of them."""
UNSERVED = (tr.ClientWaiting, tr.ClientLeft, tr.ClientRefused, tr.FrontEndUsed)
UNSERVED_A_MINUTE = 300
"""Records of what one user can cause by coming and going alone. Five times that for all users together: one may come
with thousands of uids."""


def action_record(action: act.Action, policy: Policy) -> dict[str, object]:
    """An action as it is written down: with the line of the policy that it follows."""
    origin = policy.origin(action.rule)
    found = act.action_fields(action)
    return {**found, "policy": f"{origin.file}:{origin.line}"} if origin.file else found


class Sparingly:
    """At most so many a minute of ``each`` source, and of all together."""

    def __init__(self, each: int, everyone: int) -> None:
        self._each, self._everyone = each, everyone
        self._since = float("-inf")
        self._said: Counter[int] = Counter()
        self._all = 0

    def may(self, source: int, now: float) -> bool:
        if now >= self._since + 60.0:
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
