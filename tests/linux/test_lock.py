"""The lock that keeps two agents from one MPS; it must never be stale and never be a user's to hold."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mpsagent.linux import lock

HOLDER = """
import sys, time
from mpsagent.linux import lock
fd = lock.take(sys.argv[1], "a test")
print("held", flush=True)
time.sleep(600)
"""


def test_a_second_holder_is_told_who_has_it_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    """Also after SIGKILL: the kernel lets go, so no start ever needs a cleaning up."""
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(lock.AlreadyLocked, match=f"mpsagent {holder.pid} already runs for a test"):
            lock.take(path, "a test")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    fd = lock.take(path, "a test")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "a user who could open it could lock it"
    assert path.read_text() == f"{os.getpid()}\n"
    os.close(fd)


def test_a_link_or_a_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    """Whoever could put one there would have root write into a file of his choice."""
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "directory").mkdir()
    for name in ("link", "directory"):
        with pytest.raises(OSError):
            lock.take(tmp_path / name, "a test")
    assert not (tmp_path / "elsewhere").exists()
