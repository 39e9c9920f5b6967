"""Documentation that says something else than the code is worse than none: what can be compared is compared."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests import recordings

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Transcripts' sections and scenarios, as comments and pages name them: "recording 02, R3", "X13".
_SECTION = re.compile(r"\brecordings? (0\d), ([A-Z]\d+)\b")
_SCENARIO = re.compile(r"\bX\d+\b")


def test_the_table_of_modules_is_that_of_the_modules() -> None:
    """Written from the modules' own first sentences: `make modules`."""
    path = ROOT / "packaging" / "write_module_table.py"
    spec = importlib.util.spec_from_file_location("write_module_table", path)
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    present = writer.TARGET.read_text(encoding="utf-8")
    assert writer.text(present) == present, "docs/architecture.md is out of date: run `make modules`"
    modules = [path for path in (ROOT / "mpsagent").glob("*/*.py") if path.name != "__init__.py"]
    assert present.count("\n| ") >= len(modules) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A reader who follows a name must find something: `make` targets too."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.])((?:docs|tests|policies|packaging|systemd|benchmarks|demo)/[\w./-]*\w)", text))
    assert not [name for name in named if not (ROOT / name).exists()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_every_measurement_that_is_named_exists() -> None:
    """A decision that names its measurement is worth nothing if that cannot be looked up."""
    sections = {(name[:2], key) for name in recordings.names() for key in recordings.sections(name)}
    scenarios = set(_SCENARIO.findall("".join(p.read_text() for p in (ROOT / "tests" / "conformance").glob("*.py"))))
    wrong = []
    for path in [*PAGES, *(ROOT / "mpsagent").rglob("*.py")]:
        text = " ".join(path.read_text(encoding="utf-8").split()).replace(" # ", " ")
        wrong += [(path.name, found) for found in _SECTION.findall(text) if found not in sections]
        if path.suffix == ".md" or "conformance scenario" in text:
            wrong += [(path.name, found) for found in _SCENARIO.findall(text) if found not in scenarios]
    assert not wrong
