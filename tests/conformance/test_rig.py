"""The rig on a borrowed machine: nothing that it started may outlive it, and nothing may hang it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.rig import CONTROL, Backend, Log, Rig

# Starts a daemon that leaves its session, ignores SIGTERM and has a child; on a batch of commands it hangs or answers.
CONTROL_PROGRAM = """\
import os, signal, sys, time
if sys.argv[1:] == ["-d"]:
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        log = open(os.environ["CUDA_MPS_LOG_DIRECTORY"] + "/control.log", "a")
        head = "[2026-11-21 00:00:00.000 Control %5d] " % os.getpid()
        log.write(head + "Starting control daemon using socket /x/control\\n" + head)
        log.write("CUDA MPS Control binary version: 13000\\n")
        log.flush()
        os.fork()
        time.sleep(600)
    sys.exit(0)
command = sys.stdin.read()
if command == "hang\\n":
    time.sleep(600)
sys.stdout.write(command.upper())
"""
# Works until it is told that it is enough.
CLIENT_PROGRAM = """\
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("] sms 1", flush=True)
signal.sigtimedwait([signal.SIGUSR1], float(sys.argv[2]))
sys.exit(7)
"""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    program = tmp_path / CONTROL
    program.write_text(f"#!{sys.executable} -S\n{CONTROL_PROGRAM}")
    program.chmod(0o755)
    made = Rig(Backend("stand-in", str(program), (sys.executable, "-S", "-c", CLIENT_PROGRAM)), tmp_path / "rig")
    yield made
    made.end()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_end_kills_a_stubborn_daemon_its_child_and_the_clients(rig: Rig) -> None:
    rig.start("-d")
    rig.spawn(os.getuid(), "sleep", 600)
    processes = [process.pid for process in rig.ours()]
    assert len(processes) == 3
    assert rig.end() == []
    assert not any(alive(pid) for pid in processes)


def test_end_leaves_other_rigs_alone(rig: Rig, tmp_path: Path) -> None:
    other = Rig(rig.backend, tmp_path / "other")
    other.start("-d")
    rig.start("-d")
    assert rig.end() == []
    theirs = [process.pid for process in other.ours()]
    assert len(theirs) == 2
    assert all(alive(pid) for pid in theirs)
    assert other.end() == []


def test_a_front_end_that_hangs_is_given_up_and_killed(rig: Rig) -> None:
    begin = time.monotonic()
    assert rig.ctl("hang", 0.3).rc is None
    assert time.monotonic() - begin < 300
    assert "ctl> 'hang' TIMEOUT after 0.3s out=None" in rig.transcript[-1]
    assert rig.ours() == []


def test_a_batch_and_its_answer_are_written_down(rig: Rig) -> None:
    assert rig.ctl("one\ntwo").out == "ONE\nTWO\n"
    assert "ctl> 'one\\ntwo' rc=0 " in rig.transcript[-1]
    assert rig.transcript[-1].endswith("out='ONE\\nTWO\\n' err=''")


def test_a_client_is_waited_for_and_its_output_kept(rig: Rig) -> None:
    client = rig.spawn(os.getuid(), "sleep", 600)
    assert rig.working(client)
    assert rig.wait(client, 0) is None
    rig.signal(client, signal.SIGUSR1)
    assert rig.wait(client) == 7
    assert rig.transcript[-1].endswith("c1| ] sms 1")


def test_a_line_that_never_comes_is_noted(rig: Rig) -> None:
    rig.start("-d")
    assert rig.wait_log("Starting control", 1, quiet=True) is None  # it was before the line that start() waited for
    assert rig.wait_log("never", 0.05) is None
    assert "WAIT-TIMEOUT control.log has no 'never'" in rig.transcript[-1]


def test_a_log_is_followed_through_rename_truncation_and_half_lines(tmp_path: Path) -> None:
    path = tmp_path / "control.log"
    log = Log(path, "control.log")
    log.refresh()
    assert log.lines == []
    with path.open("a") as file:
        for text, expected in (
            ("one\ntw", ["one"]),
            ("o\n", ["one", "two"]),
        ):
            file.write(text)
            file.flush()
            log.refresh()
            assert log.lines == expected
        path.rename(tmp_path / "control.log.1")
        file.write("three\n")
        file.flush()
        log.refresh()
        os.truncate(tmp_path / "control.log.1", 0)
        log.refresh()
        file.write("four\n")
        file.flush()
        log.refresh()
        assert log.lines == ["one", "two", "three", "four"]
    path.write_text("five\n")
    log.reopen_if_replaced()
    log.refresh()
    assert log.lines[-1] == "five"
    log.close()
