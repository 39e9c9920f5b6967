"""Half a minute of disorder on the simulator with both cores kept busy: every client gets exactly what the policy says.

The long form: `python -m tests.disorder.run --seconds 60 --clients 1000 --busy 2 [--kills 20]`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.disorder.run import Options, run

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of several users"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("server", "seed", "gpus", "kills"), [("own", 11, 1, 0), ("shared", 12, 2, 0), ("shared", 13, 1, 6)]
)
def test_disorder(server: str, seed: int, gpus: int, kills: int, tmp_path: Path) -> None:
    """Nobody gets more or less, runs outside MPS, is refused, gets stuck, or is harmed by a neighbour; also when
    agent, gate, daemon and servers are killed beside it."""
    options = Options(
        server=server, seed=seed, gpus=gpus, seconds=15, clients=110, busy=os.cpu_count() or 1, kills=kills,
        out=tmp_path / "out",
    )  # fmt: skip
    verdict = run(options)
    told = f"seed {seed}\n{verdict.text()}\n{(tmp_path / 'out/agent.log').read_text()[-5000:]}"
    assert verdict.good, told
    # Something must have happened, or nothing was shown.
    assert verdict.counts["exact"] > 40, told
    assert verdict.faults, told
    assert verdict.counts["denied"], told
    assert verdict.guests, told
    assert len(verdict.killed) >= kills / 2, told


@pytest.mark.timeout(300)
def test_without_the_product_the_same_run_fails_in_every_way(tmp_path: Path) -> None:
    """MPS as it is: the same limits for everybody, its daemon stopped once. This is what the verdict has to find."""
    verdict = run(Options(seed=2, server="shared", seconds=12, clients=110, bare=True, drain=5, out=tmp_path / "out"))
    assert not verdict.good
    for word in ("over", "under", "outside", "refused"):
        assert verdict.counts[word], f"{word} was not found\n{verdict.text()}"
