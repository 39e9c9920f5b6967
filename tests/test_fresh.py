"""tests/fresh.sh, which root runs: it takes no directory that another user could have prepared."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fresh.sh")


def refused(directory: Path) -> str:
    done = subprocess.run(
        ["bash", SCRIPT, "-d", directory, "1", "chroot"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_directory_that_another_user_has_made_is_refused(tmp_path: Path) -> None:
    """Root ran the user's /bin/sh, and truncated a file that a link named `lock` led to."""
    precious, directory = tmp_path / "precious", tmp_path / "directory"
    precious.write_text("precious")
    directory.mkdir(mode=0o700)
    (directory / "lock").symlink_to(precious)
    os.chown(directory, 65534, 65534)
    assert "must be a directory of user 0 alone" in refused(directory)
    assert precious.read_text() == "precious"
    assert os.listdir(directory) == ["lock"]


def test_a_directory_that_others_may_enter_and_a_link_to_one_are_refused(tmp_path: Path) -> None:
    directory, link = tmp_path / "directory", tmp_path / "link"
    directory.mkdir(mode=0o755)
    link.symlink_to(directory)
    for one in (directory, link):
        assert "must be a directory" in refused(one)
    directory.chmod(0o700)
    assert "must be a directory" in refused(link)
    assert os.listdir(directory) == []
