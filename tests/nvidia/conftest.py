"""NVIDIA's own programs of three drivers, for tests that need no GPU."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mpsagent_sim.cli import devices
from tests.agent.stage import Machine, Stage
from tests.conformance.backends import Backend, other_users_python
from tests.nvidia import fetch
from tests.nvidia.daemon import USER, Daemon


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
    """Starts control daemons: ``daemons(mode=0o710, foreground=False, prefix=())``. Each is ended, with its servers."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    started: list[Daemon] = []

    def start(mode: int = 0o710, foreground: bool = False, prefix: Sequence[str] = ()) -> Daemon:
        started.append(Daemon(nvidia, place / f"d{len(started)}", mode=mode, foreground=foreground, prefix=prefix))
        return started[-1]

    yield start
    for daemon in started:
        daemon.end()


@pytest.fixture
def daemon(daemons: Callable[..., Daemon]) -> Daemon:
    """One control daemon in the background, in directories as mpsagent makes them: root:root 0710."""
    return daemons()


@pytest.fixture
def stage(nvidia: fetch.Driver, place: Path) -> Iterator[Stage]:
    """A stage with this driver's programs. The daemon gets their libraries by a wrapper, as where several drivers are
    installed side by side; what GPU there would be is told, since none can be asked."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    programs = place / "bin"
    programs.mkdir()
    control = programs / nvidia.control.name
    environment = " ".join(f'{key}="{value}"' for key, value in nvidia.environment().items() if key != "LANG")
    control.write_text(f'#!/bin/sh\n{environment} exec {nvidia.control} "$@"\n')
    control.chmod(0o755)
    (programs / "devices.json").write_text(json.dumps(devices(1)))
    backend = Backend(f"driver {nvidia.version}", str(control), (other_users_python(USER),))
    with Stage(backend, place / "s", Machine(132, 143155), quick=True) as one:
        yield one
    assert one.left == [], "something of the stage outlived it"
