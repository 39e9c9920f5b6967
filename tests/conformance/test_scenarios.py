"""Scenarios on the simulator agree with what real MPS did; `make conformance` plays all of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance import report, rig, run, scenarios
from tests.world.steps import BASE
from tests.world.test_steps import HANDOVERS

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
def backends(place: Path) -> dict[int, rig.Backend]:
    """By how many GPUs there are."""
    try:
        return {gpus: rig.sim_backend(place, gpus) for gpus in (1, 2)}
    except rig.RigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def found() -> report.References:
    return report.references()


# Scenarios have pauses as they were on a GPU; a machine that is busy just then may not be done within one.
ATTEMPTS = 6
# A representative few: commands, limits, starts and ends of servers, faults, several users, dead and odd clients; and
# for `make test-all` what takes longer.
QUICK = (
    "S0", "S1", "S2", "S3", "R1", "R4", "R6", "R7", "R8", "Q7", "T3", "V1", "W1", "W3", "X2", "X3", "X5", "X7", "X16",
)  # fmt: skip


LONG = (
    "S5", "S6", "S7", "R5", "R9", "R10", "R11", "R12", "R13", "Q4", "Q5", "Q6", "Q10", "T2", "M2", "M3", "V3",
    "V4", "V6", "X1", "X6", "X8", "X14", "X15", "X17", "X19",
)  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_the_simulator_does_what_real_mps_did(
    name: str, place: Path, backends: dict[int, rig.Backend], found: report.References
) -> None:
    """Against the kept transcripts and the recordings, with the named allowances and no others."""
    agrees(name, place, backends, found)


@pytest.mark.long
@pytest.mark.parametrize("name", HANDOVERS.real)
def test_a_death_in_a_hand_over_is_as_it_was_on_real_mps(
    name: str, place: Path, backends: dict[int, rig.Backend]
) -> None:
    """On an H100 with driver 580; a hung server says who leaves it."""
    agrees(name, place, backends, HANDOVERS)


def agrees(name: str, place: Path, backends: dict[int, rig.Backend], found: report.References) -> None:
    """In one of a few attempts. The directory of a relay is not the machine's own."""
    for _ in range(ATTEMPTS):
        scenario = scenarios.ALL[name]
        transcript, good = run.play_one(scenario, backends[scenario.gpus], place, verbose=False)
        assert good, "\n".join(transcript)
        text = "".join(f"{line}\n" for line in transcript).replace(f"'{place}/{name}/relay'", f"'{BASE}/relay'")
        played = report.played(text)
        lines, good = report.report(played, found)
        if good:
            break
    assert good, "\n".join(lines)
    assert any(result.against.startswith("real") for result in report.judge(played[name], found))
