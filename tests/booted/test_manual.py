"""The manual pages: a page that man cannot format, or that forgets a command, helps nobody."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mpsagent.cli.verbs import cli

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ROOT / "packaging/man"


@pytest.fixture
def pages(tmp_path: Path) -> list[Path]:
    """All pages, the generated one included."""
    policy = tmp_path / "mpsagent-policy.5"
    made = subprocess.run(
        [sys.executable, PAGES / "policy_page.py", ROOT / "docs/policy.md"], capture_output=True, text=True, check=True
    )
    policy.write_text(made.stdout)
    return [*sorted(PAGES.glob("*.[1-8]")), policy]


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not here")
def test_mandoc_has_no_complaint(pages: list[Path]) -> None:
    """Pages of other packages may be missing on the machine that checks; everything else counts."""
    done = subprocess.run(["mandoc", "-T", "lint", *pages], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stdout.splitlines() if "referenced manual not found" not in line]
    assert not complaints, "\n".join(complaints)


def test_every_command_is_in_the_manual() -> None:
    """A new command without a word in mpsagent-cli(1) fails here."""
    text = (PAGES / "mpsagent-cli.1").read_text()
    missing = [name for name in cli.commands if not re.search(rf"^\.It Cm {name}\b", text, re.MULTILINE)]
    assert not missing


def test_every_key_of_the_policy_is_in_the_manual(pages: list[Path]) -> None:
    """mpsagent-policy(5) is made from the reference; what the converter drops would be missing without a sound."""
    text = pages[-1].read_text()
    for key in re.findall(r"^\| `(\S+)` \|", (ROOT / "docs/policy.md").read_text(), re.MULTILINE):
        assert f".It Ic {key}" in text


def test_the_package_has_the_documents_that_it_names(package: Path, tmp_path: Path) -> None:
    """Pages, units, programs and policy files send readers to docs/: after an installation it is beside README."""
    done = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True)
    (tmp_path / "files.tar").write_bytes(done.stdout)
    place = "usr/share/doc/mpsagent/"
    with tarfile.open(tmp_path / "files.tar") as archive:
        files = {one.name.removeprefix("./"): one for one in archive if one.isfile()}
        named: dict[str, set[str]] = {}
        for name, one in files.items():
            if one.size < 1 << 20 and "/lib/python" not in name and name.endswith((".md", ".toml", ".service", ".yml")):
                text = archive.extractfile(one)
                assert text is not None
                for page in re.findall(r"\b(?:docs|examples)/[\w./-]*\w", text.read().decode()):
                    named.setdefault(page, set()).add(name)
    wanted = {"docs/policy.md", "docs/operations.md", "docs/first-hour.md"}
    assert {page for page in named if page.endswith(".md")} >= wanted
    there = {name.removeprefix(place) for name in files}
    there |= {str(parent) for name in there for parent in Path(name).parents}
    assert {page: by for page, by in named.items() if page not in there} == {}
