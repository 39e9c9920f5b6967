"""Words that others may send: those that were found once, and as many new ones as there is time for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS

FOUND = Path(__file__).parent / "found"
SECONDS = int(os.environ.get("FUZZ_SECONDS", "8"))
"""For each of them; `make test-all FUZZ_SECONDS=60`."""


@pytest.mark.parametrize("name", TARGETS)
def test_what_it_begins_with_holds(name: str) -> None:
    seeds = list(TARGETS[name].seeds())
    assert seeds
    for seed in seeds:
        TARGETS[name].check(seed)


@pytest.mark.parametrize("name", sorted(path.name for path in FOUND.iterdir()))
def test_what_was_found_once(name: str) -> None:
    target = next(one for one in TARGETS if name.startswith(f"{one}-"))
    TARGETS[target].check((FOUND / name).read_bytes())


def test_json_with_another_value_in_it_is_json_and_the_same_for_the_same_seed() -> None:
    data = b'{"order": "drain", "timeout": [1, {"x": "5s"}]}'
    made = [mutated(data, seed) for seed in range(50)]
    assert made == [mutated(data, seed) for seed in range(50)]
    assert len(set(made)) > 40
    assert mutated(b"{", 1) is None


@pytest.mark.parametrize("name", TARGETS)
def test_new_words(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", str(SECONDS), "--found", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS + 200, check=False)
    text = done.stderr.decode(errors="replace")
    assert done.returncode == 0, f"{text[-6000:]}\nfound with: {[one.read_bytes() for one in tmp_path.iterdir()]}"
    assert "Done " in text + done.stdout.decode(), text[-2000:]
