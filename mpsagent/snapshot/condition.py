"""What is not as it should be: one value, from where it is found to who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mpsagent.core.sentences import Names, named


@dataclass(frozen=True, slots=True)
class Condition:
    """``what`` is wrong, ``since`` when (seconds since the epoch; None: not known), how ``bad`` that is, what to
    ``do``. ``not sure``: what mpsagent cannot promise, and no reason to call it unhealthy. ``until``: when it is
    forgotten; ``where``: at which of several instances, empty: everywhere."""

    what: str
    since: float | None = None
    do: str = ""
    bad: Literal["problem", "not sure"] = "problem"
    until: float | None = None
    where: tuple[str, ...] = ()

    def text(self, names: Names) -> str:
        """In words, with names of users. What is not sure is said of each instance by itself."""
        where = f"{self.where[0]}: " if len(self.where) == 1 and self.bad == "problem" else ""
        return where + named(self.what, names)


def problems(conditions: Sequence[Condition]) -> list[Condition]:
    return [one for one in conditions if one.bad == "problem"]
