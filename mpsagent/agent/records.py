"""What goes into history and journal: transitions and actions, as flat fields."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.policy.policy import Policy

UNKNOWN_A_MINUTE = 30
"""Unknown lines on record; the record of everything else must outlive any number of them."""
QUIET = (act.SetAdmissions, act.ReleaseClient)
"""Said at every knock: the transitions tell what came of it."""


def action_record(action: act.Action, policy: Policy) -> dict[str, object]:
    """An action as it is written down: with the line of the policy that it follows."""
    origin = policy.origin(action.rule)
    found = act.action_fields(action)
    return {**found, "policy": f"{origin.file}:{origin.line}"} if origin.file else found


class Sparingly:
    """At most so many a minute."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._since, self._said = float("-inf"), 0

    def may(self, now: float) -> bool:
        if now >= self._since + 60.0:
            self._since, self._said = now, 0
        self._said += 1
        return self._said <= self._most


def worth_a_record(one: tr.Transition, unknown: Sparingly, now: float) -> bool:
    return not isinstance(one, tr.LineUnknown) or unknown.may(now)
