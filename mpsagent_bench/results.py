"""From what the processes told to figures. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpsagent_bench.plan import OFF, Run


@dataclass(frozen=True)
class Figure:
    """The figures of a run.

    ``throughput``: steps per second of all processes, from the first begin to the last end, including changes of user;
    None if there is a ``problem``. ``p50`` and ``p99``: milliseconds for a step; None if no step was reported.
    """

    mode: str
    workload: str
    processes: int
    users: int
    throughput: float | None
    p50: float | None
    p99: float | None
    each: tuple[float, ...] = ()
    """Steps a second of each process, while it worked."""
    multiprocessors: tuple[int, ...] = ()
    """The number that each process saw."""
    problem: str = ""
    """The reason why there are no figures."""

    @property
    def note(self) -> str:
        """Return a note on processes without a step, which the figures do not show."""
        none = sum(1 for one in self.each if not one)
        return f"{none} of {len(self.each)} processes ended no step in their time" if none else ""


def figure(
    run: Run, steps: Sequence[float], latencies: Sequence[Sequence[int]], seconds: float, saw: Sequence[int]
) -> Figure:
    """Return the figures of a run.

    ``latencies``: microseconds, for each process. ``seconds``: the duration of the run. A process that has reported
    only every second latency counts double. Without a finished step there are no figures.
    """
    if not any(steps):
        return without(run, f"no step ended in {run.seconds:g} s: more --seconds")
    weighed = sorted((value, of / len(own)) for own, of in zip(latencies, steps, strict=True) for value in own)
    return Figure(
        run.mode, run.workload, run.processes, run.users, sum(steps) / seconds,
        percentile(weighed, 0.5), percentile(weighed, 0.99), tuple(one / run.seconds for one in steps),
        tuple(saw),
    )  # fmt: skip


def without(run: Run, problem: str) -> Figure:
    return Figure(run.mode, run.workload, run.processes, run.users, None, None, None, problem=problem)


def percentile(weighed: Sequence[tuple[int, float]], share: float) -> float | None:
    """In milliseconds, of microseconds with their weights, in ascending order."""
    left = sum(weight for _, weight in weighed) * share
    for value, weight in weighed:
        left -= weight
        if left <= 1e-9:
            return value / 1000
    return weighed[-1][0] / 1000 if weighed else None


@dataclass(frozen=True)
class Row:
    """A figure and the figures with which it is compared; None if those were not measured."""

    figure: Figure
    against_off: float | None
    """Throughput, over that of as many processes without MPS."""
    against_one: float | None
    """Throughput, over that of one process in the same mode."""


def rows(figures: Sequence[Figure]) -> list[Row]:
    """Return the rows by workload and number of processes, so that comparable figures are next to each other."""
    by = {(one.mode, one.workload, one.processes): one.throughput for one in figures}

    def over(one: Figure, mode: str, processes: int) -> float | None:
        other = by.get((mode, one.workload, processes))
        return one.throughput / other if other and one.throughput is not None else None

    order = list(dict.fromkeys(one.workload for one in figures))
    return [
        Row(one, over(one, OFF, one.processes), over(one, one.mode, 1))
        for one in sorted(figures, key=lambda one: (order.index(one.workload), one.processes))
    ]


def table(found: Sequence[Row], units: dict[str, str]) -> list[str]:
    """80 columns. ``units`` of the workloads."""
    lines: list[str] = []
    workload = None
    problems = list(dict.fromkeys(row.figure.problem for row in found if row.figure.problem))
    for row in found:
        one = row.figure
        if one.workload != workload:
            workload = one.workload
            head = f"{'MODE':9}{'PROC':>5}{'USERS':>6}{units[workload].upper() + '/S':>14}{'P50 ms':>10}{'P99 ms':>10}"
            lines += [*([""] if lines else []), workload, head + f"{'TIMES OFF':>12}{'TIMES ONE':>12}"]
        start = f"{one.mode:9}{one.processes:5}{one.users:6}"
        if one.throughput is None:
            lines.append(f"{start}  no figures, see ({problems.index(one.problem) + 1}) below")
            continue
        lines.append(
            f"{start}{one.throughput:14.1f}{_or(one.p50, '.2f')}{_or(one.p99, '.2f')}"
            f"{_or(row.against_off, '.2f', 12)}{_or(row.against_one, '.2f', 12)}"
        )
    for number, problem in enumerate(problems, 1):
        lines += ["", *textwrap.wrap(f"({number}) {problem}", 80)]
    notes = [f"{one.mode}, {one.workload}: {one.note}" for one in (row.figure for row in found) if one.note]
    return [*lines, *([""] if notes else []), *(line for note in notes for line in textwrap.wrap(note, 80))]


def _or(value: float | None, form: str, width: int = 10) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def as_json(found: Sequence[Row]) -> list[dict[str, Any]]:
    return [
        {**asdict(row.figure), "note": row.figure.note, "against_off": row.against_off, "against_one": row.against_one}
        for row in found
    ]
