"""Quick scenarios on the simulator agree with the recordings of real MPS; `make conformance` plays all of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import report, rig, run, scenarios

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.getuid() != 0, reason="the clients run as other users"),
]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that other users may enter, unlike pytest's own; with a short name, for the sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="mpsc", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def backend(place: Path) -> rig.Backend:
    try:
        return rig.sim_backend(place)
    except rig.RigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def found() -> report.References:
    return report.references()


@pytest.mark.parametrize("name", ["S0", "S1", "S2", "S3", "R1", "R7", "T3", "V1", "W1", "W3"])
def test_the_simulator_does_what_real_mps_was_recorded_to_do(
    name: str, place: Path, backend: rig.Backend, found: report.References
) -> None:
    transcript, good = run.play_one(scenarios.ALL[name], backend, place, verbose=False)
    assert good, "\n".join(transcript)
    parts = report.by_scenario("".join(line + "\n" for line in transcript))[name]
    (result,) = [each for each in report.judge(parts, found) if each.against.startswith("recording")]
    assert result.verdict.differences == ()
