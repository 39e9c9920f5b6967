"""Scripts for machines with a GPU: an import that no longer works is seen here, not on that machine."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

CAMPAIGNS = Path(__file__).resolve().parents[1] / "campaigns"
PROGRAMS = ("attackers", "gate_train", "slurm_job", "user_programs")
"""Run by a bare Python beside a client; they do something when they are imported."""


@pytest.mark.parametrize("name", sorted(path.stem for path in CAMPAIGNS.glob("*.py") if path.stem not in PROGRAMS))
def test_a_campaign_finds_what_it_imports(name: str) -> None:
    importlib.import_module(f"campaigns.{name}")


def test_shell_scripts_name_files_that_are_there() -> None:
    for script in CAMPAIGNS.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
        words = script.read_text().replace('"', " ").replace(";", " ").split()
        named = {word for word in words if word.startswith(("campaigns/", "tests/", "benchmarks/"))}
        assert not [word for word in named if not (CAMPAIGNS.parent / word).exists()], script.name


def test_what_security_says_is_played_is_what_hostile_plays() -> None:
    """A hostile day plays what docs/security.md says that it does, and lists the other attacks of it."""
    hostile = importlib.import_module("campaigns.hostile")
    text = (CAMPAIGNS.parent / "docs" / "security.md").read_text()
    assert set(re.findall(r"campaigns/hostile\.py::(\w+)", text)) == {one.__name__ for one in hostile.ATTACKS.values()}
    assert set(hostile.SHORT) < set(hostile.ATTACKS)
    assert 20 < len(hostile.not_played()) < 80


def test_how_a_hostile_day_judges_time() -> None:
    hostile = importlib.import_module("campaigns.hostile")
    said = "7 has its descriptor at 3.0\n8 has its descriptor at 3.5\n7 ended at 4.0\n9 ended at 4.1\n"
    assert hostile.taken(said, 5.0) == [(3.0, 4.0), (3.5, 5.0)]
    assert hostile.together([(3.5, 5.0), (3.0, 4.0), (8.0, 8.5)]) == 2.5

    def judged(beside: list[float]) -> str:
        found = {
            True: [hostile.Jobs(1.0, held, 0) for held in beside],
            False: [hostile.Jobs(1.0, held, 0) for held in (0.0, 0.1) * 3],
        }
        low, mean, high = hostile.lost(found)
        assert low < mean < high
        return str(hostile.word(low, high))

    assert judged([0.02, 0.1] * 3) == "within a tenth"
    assert judged([0.0, 0.0, 0.0, 1.0, 0.0, 0.0]) == "unclear"  # the median would say nothing
    assert judged([0.4, 0.6] * 3) == "more than a tenth"
