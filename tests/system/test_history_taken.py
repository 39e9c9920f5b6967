"""An agent before mpsagent-api kept the history as root; root gives it to the api before each start of that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "systemd" / "mpsagent-open"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a /var/lib of its own")
def test_links_of_a_taken_over_api_lead_root_nowhere(tmp_path: Path) -> None:
    """Its directory is its own: a link there must not have root put a file elsewhere."""
    chown = tmp_path / "chown"  # there may be no such user here
    chown.write_text("#!/bin/sh\n")
    chown.chmod(0o755)
    words = f"""
        mount -t tmpfs none /var/lib
        cd /var/lib
        mkdir mpsagent mpsagent-api etc
        echo old >mpsagent/history.db
        echo log >mpsagent/history.db-wal
        ln -s /var/lib/etc mpsagent-api/history.db-wal
        PATH={tmp_path}:$PATH sh {SCRIPT} take-history
        ls etc
        cat mpsagent-api/history.db-wal mpsagent-api/history.db
    """
    done = subprocess.run(["unshare", "--mount", "sh", "-euc", words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "log\nold\n"), done.stderr
