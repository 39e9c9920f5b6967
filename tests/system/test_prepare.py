"""The program that units run before they start: its words end up in the journal, its exit status decides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpsagent.system.prepare", *words]
    root = Path(__file__).resolve().parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)


def test_a_directory_is_made_and_a_refusal_is_one_line_with_a_priority(tmp_path: Path) -> None:
    """``<3>``: an error, in red, also where only errors are looked at."""
    tmp_path.chmod(0o755)
    good = run("public", str(tmp_path / "nvidia-mps"))
    assert good.returncode == 0
    assert (tmp_path / "nvidia-mps").stat().st_mode & 0o777 == 0o755
    assert run("log", str(tmp_path / "log")).returncode == 0
    (tmp_path / "taken").write_text("a file")
    refused = run("public", str(tmp_path / "taken"))
    assert refused.returncode == 1
    assert refused.stderr.startswith("<3>")
    assert refused.stderr.count("\n") == 1
    assert "not a directory" in refused.stderr


def test_a_note_does_not_keep_a_unit_from_starting(tmp_path: Path) -> None:
    """What was put right is said as a warning."""
    (tmp_path / "nvidia-mps").mkdir()
    (tmp_path / "nvidia-mps").chmod(0o777)
    done = run("public", str(tmp_path / "nvidia-mps"))
    assert done.returncode == 0
    assert "<4>" in done.stderr
    assert "0777" in done.stderr


@pytest.mark.parametrize("words", [(), ("public",), ("elsewhere", "/x"), ("public", "/x", "/y")])
def test_a_wrong_call_says_how_it_is_used(words: tuple[str, ...]) -> None:
    """A misspelt unit must not pass for a directory that is fine."""
    done = run(*words)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")
