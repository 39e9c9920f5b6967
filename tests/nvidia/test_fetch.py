"""Where NVIDIA's programs cannot be had, the tests say why, at once and without a word about the machine's mirror."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from tests.nvidia import fetch


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MPSAGENT_TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MPSAGENT_TEST_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ``apt-get`` of our own, first on PATH: it lists a mirror, and fails to reach it. Counts its runs."""
    program = tmp_path / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        f'echo "$1" >> {tmp_path}/runs\n'
        'case "$1" in indextargets) echo "https://mirror.example/debian/ bookworm main";;\n'
        "*) echo 'E: Failed to fetch https://mirror.example/debian/dists/x  Could not connect' >&2; exit 100;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return tmp_path / "runs"


def test_without_a_network(empty: Path, apt: Path) -> None:
    with pytest.raises(fetch.Unavailable) as first:
        fetch.get("535")
    assert "Failed to fetch (mirror)" in str(first.value)
    assert "mirror.example" not in str(first.value)
    runs = len(apt.read_text().splitlines())
    with pytest.raises(fetch.Unavailable) as second:
        fetch.get("535")
    assert str(second.value) == str(first.value)
    assert len(apt.read_text().splitlines()) == runs, "a failure is remembered: no worker waits for it again"
    (failure,) = (empty / "nvidia").glob("*.failed")
    old = time.time() - 3600
    os.utime(failure, (old, old))
    with pytest.raises(fetch.Unavailable):
        fetch.get("535")
    assert len(apt.read_text().splitlines()) > runs, "after a while it is tried again"
    assert sorted(path.suffix for path in (empty / "nvidia").iterdir()) == [".failed", ".lock"], (
        "nothing is left behind"
    )


def test_downloads_can_be_forbidden(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPSAGENT_TEST_OFFLINE", "1")
    with pytest.raises(fetch.Unavailable, match="MPSAGENT_TEST_OFFLINE"):
        fetch.get("550")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MPSAGENT_TEST_CACHE", str(tmp_path / "file"))
    with pytest.raises(fetch.Unavailable, match="cannot write to the cache"):
        fetch.get("470")


def test_other_users_can_run_what_was_fetched(nvidia: fetch.Driver) -> None:
    """The tests drop privileges; an earlier run by another user must not have made it unreadable."""
    for path in (nvidia.control, nvidia.libraries / "libcuda.so.1", nvidia.root):
        assert path.stat().st_mode & stat.S_IROTH, path
    assert nvidia.version.startswith(nvidia.branch + ".")
