"""The mistakes that were made once can still be put back, and small ones can be drawn."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from tests.world import mutator
from tests.world.known import ROOT, applies, breaks, patches


@pytest.mark.parametrize("patch", patches(), ids=lambda one: one.stem)
def test_a_known_mistake_can_be_put_back(patch: Path, tmp_path: Path) -> None:
    """Whoever changes the place changes the patch: it says what must never be so again."""
    assert applies(patch) == "", f"make the same mistake in today's code, and keep it in {patch.name}"
    assert re.fullmatch(r"[A-Z].{20,180}\.", breaks(patch))
    for name in re.findall(r"^--- a/(.*)", patch.read_text(), re.MULTILINE):
        place = tmp_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((ROOT / name).read_bytes())
    assert applies(patch, tmp_path, check=False) == ""
    for path in tmp_path.rglob("*.py"):
        ast.parse(path.read_text())
        assert path.read_bytes() != (ROOT / path.relative_to(tmp_path)).read_bytes()


def test_mutations_are_one_line_of_python_and_the_same_for_the_same_seed() -> None:
    first = list(itertools.islice(mutator.drawn(ROOT, 7), 12))
    assert first == list(itertools.islice(mutator.drawn(ROOT, 7), 12))
    for one in first:
        before, after = (ROOT / one.file).read_text().splitlines(), one.text.splitlines()
        assert [number for number, (a, b) in enumerate(zip(before, after, strict=True), 1) if a != b] == [one.line]
        ast.parse(one.text)
