"""Verbs that other packages add."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mpsagent


def test_a_package_that_cannot_be_imported_takes_away_its_own_verbs_only(tmp_path: Path) -> None:
    (tmp_path / "mpsagent").symlink_to(Path(mpsagent.__file__).parent)
    for name, text in (("mpsagent_broken", "import nothing_there"), ("mpsagent_site", 'VERBS = {"more": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    script = "from mpsagent.cli.verbs import cli; cli()"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}", "policy"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert (done.returncode, "explain" in done.stdout) == (0, True)
    assert done.stderr == (
        "mpsagent-cli: mpsagent_broken adds no verbs, because it cannot be imported: No module named 'nothing_there'\n"
    )
