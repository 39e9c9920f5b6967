"""The agent as a real process beside the simulator: a stage as the scenes have it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.stage import Machine, Stage
from tests.conformance import rig as rigs
from tests.scenes.stage import backend_of


@pytest.fixture(scope="session")
def sim() -> Iterator[tuple[rigs.Backend, Machine]]:
    if os.geteuid() != 0:
        pytest.skip("needs root: clients of several users")
    place = Path(tempfile.mkdtemp(prefix="mpsa", dir="/tmp"))  # short: a socket's path has 107 bytes
    with backend_of("sim", place) as found:
        yield found
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def stage(sim: tuple[rigs.Backend, Machine]) -> Iterator[Stage]:
    backend, machine = sim
    place = Path(tempfile.mkdtemp(prefix="mpsb", dir="/tmp"))
    place.chmod(0o755)
    with Stage(backend, place / "s", machine, quick=True) as one:
        yield one
    shutil.rmtree(place, ignore_errors=True)
    assert one.left == [], "something of the stage outlived it"
