"""The daemon's life: files, a second daemon, quit, signals, stopped processes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.sim.conftest import PATIENCE, A, B, Mps, messages


def gone(pid: int) -> bool:
    """Wait until the process has ended."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def gone_now(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def modes(directory: Path) -> dict[str, str]:
    return {path.name: stat.filemode(path.lstat().st_mode) for path in directory.iterdir()}


def test_a_server_runs_as_its_user_under_its_own_name(mps: Mps) -> None:
    daemon = mps.start()
    mps.busy(A, "sleep", "600")
    server = mps.server()
    status = Path(f"/proc/{server}/status").read_text()
    assert re.search(rf"^Uid:\t{A}\t{A}\t{A}\t{A}$", status, re.MULTILINE)
    assert re.search(rf"^PPid:\t{daemon}$", status, re.MULTILINE)
    assert re.search(r"^Gid:\t0\t0\t0\t0$", status, re.MULTILINE), "recording 08, G1"
    assert re.search(r"^Groups:\t? *$", status, re.MULTILINE)
    assert Path(f"/proc/{server}/cmdline").read_bytes().rstrip(b"\0") == b"nvidia-cuda-mps-server"


def test_logs_are_never_reopened_and_may_be_truncated(mps: Mps) -> None:
    """02 R9."""
    mps.start()
    (mps.logs / "control.log").rename(mps.logs / "old.log")
    mps.ctl("get_server_list")
    assert "Cmd:get_server_list" in mps.log("old.log")
    assert not (mps.logs / "control.log").exists()
    os.truncate(mps.logs / "old.log", 0)
    mps.ctl("ps")
    assert mps.log("old.log").startswith("[")


def test_quit_with_a_timeout_ends_a_working_server(mps: Mps) -> None:
    """02 R10: tries, then force; FIFO and pid file go, the rest stays."""
    daemon = mps.start()
    client = mps.busy(A, "spin", "600")
    began = time.monotonic()
    assert mps.ctl("quit -t 1") == ""
    assert time.monotonic() - began >= 1
    assert gone(daemon)
    assert client.end() == 16
    assert "sync CUDA_ERROR_MPS_RPC_FAILURE" in client.text()
    assert sorted(modes(mps.pipe)) == ["control", "control_lock", "control_privileged"]
    log = messages(mps.log("control.log"))
    assert "quit command issued with timeout of 1" in log
    assert [line.split()[0] for line in log[-5:]] == ["Try", "Server", "Force", "Server", "Exit"]
    mps.start()
    assert mps.ctl("get_server_list") == ""


