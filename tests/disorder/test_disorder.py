"""A minute of disorder on the simulator with both cores kept busy: every client gets exactly what the policy says."""

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
@pytest.mark.parametrize(("server", "seed", "gpus"), [("own", 11, 1), ("shared", 12, 2)])
def test_disorder(server: str, seed: int, gpus: int, tmp_path: Path) -> None:
    """Nobody gets more or less, or runs outside MPS, is refused, gets stuck, or is harmed by a neighbour's end."""
    options = Options(
        server=server, seed=seed, gpus=gpus, seconds=30, clients=200, busy=os.cpu_count() or 1, out=tmp_path / "out"
    )
    verdict = run(options)
    told = f"seed {seed}\n{verdict.text()}\n{(tmp_path / 'out/agent.log').read_text()[-5000:]}"
    assert verdict.good, told
    # Something must have happened, or nothing was shown.
    assert verdict.counts["exact"] > 80, told
    assert verdict.faults, told
    assert verdict.counts["denied"], told
    assert verdict.guests, told


@pytest.mark.timeout(300)
def test_without_the_product_the_same_run_fails_in_every_way(tmp_path: Path) -> None:
    """MPS as it is: one user's limits for everybody, its daemon killed once. This is what the verdict has to find."""
    verdict = run(Options(seed=1, seconds=20, clients=150, bare=True, drain=15, out=tmp_path / "out"))
    assert not verdict.good
    for word in ("over", "under", "outside", "refused"):
        assert verdict.counts[word], f"{word} was not found\n{verdict.text()}"
