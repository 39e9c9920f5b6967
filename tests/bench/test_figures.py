"""What is measured, and what comes out of it."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent_bench import picture, plan, provision, results
from mpsagent_bench.plan import Run

UNITS = {"block": "kernels", "train": "steps"}


def figure(mode: str, workload: str, processes: int, throughput: float, **more: object) -> results.Figure:
    return replace(results.Figure(mode, workload, processes, 1, throughput, 1.0, 2.0), **more)  # type: ignore[arg-type]


def test_a_mode_has_all_its_runs_in_a_row() -> None:
    """Each mode has an MPS of its own, that is started once."""
    runs = plan.plan(["off", "one-server"], ["block", "train"], [4, 1], users=2, seconds=5)
    assert [(mode, len(list(some))) for (mode, _), some in plan.by_mps(runs)] == [("off", 4), ("one-server", 4)]
    assert [(run.processes, run.users) for run in runs[:2]] == [(1, 1), (4, 2)], "no more users than processes"


def test_with_turns_a_users_processes_work_at_once_and_users_one_after_the_other() -> None:
    assert Run("turns", "block", 5, 2, 1).groups() == [[0, 2, 4], [1, 3]]
    assert Run("one-server", "block", 3, 2, 1).groups() == [[0, 1, 2]]


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
    rows = results.rows([*done, figure("one-server", "train", 1, 7.0)])
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


def test_a_rule_without_a_figure_for_one_alone_says_why() -> None:
    programs = ["launches", "train"]
    none = results.without(Run("one-server", provision.ALONE + "train", 1, 1, 0.5), "no step ended in 0.5 s")
    alone = [figure("one-server", provision.ALONE + "launches", 1, 10, each=(10.0,)), none]
    under = figure("one-server", provision.RULE + "none", 2, 9, each=(5.0, 4.0))
    found = provision.verdicts(programs, provision.rules([1, 1], 132), [*alone, under])
    text = " ".join(" ".join(provision.table(programs, found)).split())
    assert "no figure for train alone: no step ended in 0.5 s" in text


def test_figures_stand_beside_what_they_are_compared_with() -> None:
    rows = results.rows([
        figure("off", "block", 1, 10), figure("off", "block", 4, 10), figure("one-server", "block", 1, 10),
        figure("one-server", "block", 4, 39), results.without(Run("per-user", "block", 4, 1, 1), "no " * 60),
    ])  # fmt: skip
    by = {(row.figure.mode, row.figure.processes): row for row in rows}
    assert (by["one-server", 4].against_off, by["one-server", 4].against_one) == (3.9, 3.9)
    assert by["off", 4].against_one == 1.0
    assert by["per-user", 4].against_off is None
    assert [row.figure.processes for row in rows] == [1, 1, 4, 4, 4]
    lines = results.table(rows, UNITS)
    assert max(map(len, lines)) <= 80
    assert sum("no no" in line for line in lines) > 1, "why there is no figure, in full"


# --- pictures


def test_pictures_are_whole() -> None:
    rows = results.rows([figure(m, w, n, n * 2.0) for m in plan.MODES for w in UNITS for n in (1, 2)])
    svg = picture.drawn(rows, UNITS, "node <1> & co", "svg")
    assert ET.fromstring(svg).tag.endswith("svg")
    assert picture.drawn(rows, UNITS, "a", "png").startswith(b"\x89PNG")


def test_the_page_needs_nothing_else_and_hostile_names_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, too: it is the table then."""
    bad = figure("off", "block", 1, 0, problem="<script>alert(1)</script>")
    rows = results.rows([bad, figure("off", "train", 1, 2)])
    with monkeypatch.context() as none:
        none.setitem(sys.modules, "matplotlib.figure", None)
        page = picture.page(rows, UNITS, "<b>node</b>").decode()
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    assert not any(word in page for word in ("<svg", "http:", "https:", "src=", "@import", "url("))
    drawn = picture.page(rows, UNITS, "node").decode()
    assert drawn.count("<svg") == drawn.count("<table") == 1
    assert not any(word in drawn for word in ("<script", "src=", "@import", "<image"))


def test_no_figures_make_a_picture_all_the_same() -> None:
    assert picture.drawn([], UNITS, "broken off", "svg")


# --- how to cut the GPU


def percent(text: str) -> float:
    return float(text.strip('"').removesuffix("%"))


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=16), st.integers(2, 200))
def test_shares_that_are_not_to_overlap_do_not(weights: list[float], multiprocessors: int) -> None:
    by = {rule.name: rule.threads for rule in provision.rules(weights, multiprocessors)}
    for name in {"even", "weighted"} & set(by):  # with equal weights they are the same
        assert sum(map(percent, by[name])) <= 100 + 0.05 * len(weights)
    assert max(map(percent, by["overlapping"])) <= 100
    exact = [int(text) for text in by["exact"]]
    assert all(one >= 2 and one % 2 == 0 for one in exact)
    assert sum(one for one in exact if one > 2) <= multiprocessors


def test_the_best_rule_has_the_most_work_and_then_nobody_badly_off() -> None:
    programs = ["launches", "train"]
    alone = [figure("one-server", provision.ALONE + name, 1, 10, each=(10.0,)) for name in programs]

    def under(rule: str, *each: float, problem: str = "") -> results.Figure:
        return figure("one-server", provision.RULE + rule, 2, sum(each), each=each, problem=problem)

    rules = provision.rules([2, 1], 132)
    known = [under("none", 9.5, 1), under("even", 6, 6), under("exact", 7, 5.1), under("weighted", problem="no memory")]
    found = provision.verdicts(programs, rules, [*alone, *known])
    assert [one.rule.name for one in found] == ["even", "exact", "none", "weighted"]
    assert (found[0].total, found[0].least) == (1.2, 0.6)
    assert found[-1].problem == "no memory"


def test_the_rules_lines_are_a_policy() -> None:
    from mpsagent.policy.files import load

    for rule in provision.rules([2, 1, 1], 132):
        lines = provision.sections(rule, ["61184", "61185", "61186"])
        policy, mistakes = load([("lines", lines)])
        assert policy is not None, mistakes
        assert lines.count("threads") == (3 if rule.threads else 0)
