"""The file that tells container engines of the gate."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mpsagent.system import container_device

ENVIRONMENT = {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}


def test_it_is_installed_whole_and_for_everybody_to_read(tmp_path: Path) -> None:
    path = tmp_path / "mpsagent.json"
    before = os.umask(0o077)
    try:
        for directory in ("/tmp/nvidia-mps", "/run/mps"):
            wanted = container_device.text(directory, ENVIRONMENT)
            assert container_device.install(str(path), wanted) is None
            found = json.loads(path.read_text())
            assert found["devices"][0]["containerEdits"]["mounts"][0]["hostPath"] == directory
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, os.listdir(tmp_path)) == (0o644, ["mpsagent.json"])


def test_one_that_is_right_is_left_alone(tmp_path: Path) -> None:
    """Engines watch the directory."""
    path, wanted = tmp_path / "mpsagent.json", container_device.text("/run/mps", ENVIRONMENT)
    container_device.install(str(path), wanted)
    before = path.stat()
    assert container_device.install(str(path), wanted) is None
    assert path.stat() == before


def test_where_it_cannot_be_written_is_said(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "mpsagent.json"
    assert container_device.install(str(path), "{}") == f"{path}: No such file or directory"
    (tmp_path / "taken").mkdir()
    assert container_device.install(str(tmp_path / "taken"), "{}") == f"{tmp_path}/taken: Is a directory"
    assert os.listdir(tmp_path) == ["taken"]


def test_what_lies_in_its_place_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    """Also where another user may write: a link is replaced, not what it leads to, and a FIFO holds up nobody."""
    path, other = tmp_path / "mpsagent.json", tmp_path / "other"
    other.write_text("{}")
    path.symlink_to(other)
    assert container_device.install(str(path), "{}") is None
    assert (path.is_symlink(), path.read_text(), other.read_text()) == (False, "{}", "{}")
    path.unlink()
    os.mkfifo(path)
    assert container_device.install(str(path), "[]") is None
    assert path.read_text() == "[]"
