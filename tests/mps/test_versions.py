"""What a driver's MPS can do, by its version and by its own help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpsagent.mps import versions
from tests import recordings

_OPTIONAL = ("memory_limits", "server_status", "pid_file", "multiuser_server", "defaults_protected", "quit_timeout")


def help_of_580() -> str:
    text = recordings.path("01").read_text()
    found = re.search(r"\['-h'\] rc 0 OUT (.*?)\n ERR ", text, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("driver", "has"),
    [
        ("470.256.02", set()),
        ("535.261.03", {"memory_limits", "quit_timeout"}),
        ("550.163.01", {"memory_limits", "quit_timeout", "server_status", "pid_file", "defaults_protected"}),
        ("580.159.04", set(_OPTIONAL)),
        ("615.10", set(_OPTIONAL)),
    ],
)
def test_by_version(driver: str, has: set[str]) -> None:
    found = versions.of(driver)
    assert found.driver == int(driver.split(".")[0])
    assert found.has & set(_OPTIONAL) == has
    assert not found.unsure, "each of these drivers was tried"


def test_between_two_drivers_an_ability_is_missing_and_unsure() -> None:
    found = versions.of("565.57.01")
    assert "multiuser_server" not in found.has
    assert "multiuser_server" in found.unsure
    assert "server_status" in found.has
    assert "server_status" not in found.unsure


def test_the_help_settles_it() -> None:
    found = versions.of("565.57.01", help_of_580())
    assert "multiuser_server" in found.has
    assert "processes" in found.has
    assert "terminate_client" in found.has
    assert not found.unsure & {"multiuser_server", "processes", "terminate_client"}
    without = versions.of("580.1", help_of_580().replace("--multiuser-server", "--other").replace("  ps [-p PID]", ""))
    assert "multiuser_server" not in without.has
    assert "processes" not in without.has


def test_the_help_of_older_drivers_lists_nothing() -> None:
    text = "CUDA MPS Control for Linux/Unix.\nCopyright (C) 2003 - 2023 NVIDIA Corporation.\n"
    assert versions.of("550.163.01", text) == versions.of("550.163.01")


@pytest.mark.parametrize("driver", [None, "", "N/A", "580x", "-1", "5.5.5.5.5.5", "９９９"])
def test_an_unknown_driver_can_do_nothing_for_certain(driver: str | None) -> None:
    found = versions.of(driver)
    assert found.driver is None
    assert found.has == set()
    assert found.unsure == set(versions.ROWS)
    assert "multiuser_server" in versions.of(driver, help_of_580()).has


def test_rows_are_in_order() -> None:
    for name, row in versions.ROWS.items():
        assert row.missing < row.since, name
        assert row.source


def test_the_manual_says_the_same() -> None:
    text = (Path(__file__).parents[2] / "docs" / "mps-field-guide.md").read_text()
    (header,) = re.findall(r"(?m)^\| ability \|.*$", text)
    drivers = [cell.strip() for cell in header.strip("|").split("|")[2:]]
    rows = {
        name: [cell.strip() for cell in rest.split("|")]
        for name, rest in re.findall(r"(?m)^\| `(\w+)` \|[^|\n]*\|(.*)\|$", text)
    }
    assert rows == {
        name: ["yes" if name in versions.of(driver).has else "no" for driver in drivers] for name in versions.ROWS
    }
