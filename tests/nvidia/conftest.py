"""NVIDIA's own programs of three drivers, for tests that need no GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.nvidia import fetch
from tests.nvidia.daemon import Daemon


@pytest.fixture(params=sorted(fetch.SUITES))
def nvidia(request: pytest.FixtureRequest) -> fetch.Driver:
    """Each driver in turn; skips with the reason where it cannot be had."""
    try:
        return fetch.get(request.param)
    except fetch.Unavailable as error:
        pytest.skip(f"NVIDIA's programs of driver {request.param}: {error}")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter, with a short name: the path of a socket has 108 bytes."""
    path = Path(tempfile.mkdtemp(prefix="mps"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def daemons(nvidia: fetch.Driver, place: Path) -> Iterator[Callable[..., Daemon]]:
    """Starts control daemons: ``daemons(mode=0o710, foreground=False)``. Each is ended, with its servers."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    started: list[Daemon] = []

    def start(mode: int = 0o710, foreground: bool = False) -> Daemon:
        started.append(Daemon(nvidia, place / f"d{len(started)}", mode=mode, foreground=foreground))
        return started[-1]

    yield start
    for daemon in started:
        daemon.end()


@pytest.fixture
def daemon(daemons: Callable[..., Daemon]) -> Daemon:
    """One control daemon in the background, in directories as mpsagent makes them: root:root 0710."""
    return daemons()
