"""What docs/develop/daemons.md says was seen: each cell of its tables of runs is compared by the test that has seen it.

A table that nobody compares is believed long after it has become wrong. That no row is left out is held by
tests/test_docs.py.
"""

from __future__ import annotations

from pathlib import Path

from tests.nvidia.fetch import Driver

PAGE = Path(__file__).parents[2] / "docs" / "develop" / "daemons.md"
NOT_TRIED = "not tried"


def rows() -> dict[str, dict[str, str]]:
    """What was tried, and the word for each driver by its version. "The same" is what stands to the left of it."""
    found: dict[str, dict[str, str]] = {}
    versions: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if first == "tried":
            versions = cells
        elif not line.startswith("|"):
            versions = []
        elif versions and not first.startswith("---"):
            for place, words in enumerate(cells):
                cells[place] = cells[place - 1] if place and words == "the same" else words
            found[first] = dict(zip(versions, cells, strict=True))
    return found


def saw(driver: Driver, row: str, words: str) -> None:
    """``row``: the beginning of one row, as it stands there."""
    (said,) = [cells for tried, cells in rows().items() if tried.startswith(row)]
    assert said[driver.version] == words, f"{row}, {driver.version}"
