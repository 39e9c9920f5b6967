"""Conditions: problems and missing guarantees, as `status` and the journal show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpsagent.core.words import Names, named


@dataclass(frozen=True, slots=True)
class Condition:
    """A problem, or a promise that mpsagent cannot keep.

    ``what``: its text. ``since``: seconds since the epoch; None: unknown. ``do``: the action. ``bad``: a condition that
    is "not sure" does not make mpsagent unhealthy. ``until``: the time at which it is forgotten. ``where``: the
    instances; empty: all of them.
    """

    what: str
    since: float | None = None
    do: str = ""
    bad: Literal["problem", "not sure"] = "problem"
    until: float | None = None
    where: tuple[str, ...] = ()

    def text(self, names: Names) -> str:
        """Return the text with names of users, and with the instance if it is a problem of only one."""
        where = f"{self.where[0]}: " if len(self.where) == 1 and self.bad == "problem" else ""
        return where + named(self.what, names)


def problems(conditions: Sequence[Condition]) -> list[Condition]:
    """Return the conditions that make mpsagent unhealthy."""
    return [one for one in conditions if one.bad == "problem"]
