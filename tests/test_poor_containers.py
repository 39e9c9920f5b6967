"""Tests that failed in containers of other administrators, each run once more as it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.conftest import base

__all__ = ["base"]

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_FUSE = ("unshare", "--mount", "sh", "-c", 'mount --bind /dev/null /dev/fuse && exec "$@"', "sh")
INHERITABLE = ("setpriv", "--inh-caps", "+chown")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root for namespaces and capabilities")
@pytest.mark.parametrize(("around", "test", "outcome"), [
    (WITHOUT_FUSE, "system/test_control_child.py::test_a_users_process_that_cannot_be_read_hides_no_daemon", "skipped"),
    (WITHOUT_FUSE, "system/test_terminal.py::test_a_file_on_a_dead_server_costs_its_own_user_alone", "skipped"),
    (INHERITABLE, "api/test_listen.py::test_without_the_right_to_give_it_away_it_is_roots", "passed"),
], ids=["no /dev/fuse", "no /dev/fuse, terminals", "inheritable capabilities"])  # fmt: skip
def test_a_container_that_gives_less_fails_no_test(
    around: tuple[str, ...], test: str, outcome: str, base: Path
) -> None:
    if shutil.which(around[0]) is None or (around is WITHOUT_FUSE and not Path("/dev/fuse").exists()):
        pytest.skip(f"no {around[0]} or no /dev/fuse here")
    pytest_words = ("-m", "pytest", "-p", "no:cacheprovider", "-q", f"--basetemp={base}/t", f"tests/{test}")
    words = [*around, sys.executable, *pytest_words]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout
    assert f"1 {outcome}" in done.stdout, done.stdout
