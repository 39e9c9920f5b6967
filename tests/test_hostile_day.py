"""A hostile day, the short form: what `make hostile` plays holds in each way of sharing. No time is judged here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["own", "shared", "together", "apart"])
def test_nobody_honest_loses_work_or_limits(way: str) -> None:
    words = [sys.executable, str(ROOT / "campaigns" / "hostile.py"), "--sim", "--part", "short", "--ways", way]
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    done = subprocess.run(
        [*words, "--lanes", "3", "--seconds", "800", "--slack", "60"],
        env=environment, capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.count("| held |") == done.stdout.count(f" | {way} | held | ") > 15
