"""The words of each surface stay as they are: each has a file beside this one. `make golden` writes them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.surfaces import SURFACES

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", SURFACES)
def test_the_words_of_a_surface_stay(name: str) -> None:
    assert SURFACES[name]() == (HERE / f"{name}.txt").read_text(), "if that is meant: make golden"


def test_there_is_no_file_without_a_surface() -> None:
    assert {path.stem for path in HERE.glob("*.txt")} == set(SURFACES)
