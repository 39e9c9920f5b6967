"""Rules that divide a GPU between several programs, compared on a mix of workloads. Pure.

Each program runs alone first. Then all of them run at the same time under each rule, each as a separate user with that
rule's limit.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpsagent_bench.plan import Run
from mpsagent_bench.results import Figure

MODE = "one-server"
ALONE, RULE = "alone: ", "rule: "


@dataclass(frozen=True)
class Rule:
    name: str
    words: str
    threads: tuple[str, ...]
    """The value of `active_threads` for each program in a policy, as TOML; empty: no limit."""


def rules(weights: Sequence[float], multiprocessors: int) -> list[Rule]:
    """Return the rules for programs with these weights; of rules with equal limits only the first."""
    count, whole = len(weights), sum(weights)

    def percent(values: Sequence[float]) -> tuple[str, ...]:
        return tuple(f'"{min(100.0, value):.1f}%"'.replace(".0%", "%") for value in values)

    exact = [max(2, int(multiprocessors * weight / whole) // 2 * 2) for weight in weights]
    found = [
        Rule("none", "no limits", ()),
        Rule("even", "100/n percent each", percent([100 / count] * count)),
        Rule("overlapping", "100/(0.5 n) percent each", percent([200 / count] * count)),
        Rule("weighted", "percent by weight", percent([100 * weight / whole for weight in weights])),
        Rule("exact", "multiprocessors by weight, none shared", tuple(map(str, exact))),
    ]
    return list({rule.threads: rule for rule in reversed(found)}.values())[::-1]


def sections(rule: Rule, users: Sequence[str]) -> str:
    """Lines of a policy that give each user the limit of its program."""
    pairs = zip(users, rule.threads, strict=True) if rule.threads else ()
    return "".join(f"[user.{user}]\nactive_threads = {threads}\n" for user, threads in pairs)


def plan(programs: Sequence[str], found: Sequence[Rule], users: Sequence[str], seconds: float) -> list[Run]:
    """Each program alone and without limits, then all of them by each rule."""
    alone = [Run(MODE, ALONE + name, 1, 1, seconds, (name,)) for name in dict.fromkeys(programs)]
    count = len(programs)
    return alone + [
        Run(MODE, RULE + rule.name, count, count, seconds, tuple(programs), sections(rule, users)) for rule in found
    ]


@dataclass(frozen=True)
class Verdict:
    """``each``: every program's speed as a share of its speed alone."""

    rule: Rule
    each: tuple[float, ...]
    problem: str = ""

    @property
    def total(self) -> float:
        """1.0: as one program alone on the GPU."""
        return sum(self.each)

    @property
    def least(self) -> float:
        return min(self.each, default=0.0)


def verdicts(programs: Sequence[str], known: Sequence[Rule], figures: Sequence[Figure]) -> list[Verdict]:
    """Best first: by the total, and of those within 2 % of each other by the least."""
    by = {one.workload: one for one in figures}
    alone = [by.get(ALONE + name) for name in programs]
    speeds = [one.each[0] if one and one.each else 0.0 for one in alone]
    found = []
    for rule in known:
        if (figure := by.get(RULE + rule.name)) is None:
            continue
        problem = figure.problem
        if not all(speeds) and not problem:
            missing = speeds.index(0.0)
            why = one.problem if (one := alone[missing]) else ""
            problem = f"no figure for {programs[missing]} alone" + (f": {why}" if why else "")
        shares = () if problem else tuple(speed / one for speed, one in zip(figure.each, speeds, strict=True))
        found.append(Verdict(rule, shares, problem))
    most = max((one.total for one in found), default=0.0)
    return sorted(found, key=lambda one: (bool(one.problem), one.total < 0.98 * most, -one.least, -one.total))


def table(programs: Sequence[str], found: Sequence[Verdict]) -> list[str]:
    """And the best rule as lines for a policy."""
    lines = [f"{'RULE':13}{'TOTAL':>7}{'LEAST':>7}  SPEED OF EACH AS A SHARE OF ITS SPEED ALONE"]
    for one in found:
        if one.problem:
            start = f"{one.rule.name:13}{'-':>7}{'-':>7}  "
            lines += textwrap.wrap(one.problem, 80, initial_indent=start, subsequent_indent=" " * len(start))
        else:
            each = ", ".join(f"{name} {share:.2f}" for name, share in zip(programs, one.each, strict=True))
            lines.append(f"{one.rule.name:13}{one.total:7.2f}{one.least:7.2f}  {each}")
            lines.append(f"{'':29}{one.rule.words}")
    if found and not found[0].problem:
        best = found[0].rule
        users = [f"USER{number}" for number in range(1, len(programs) + 1)]
        lines += ["", f"Best: {best.name} ({best.words}). For the policy, with your users' names:", ""]
        lines += (sections(best, users) or "# no limits").splitlines()
    return lines


def as_json(found: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {"rule": one.rule.name, "threads": one.rule.threads, "each": one.each, "total": one.total, "least": one.least,
         "problem": one.problem}
        for one in found
    ]  # fmt: skip
