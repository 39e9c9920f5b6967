"""Allowances stay few and explained: what may differ from real MPS must be named, needed and in the README."""

from __future__ import annotations

from tests.conformance import allowances, report, scenarios

README = (report.HERE / "README.md").read_text()


def test_every_allowance_and_every_race_is_explained_in_the_readme() -> None:
    for each in allowances.ALLOWED:
        assert f"| {each.name} | {', '.join(each.scenarios)} |" in README, each.name
        assert set(each.scenarios) <= set(scenarios.ALL)
    for name in report.RACES:
        assert name in scenarios.ALL
        assert name in README


def test_only_the_named_lines_of_the_named_scenarios_are_allowed() -> None:
    refused = "+   err: Cannot send command to MPS control daemon process"
    assert allowances.named("R10", "real 2026", [refused]) == ([], ["turned away"])
    assert allowances.named("R9", "real 2026", [refused]) == ([refused], [])
    late = "- Control D1: Server S1 is busy"
    assert allowances.named("Q6", "real 2026", [late]) == ([], ["a late quit"])
    assert allowances.named("Q6", "recording 03", [late]) == ([late], [])
    other = "- ctl get_server_list -> rc=0 and more"
    assert allowances.named("R10", "real 2026", ["R10 steps", refused, other]) == (
        ["R10 steps", other],
        ["turned away"],
    )


def test_a_heading_or_a_line_in_another_place_needs_no_allowance() -> None:
    lines = ["R10 steps", "~   err: Cannot send command to MPS control daemon process"]
    assert allowances.named("R10", "real 2026", lines) == (lines, [])
