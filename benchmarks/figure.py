"""One measured figure, and how a table of them is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """``met`` None: there is no aim. ``against``: the same run's other measurement and the ratio to it."""

    what: str
    value: str
    aim: str = ""
    met: bool | None = None
    against: str = ""

    @property
    def verdict(self) -> str:
        return self.aim if self.met is None else f"{self.aim}: {'met' if self.met else 'MISSED'}"


def text_table(figures: Sequence[Figure]) -> str:
    rows = [("figure", "measured", "aim", "against, in the same run")]
    rows += [(one.what, one.value, one.verdict, one.against) for one in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row[3]]).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown(figures: Sequence[Figure], about: str) -> str:
    lines = [about, "", "| figure | measured | aim | against, in the same run |", "|---|---|---|---|"]
    lines += [f"| {one.what} | {one.value} | {one.verdict} | {one.against} |" for one in figures]
    return "\n".join(lines) + "\n"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(share * len(ordered) + 0.999999) - 1))]


def p50_p99(seconds: Sequence[float]) -> str:
    return f"{percentile(seconds, 0.5) * 1000:.2f} ms, {percentile(seconds, 0.99) * 1000:.2f} ms"
