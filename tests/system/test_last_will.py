"""What happens when the agent dies, whatever way: its helper runs the front-end, once, with the last word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpsagent.system.last_will import LastWill
from tests.system.conftest import MakeProgram

DYING = """
import os, signal, sys, time
from mpsagent.system.last_will import LastWill
will = LastWill(dict(os.environ))
assert will.write(sys.argv[1], ["first"])
assert will.write(sys.argv[1], sys.argv[2:])
print(will._pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def front_end(tmp_path: Path, program: MakeProgram) -> Path:
    """Writes what it is given to a file, whole."""
    said = tmp_path / "said"
    return program(f"cat > {said}.part && mv {said}.part {said} && echo 50.0")


def told(path: Path, seconds: float = 20) -> str | None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if path.exists():
            return path.read_text()
        time.sleep(0.01)
    return None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_however_the_agent_dies_the_last_word_is_carried_out(tmp_path: Path, front_end: Path, number: int) -> None:
    """Also when the service manager sends SIGTERM to all that is left of the service."""
    agent = subprocess.Popen([sys.executable, "-c", DYING, str(front_end), "a", "b"], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    helper = int(agent.stdout.readline())
    os.kill(helper, signal.SIGTERM)
    agent.send_signal(number)
    agent.communicate()
    assert told(tmp_path / "said") == "a\nb\n"


def test_a_front_end_that_is_turned_away_is_run_again(tmp_path: Path, program: MakeProgram) -> None:
    """The daemon listens to one at a time, and the agent's own last run may still be connected."""
    said, turns = tmp_path / "said", tmp_path / "turns"
    away = f"echo x >> {turns}; [ $(wc -l < {turns}) -gt 3 ] || exit 0"
    turned_away = program(f"{away}; cat > {said}.part; mv {said}.part {said}; echo 50.0")
    will = LastWill(dict(os.environ))
    assert will.write(str(turned_away), ["a"])
    will.close()
    assert told(said) == "a\n"


def test_nothing_is_done_without_commands(tmp_path: Path, front_end: Path) -> None:
    """Where no limits are enforced the defaults are somebody else's."""
    will = LastWill(dict(os.environ))
    assert will.write(str(front_end), ["a"])
    assert will.write(str(front_end), [])
    will.close()
    assert told(tmp_path / "said", 0.3) is None


def test_a_helper_that_somebody_killed_is_replaced(tmp_path: Path, front_end: Path) -> None:
    """It is asked for once a second."""
    will = LastWill(dict(os.environ))
    assert will.write(str(front_end), ["a"])
    first = will._pid
    os.kill(first, signal.SIGKILL)
    end = time.monotonic() + 10
    while will._pid == first:
        assert time.monotonic() < end
        assert will.write(str(front_end), ["a"])
    will.close()
    assert told(tmp_path / "said") == "a\n"
