"""What may differ from real MPS, each with its scenarios, its lines and its reason. Pure.

An allowance takes nothing out of what is compared: it names, after the comparison, differing lines that are chance in
real MPS itself, or that the simulator cannot or need not do. Everything else that differs makes `make conformance` fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ANSWER = r"ctl get_server_(list|status S\d+) -> rc=\d.*"


@dataclass(frozen=True)
class Allowance:
    """`lines` is a pattern of differing lines without their sign; `against` is "real" or "recording"."""

    name: str
    scenarios: tuple[str, ...]
    against: str
    lines: str
    reason: str


ALLOWED = (
    Allowance(
        "turned away",
        ("R10", "Q4"),
        "real",
        rf"{ANSWER}|  err: Cannot send command to MPS control daemon process",
        "a front-end that is turned away beside an open one ends with status 1 and a message if it is still sending, "
        "with 0 and nothing if it has sent: real MPS three times the one, twice the other",
    ),
)


def named(name: str, against: str, differences: Sequence[str]) -> tuple[list[str], list[str]]:
    """The differences that no allowance of this scenario covers, and the names of the allowances that were needed."""
    left: list[str] = []
    used: list[str] = []
    for line in differences:
        sign, text = line[:1], line[2:]
        found = next(
            (
                each.name
                for each in ALLOWED
                if sign in ("-", "+")
                and name in each.scenarios
                and against.startswith(each.against)
                and re.fullmatch(each.lines, text)
            ),
            None,
        )
        if found is None:
            left.append(line)
        elif found not in used:
            used.append(found)
    return left, used
