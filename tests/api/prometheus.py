"""Programs of Prometheus as Debian has them: those of this machine, or unpacked from the package beside the other
downloads of the tests. Nothing is installed and no service started. ``MPSAGENT_TEST_OFFLINE`` forbids the download."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.nvidia.fetch import cache

PACKAGES = {"promtool": ("promtool", "prometheus")}
"""Where it is in another package than its name says; from Debian 13 on it has its own."""
LIMIT = 90.0
"""Seconds for the download."""


def program(name: str) -> str:
    """Where it is. Skips the test, with the reason, where it cannot be had."""
    found = shutil.which(name)
    if found is not None:
        return found
    home = cache() / "prometheus"
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "usr/bin" / name).is_file():
            _download(home, PACKAGES.get(name, (name,)))
    return str(home / "usr/bin" / name)


def _download(home: Path, packages: tuple[str, ...]) -> None:
    """Of the first package that there is."""
    what = packages[-1]
    if os.environ.get("MPSAGENT_TEST_OFFLINE"):
        pytest.skip(f"no {what} here, and MPSAGENT_TEST_OFFLINE is set")
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"no {what} here, and no apt-get to take Debian's")
    said = ""
    for package in packages:
        with tempfile.TemporaryDirectory(dir=home) as work:
            try:
                subprocess.run(["apt-get", "-qq", "download", package], cwd=work, check=True, capture_output=True,
                               timeout=LIMIT)  # fmt: skip
                [archive] = Path(work).glob("*.deb")
                subprocess.run(["dpkg-deb", "-x", archive, home], check=True, capture_output=True, timeout=LIMIT)
                return
            except (subprocess.SubprocessError, ValueError) as error:
                said = str(error)
    pytest.skip(f"no {what} here, and Debian's cannot be had: {said}")
