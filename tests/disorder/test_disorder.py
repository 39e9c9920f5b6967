"""A quarter of a minute of disorder on the simulator, cores kept busy: every client gets exactly what the policy says.

More of them: `make disorder SERVER=shared SEED=12`; the long form:
`python -m tests.disorder.run --seconds 60 --clients 1000 --busy 2 [--kills 20]`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.disorder.run import Options, run

BUSY = 60.0
"""Seconds that a client's start may take beside all other tests: here no speed is asserted."""
BURNERS = 0 if "PYTEST_XDIST_WORKER" in os.environ else os.cpu_count() or 1
"""Processes that keep the cores busy; beside other tests those do."""
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of several users"),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("sharing", "server", "seed", "kills"),
    [("turns", "own", 11, 0), ("turns", "shared", 13, 6), ("together", "own", 15, 6), ("apart", "own", 17, 0)],
)
def test_disorder(sharing: str, server: str, seed: int, kills: int, tmp_path: Path) -> None:
    """Nobody gets more or less, runs outside MPS, is refused, gets stuck, or is harmed by a neighbour; also when
    agent, gate, daemon and servers are killed beside it."""
    options = Options(
        sharing=sharing, server=server, seed=seed, seconds=15, clients=110, busy=BURNERS,
        kills=kills, slack=BUSY, out=tmp_path / "out",
    )  # fmt: skip
    verdict = run(options)
    told = f"seed {seed}\n{verdict.text()}\n{(tmp_path / 'out/agent.log').read_text()[-5000:]}"
    assert verdict.good, told
    # Something must have happened, or nothing was shown. Who works together is hit together: 45 to 68 in 14 runs.
    assert verdict.counts["exact"] > 20, told
    assert verdict.faults + len(verdict.killed), told
    assert verdict.counts["denied"], told
    assert verdict.guests, told
    assert len(verdict.killed) >= kills / 2, told
    assert sharing == "turns" or verdict.together > 10, told


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("sharing", "seed", "kills"), [("together", 22, 0), ("turns", 23, 6)])
def test_disorder_with_an_instance_for_each_gpu(sharing: str, seed: int, kills: int, tmp_path: Path) -> None:
    """Users are placed on two GPUs; a fault on one harms no client on the other."""
    options = Options(
        sharing=sharing, seed=seed, gpus=2, instances="each", seconds=15, clients=110, busy=BURNERS,
        kills=kills, slack=BUSY, out=tmp_path / "out",
    )  # fmt: skip
    verdict = run(options)
    told = f"seed {seed}\n{verdict.text()}\n{(tmp_path / 'out/agent.log').read_text()[-5000:]}"
    assert verdict.good, told
    assert verdict.counts["exact"] > 40, told
    assert verdict.faults, told
    assert min(verdict.gpus.values()) > 15, told
    assert len(verdict.gpus) == 2, told


@pytest.mark.timeout(600)
def test_without_the_product_the_same_run_fails_in_every_way(tmp_path: Path) -> None:
    """MPS as it is: the same limits for everybody, its daemon stopped once. This is what the verdict has to find."""
    verdict = run(Options(seed=2, server="shared", seconds=12, clients=110, bare=True, drain=5, out=tmp_path / "out"))
    assert not verdict.good
    for word in ("over", "under", "outside", "refused"):
        assert verdict.counts[word], f"{word} was not found\n{verdict.text()}"
