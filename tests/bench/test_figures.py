"""What is measured, and what comes out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.bench import plan, results
from mpsagent.bench.plan import Run

UNITS = {"block": "kernels", "train": "steps"}


def figure(mode: str, workload: str, processes: int, throughput: float, **more: object) -> results.Figure:
    return replace(results.Figure(mode, workload, processes, 1, throughput, 1.0, 2.0), **more)  # type: ignore[arg-type]


def test_a_mode_has_all_its_runs_in_a_row() -> None:
    """Each mode has an MPS of its own, that is started once."""
    runs = plan.plan(["off", "together"], ["block", "train"], [4, 1], users=2, seconds=5)
    assert [(mode, len(list(some))) for mode, some in plan.by_mode(runs)] == [("off", 4), ("together", 4)]
    assert [(run.processes, run.users) for run in runs[:2]] == [(1, 1), (4, 2)], "no more users than processes"


def test_with_turns_a_users_processes_work_at_once_and_users_one_after_the_other() -> None:
    assert Run("turns", "block", 5, 2, 1).groups() == [[0, 2, 4], [1, 3]]
    assert Run("together", "block", 3, 2, 1).groups() == [[0, 1, 2]]


def test_it_says_how_long_it_takes() -> None:
    one = Run("turns", "block", 2, 2, 10)
    assert plan.takes([one]) > 2 * 10
    assert plan.takes([one, one]) - plan.takes([one]) == pytest.approx(one.takes()), "the MPS is started once"


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_percentile_is_a_value_that_so_many_do_not_exceed(values: list[int], share: float) -> None:
    found = results.percentile(sorted((value, 1.0) for value in values), share)
    assert found is not None
    assert round(found * 1000) in values
    assert sum(value <= found * 1000 + 0.5 for value in values) >= share * len(values) - 1e-6


def test_a_process_that_told_every_second_latency_counts_double() -> None:
    run = Run("off", "block", 2, 1, 2.0)
    done = results.figure(run, [4, 4], [[1000, 1000], [9000, 9000, 9000, 9000]], 4.0, [132, 66])
    assert (done.throughput, done.each) == (2.0, (2.0, 2.0))
    assert (done.p50, done.p99) == (1.0, 9.0)


def test_where_no_step_ended_there_is_no_speed_but_the_reason() -> None:
    """0.0 is what a GPU that stands still would have."""
    done = [results.figure(Run("off", "train", n, 1, 0.5), [0.0] * n, [[]] * n, 0.5, [132] * n) for n in (1, 2)]
    assert {one.problem for one in done} == {"no step ended in 0.5 s: more --seconds"}
    rows = results.rows([*done, figure("together", "train", 1, 7.0)])
    assert [row.against_off for row in rows] == [None] * 3, "nothing is so many times what was not measured"
    lines = results.table(rows, UNITS)
    assert not any("0.0 " in line for line in lines)
    assert lines[-1] == "(1) no step ended in 0.5 s: more --seconds"
    assert [one["throughput"] for one in results.as_json(rows)] == [None, 7.0, None]


def test_processes_without_a_step_beside_others_are_counted() -> None:
    done = results.figure(Run("off", "train", 3, 1, 0.5), [0.0, 4.0, 0.0], [[], [1000] * 4, []], 0.5, [132] * 3)
    assert (done.throughput, done.problem) == (8.0, "")
    rows = results.rows([done])
    assert results.table(rows, UNITS)[-1] == "off, train: 2 of 3 processes ended no step in their time"
    assert results.as_json(rows)[0]["note"] == "2 of 3 processes ended no step in their time"


def test_figures_stand_beside_what_they_are_compared_with() -> None:
    rows = results.rows([
        figure("off", "block", 1, 10), figure("off", "block", 4, 10), figure("together", "block", 1, 10),
        figure("together", "block", 4, 39), results.without(Run("apart", "block", 4, 1, 1), "no " * 60),
    ])  # fmt: skip
    by = {(row.figure.mode, row.figure.processes): row for row in rows}
    assert (by["together", 4].against_off, by["together", 4].against_one) == (3.9, 3.9)
    assert by["off", 4].against_one == 1.0
    assert by["apart", 4].against_off is None
    assert [row.figure.processes for row in rows] == [1, 1, 4, 4, 4]
    lines = results.table(rows, UNITS)
    assert max(map(len, lines)) <= 80
    assert sum("no no" in line for line in lines) > 1, "why there is no figure, in full"
