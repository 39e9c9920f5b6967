"""`make test` leaves the machine as it was: the check that its every run makes, on what it must find."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import left_behind

ROOT = Path(__file__).resolve().parents[1]
Checked = Callable[[str], tuple[int, str]]


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Checked:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(left_behind, "PATIENCE", 0.0)

    def run(script: str) -> tuple[int, str]:
        return left_behind.main(["sh", "-c", script]), capfd.readouterr().err

    return run


def test_a_run_that_leaves_nothing_is_what_its_command_was(checked: Checked) -> None:
    """Its temporary files go, and stay for a reader if a test has failed."""
    assert checked('mkdir "$TEST_TEMPORARY"') == (0, "")
    status, said = checked('echo kept >"$TMPDIR/file"; exit 2')
    place = Path(said.split()[-1])
    assert (status, (place / "file").read_text()) == (2, "kept\n")
    (place / "file").unlink()
    place.rmdir()


@pytest.mark.parametrize(("script", "named"), [
    (f"echo {ROOT}/.venv/bin/mpsagent-cli run >>$HOME/.bash_history", "line in"),
    ("mkdir -p $HOME/.config/chromium", ".config"),
    ("touch $TMPDIR/forgotten", "forgotten"),
])  # fmt: skip
def test_what_is_left_is_named_and_fails_the_run(checked: Checked, script: str, named: str) -> None:
    status, said = checked(script)
    assert (status, named in said) == (1, True), said


def test_a_process_that_is_left_is_named(checked: Checked) -> None:
    status, said = checked("sleep 600 >/dev/null 2>&1 &")
    found = re.search(r"process (\d+): .*sleep 600", said)
    assert found, said
    os.kill(int(found[1]), signal.SIGKILL)
    assert status == 1


def test_make_test_makes_this_check() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ntest: ")[2].partition("\n\n")[0]
    assert "tests/left_behind.py" in recipe
