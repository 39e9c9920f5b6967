"""The first process of the control daemon's unit, with daemons that fork twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.system.conftest import MakeProgram

# As NVIDIA's: the first process returns when the daemon is up, and does not wait for the one in the middle. That ends
# late here, as on a node that has something else to do.
DAEMON = """
import os, sys, time
up, report = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        print(os.getppid(), os.getpid(), flush=True)
        os.write(report, b"x")
        os.closerange(0, 3)
        time.sleep(600)
    time.sleep(0.3)
    os._exit(7)
os.read(up, 1)
sys.exit(int(sys.argv[1]))
"""


def start(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mpsagent.system.control_start", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, process_group=0, check=False)


def test_it_returns_when_the_daemon_alone_is_left(program: MakeProgram) -> None:
    """systemd took the process in the middle for the daemon: with its end the unit quit the daemon that had started."""
    done = start(str(program(DAEMON, interpreter=sys.executable)), "0")
    middle, daemon = (int(word) for word in done.stdout.split())
    try:
        assert done.returncode == 0, done.stderr
        assert not Path(f"/proc/{middle}").exists()
        assert Path(f"/proc/{daemon}").exists()
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_failed_start_keeps_its_status_and_words(program: MakeProgram, tmp_path: Path) -> None:
    """By the status the agent says what is wrong."""
    failed = start(str(program("echo An instance of this daemon is already running >&2\nexit 244\n")), "-d")
    assert (failed.returncode, failed.stderr) == (244, "An instance of this daemon is already running\n")
    assert start(str(program("kill -KILL $$\n", "killed"))).returncode == 128 + signal.SIGKILL
    missing = start(str(tmp_path / "missing"), "-d")
    assert (missing.returncode, missing.stderr) == (127, f"{tmp_path}/missing: No such file or directory\n")
    assert start().returncode == 2
