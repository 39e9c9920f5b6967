"""The daemon, as far as no scenario of tests/conformance holds it against NVIDIA's."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.sim.conftest import PATIENCE, A, B, Mps


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
        assert Path(f"/proc/{daemon}").exists(), mps.log("control.log")[-3000:]
    assert len(os.listdir(f"/proc/{daemon}/fd")) <= before + 3
    assert len(os.listdir(mps.processes)) <= 2
