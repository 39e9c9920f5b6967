"""What a driver's MPS can do, by its version and by its own help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpsagent.mps.versions import listed
from tests import recordings
from tests.nvidia.abilities import ROWS, able

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
    assert able(driver) & set(_OPTIONAL) == has


def test_the_help_settles_it() -> None:
    assert "multiuser_server" not in able("565.57.01")
    assert able("565.57.01", help_of_580()) >= {"multiuser_server", "processes", "terminate_client"}
    without = able("580.1", help_of_580().replace("--multiuser-server", "--other").replace("  ps [-p PID]", ""))
    assert without.isdisjoint({"multiuser_server", "processes"})


def test_the_help_of_older_drivers_lists_nothing() -> None:
    text = "CUDA MPS Control for Linux/Unix.\nCopyright (C) 2003 - 2023 NVIDIA Corporation.\n"
    assert listed(text) == set()
    assert able("550.163.01", text) == able("550.163.01")


def test_rows_are_in_order() -> None:
    for name, row in ROWS.items():
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
    assert rows == {name: ["yes" if name in able(driver) else "no" for driver in drivers] for name in ROWS}