def test_quit_ends_an_idle_daemon_at_once(mps: Mps) -> None:
    daemon = mps.start()
    assert mps.ctl("quit") == ""
    assert gone(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_daemon_takes_the_servers_along(mps: Mps, number: int) -> None:
    """02 R11: clients get MPS_RPC_FAILURE, files stay, new clients run outside, the next daemon starts over them."""
    daemon = mps.start()
    client = mps.busy(A, "sleep", "600")
    server = mps.server()
    os.kill(daemon, number)
    assert gone(server)
    assert gone(daemon)
    client.saw("work now CUDA_ERROR_MPS_RPC_FAILURE")
    assert len(modes(mps.pipe)) == 5
    assert mps.run("get_server_list") == (1, "", "Cannot find MPS control daemon process\n")
    assert mps.client(B, "query").free() > 142000
    assert len(re.findall("NEW CLIENT", mps.log("control.log"))) == 2
    mps.start()
    assert mps.client(B, "query").end() == 0


def test_a_stopped_server_blocks_the_daemon_until_it_is_killed(mps: Mps) -> None:
    """06 V3: with another user waiting, who is then served."""
    mps.start()
    mps.busy(A, "sleep", "600")
    server = mps.server()
    os.kill(server, signal.SIGSTOP)
    assert mps.server() == server, "the list needs no answer of the server"
    waiting = mps.client(B, "query")
    mps.saw("control.log", f"Try shutting down server {server}, backoff is disabled")
    with pytest.raises(subprocess.TimeoutExpired):
        mps.run("get_server_list", timeout=1)
    os.kill(server, signal.SIGKILL)
    assert waiting.end() == 0
    assert "Unable to accept connection" in messages(mps.log("control.log"))


def test_a_stopped_daemon_and_those_who_wait_for_it(mps: Mps) -> None:
    """06 V4: killed, its servers exit, and the waiting client runs outside MPS."""
    daemon = mps.start()
    mps.busy(A, "sleep", "600")
    os.kill(daemon, signal.SIGSTOP)
    waiting = mps.client(B, "query")
    with pytest.raises(subprocess.TimeoutExpired):
        mps.run("get_server_list", timeout=1)
    assert waiting.process.poll() is None
    os.kill(daemon, signal.SIGKILL)
    assert waiting.end() == 0
    assert "user 20002" not in mps.log("control.log")


def test_in_the_foreground_both_logs_go_to_standard_output(mps: Mps) -> None:
    """02 R11: and there are no files."""
    with (mps.directory / "stdout").open("wb") as output:
        daemon = subprocess.Popen(
            [str(mps.programs / "nvidia-cuda-mps-control"), "-f"], env=mps.environment, stdout=output
        )
    mps.watch(daemon.pid)
    end = time.monotonic() + PATIENCE
    while "binary version" not in (mps.directory / "stdout").read_text() and time.monotonic() < end:
        time.sleep(0.01)
    assert mps.client(A, "query").end() == 0
    text = (mps.directory / "stdout").read_text()
    assert "NEW SERVER" in text
    assert "Server has started" in text
    assert list(mps.logs.iterdir()) == []
    daemon.terminate()
    assert daemon.wait(60) == -signal.SIGTERM


def test_without_root_everything_runs_as_the_one_user(mps: Mps) -> None:
    """People without root can try it: daemon, server and clients are all theirs."""
    mps.directory.chmod(0o777)
    started = subprocess.run(
        [str(mps.programs / "nvidia-cuda-mps-control"), "-d"],
        env=mps.environment,
        user=A,
        group=A,
        extra_groups=[],
        timeout=PATIENCE,
        check=False,
    )
    assert started.returncode == 0
    mps.watch(int((mps.pipe / "nvidia-cuda-mps-control.pid").read_text()))
    assert mps.ctl("set_default_active_thread_percentage 20", A) == "20.0\n"
    assert mps.client(A, "query").sms() == 26
    assert os.stat(f"/proc/{mps.server()}").st_uid == A
    assert mps.ctl("quit -t 1", A) == ""


def test_a_server_cannot_start_behind_a_closed_door(mps: Mps) -> None:
    """The server connects as its user; a pipe directory it may not enter means no server, and nobody waits for it."""
    mps.start()
    mps.pipe.chmod(0o700)
    mps.ctl(f"start_server -uid {A}")
    mps.saw("control.log", r"Server \d+ exited with status 0")
    assert mps.ctl("get_server_list") == ""
    mps.pipe.chmod(0o777)
    assert mps.client(A, "query").end() == 0


def test_directories_that_servers_may_enter_and_users_may_not(mps: Mps) -> None:
    """A server runs with group 0: root:root 0710 is closed to users and open to it (recording 08, G1)."""
    mps.pipe.mkdir()
    mps.logs.mkdir()
    for directory in (mps.pipe, mps.logs):
        directory.chmod(0o710)
    mps.start()
    mps.ctl(f"start_server -uid {A}")
    mps.saw("control.log", "Ready")
    outside = mps.client(A, "query")
    assert outside.end() == 0
    assert outside.free() == 142563, "all that the server leaves"
    assert mps.run("get_server_list", A) == (1, "", "Cannot find MPS control daemon process\n")
    assert os.stat(f"/proc/{mps.server()}").st_uid == A


def test_after_many_changes_of_user_nothing_has_piled_up(mps: Mps) -> None:
    """Descriptors of the daemon and entries of dead processes stay few."""
    daemon = mps.start(MPSSIM_SPEED="20")
    before = len(os.listdir(f"/proc/{daemon}/fd"))
    for turn in range(20):
        assert mps.client((A, B)[turn % 2], "query").end() == 0
        assert not gone_now(daemon), mps.log("control.log")[-3000:]
    assert len(os.listdir(f"/proc/{daemon}/fd")) <= before + 3
    assert len(os.listdir(mps.processes)) <= 2
