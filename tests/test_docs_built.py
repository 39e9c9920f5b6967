"""The documentation as pages for a browser: built, and every link followed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "packaging" / "build_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_built_and_every_link_leads_somewhere(builder: ModuleType, tmp_path: Path) -> None:
    """Also the names of pages in texts, which are links here. Nothing is fetched from elsewhere."""
    assert builder.build(tmp_path) == []
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert pages >= {"index.html", "CONTRIBUTING.html", *(f"docs/{one.stem}.html" for one in ROOT.glob("docs/*.md"))}
    start = (tmp_path / "index.html").read_text()
    assert '<a href="docs/security.html">security</a>' in start
    assert "<td>" in start, "tables are tables"
    loads = re.compile(r"<(script|img|link|iframe)\b|@import|url\(")
    assert not [path for path in tmp_path.rglob("*.html") if loads.search(path.read_text())], "no page loads anything"
    operations = (tmp_path / "docs" / "operations.html").read_text()
    assert '<h2 id="cuda-errors-805-to-810">' in operations
    assert '<a href="policy.html">docs/policy.md</a>' in operations
    security = (tmp_path / "docs" / "security.html").read_text()
    assert "</small><small>tests/" in security
    assert "<td>tests/" not in security, "long names leave the other columns no room"


def test_what_leads_nowhere_is_found(builder: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="here"></h1><a href="#here"></a><a href="a.html#b"></a><a href="x.html">'
    )
    (tmp_path / "a.html").write_text('<a href="https://example.org/">')
    (tmp_path / "alone.html").write_text("")
    assert builder.mistakes(tmp_path) == [
        "index.html: a.html#b leads nowhere", "index.html: x.html leads nowhere", "alone.html: no page leads to it",
    ]  # fmt: skip
