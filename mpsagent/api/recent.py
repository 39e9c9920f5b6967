"""The last change of user and the last fault, read from the records as they come. Survives the agent, as they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from mpsagent.api.views import Change, Fault

Since = Callable[[int], Iterable[Mapping[str, Any]]]


class Recent:
    """``since(cursor)``: the records after a cursor, oldest first. ``mine``: whether one is about the instance; whose
    turn it is at another is no change here."""

    def __init__(self, since: Since, mine: Callable[[Mapping[str, Any]], bool] = lambda record: True) -> None:
        self._since, self._mine = since, mine
        self._seen = 0
        self._user: int | None = None
        self.change: Change | None = None
        self.fault: Fault | None = None

    def look(self) -> Recent:
        """Take in what is new."""
        for record in self._since(self._seen):
            self._seen = record["seq"]
            rule = _RULES.get(record["kind"])
            if rule is not None and self._mine(record):
                try:
                    rule(self, record)
                except (KeyError, TypeError):  # a record of another version
                    continue
        return self

    def _began(self, record: Mapping[str, Any]) -> None:
        uid = record["uid"]
        before = None if self._user == uid else self._user
        if before is not None or self._user is None:
            self.change = Change(record["at"], uid, before, record.get("gap"))
        self._user = uid

    def _fault(self, record: Mapping[str, Any]) -> None:
        self.fault = Fault(record["at"], record["server"], record.get("uid"))

    def _over(self, record: Mapping[str, Any]) -> None:
        if self.fault is not None and self.fault.server == record["server"]:
            self.fault = replace(self.fault, seconds=round(record["seconds"], 3), recovered=record["recovered"])


_RULES: dict[str, Callable[[Recent, Mapping[str, Any]], None]] = {
    "turn.began": Recent._began,
    "server.fault": Recent._fault,
    "server.fault_over": Recent._over,
}
