"""Looks at Slurm on this machine for what keeps the leases of its jobs from being exact. Changes nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mpsagent.cli.checkup import OK, WARNING, Finding

ANSWER = 5.0
"""Seconds for slurmctld to answer."""
TOPIC = "Slurm"
_TRACKING = re.compile(r"^ProctrackType\s*=\s*(\S+)", re.MULTILINE)


def slurm(root: Path = Path("/")) -> Iterator[Finding]:
    """Where a slurmd runs: whether each of its jobs has a cgroup of its own, by which a lease names it."""
    if not any(_is_slurmd(path) for path in (root / "proc").glob("[0-9]*/comm")):
        return
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        yield Finding(WARNING, TOPIC, "slurmd runs, and scontrol is not on PATH", "run doctor with Slurm's PATH")
        return
    try:
        asked = subprocess.run([scontrol, "show", "config"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               errors="replace", timeout=ANSWER, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        yield Finding(WARNING, TOPIC, f"slurmctld does not answer within {ANSWER:g} s", "scontrol ping")
        return
    found = _TRACKING.search(asked.stdout)
    if found is None:
        yield Finding(
            WARNING, TOPIC, f"scontrol show config: {_first(asked.stderr) or 'no ProctrackType'}", "scontrol ping"
        )
    elif found[1] == "proctrack/cgroup":
        yield Finding(OK, TOPIC, f"each job has a cgroup ({found[1]})")
    else:
        what = f"{found[1]} makes no cgroup for each job: a job's share is for all processes of its user on this node"
        yield Finding(WARNING, TOPIC, what, "ProctrackType=proctrack/cgroup in slurm.conf")


def _first(said: str) -> str:
    """The first line: those that follow say what became of that."""
    return next((line for line in said.splitlines() if line.strip()), "")[:200]


def _is_slurmd(path: Path) -> bool:
    with suppress(OSError):
        return path.read_bytes().strip() == b"slurmd"
    return False
