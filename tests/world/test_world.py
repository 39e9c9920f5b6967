"""A few fixed seeds of each way of sharing, with faults; and that a seed is one world."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from tests.world.heart import enumerate_all
from tests.world.plans import WAYS, draw, fails
from tests.world.world import World


@pytest.mark.parametrize("way", WAYS)
def test_every_promise_holds_in_a_few_worlds(way: str) -> None:
    for seed in range(1, 4):
        found = fails(draw(seed, (way,)))
        assert found is None, f"seed {seed}: {found[0]}"


def test_whoever_dies_in_a_change_of_turn_nobody_is_stuck() -> None:
    """One death of twenty; test_heart.py has all."""
    for way in ("own", "shared"):
        played, broken = enumerate_all("a change of turn", way, every=20)
        assert broken == []
        assert played > 30


def played(seed: int) -> str:
    """Everything that happened in a world, in one number."""
    world = World(draw(seed))
    world.play()
    text = "\n".join([*world.story, str(world.kernel.chance.random())])
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_seed_is_the_same_world_to_the_byte_in_another_interpreter() -> None:
    code = "from tests.world.test_world import played; print(played(103))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == played(103)
