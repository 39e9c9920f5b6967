"""Shared by the tests of what touches the machine: a loop for each, small programs made on the spot, leaks."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpsagent.system import control_search, spawn, store
from tests import coroutines

Play = Callable[[Coroutine[Any, Any, Any]], Any]
MakeProgram = Callable[..., Path]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other tests is not one that hangs."""
    monkeypatch.setattr(control_search, "PROOF_DEADLINE", 45.0)
    monkeypatch.setattr(store, "FAREWELL", 45.0)
    monkeypatch.setattr(spawn, "LAST_WAIT", 45.0)


@pytest.fixture
def play() -> Play:
    return coroutines.play


@pytest.fixture
def program(tmp_path: Path) -> MakeProgram:
    """Writes an executable script."""

    def make(text: str, name: str = "nvidia-cuda-mps-control", interpreter: str = "/bin/sh") -> Path:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        # Written under another name first: a script that is open for writing anywhere cannot be executed.
        fresh = path.with_suffix(".new")
        fresh.write_text(f"#!{interpreter}\n{text}")
        fresh.chmod(0o755)
        fresh.rename(path)
        return path

    return make


@pytest.fixture
def no_leak() -> Iterator[None]:
    """No descriptor and no zombie is left behind by a test."""
    before, ended = _descriptors(), zombies()  # a test that failed elsewhere may have left one: that is its own failure
    yield
    left = _descriptors().items() - before.items()  # one of an earlier test may be closed meanwhile, by the collector
    assert not left, "descriptors left open"
    assert set(zombies()) <= set(ended)


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that other users may enter; those of pytest may be closed to them."""
    path = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{name}")
            if not stat.S_ISDIR(os.stat(f"/proc/self/fd/{name}").st_mode):
                found[name] = path
        except OSError:
            continue
    return found


def zombies() -> list[str]:
    """Children of this process that have ended and were not reaped."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] == "Z" and int(fields[1]) == os.getpid():
                found.append(name)
    return found
