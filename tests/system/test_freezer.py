"""Who waits for a process that is paused: what docs/architecture.md says of SIGSTOP and of a cgroup's freezer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpsagent.linux.processes import Process
from mpsagent.system.freezer import Freezer

SLEEPER = "sleep 600"
PYTHON = f"import subprocess; print('ended with', subprocess.run({SLEEPER.split()}).returncode)"
JOB_CONTROL = "set -m; "
ENDED = "echo ended with $?"
PATIENCE = 60.0


def sleeper(pid: int) -> int:
    """The process that sleeps below this one."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        below = [pid]
        for one in below:
            try:
                below += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
                if Path(f"/proc/{one}/cmdline").read_bytes().startswith(b"sleep\0"):
                    return one
            except OSError:
                continue
        time.sleep(0.01)
    raise AssertionError("nobody sleeps")


def paused_and_killed(argv: list[str], directory: Path, said_before: str | None) -> str:
    """What the parent says of a child that is frozen, goes on, and is killed. ``said_before``: while it stands."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        process = Process.open(sleeper(parent.pid))
        assert process is not None
        freezer = Freezer(str(directory))
        assert asyncio.run(freezer.freeze(process)) is None
        said = parent.stdout.readline() if said_before is not None else ""
        assert said_before in (None, said.strip())
        assert freezer.thaw(process) is None
        os.kill(process.pid, signal.SIGKILL)
        parent.stdin.close()
        said += parent.stdout.read()
        process.close()
    assert not list(directory.iterdir())
    return said.strip()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["sh", "-c", f"{SLEEPER}; {ENDED}"], "ended with 137"),
        (["sh", "-c", f"{SLEEPER} & wait $!; {ENDED}"], "ended with 137"),
        (["bash", "-c", f"{SLEEPER}; {ENDED}"], "ended with 137"),
        ([sys.executable, "-c", PYTHON], "ended with -9"),
        (["bash", "-c", f"{JOB_CONTROL}sh -c '{SLEEPER}; exit $?'; {ENDED}"], "ended with 137"),
    ],
    ids=["script", "background", "bash", "python", "within a shell with job control"],
)
def test_a_parent_does_not_notice_a_pause(tmp_path: Path, argv: list[str], said: str) -> None:
    """It goes on waiting, and is told the end and nothing else."""
    assert paused_and_killed(argv, tmp_path / "frozen", None) == said


def test_a_shell_with_job_control_does(tmp_path: Path) -> None:
    """It takes its program for stopped, and goes on: 128 and SIGSTOP. That shell is in the session's scope, which
    nobody could freeze either."""
    argv = ["bash", "-c", f"{JOB_CONTROL}{SLEEPER}; {ENDED}; read line"]  # it stays, as one at a terminal does
    assert paused_and_killed(argv, tmp_path / "frozen", "ended with 147") == "ended with 147"
