"""What the kernel says of a process, as far as it is text."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from mpsagent.gate.identity import cgroup_of, contained, start_time


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("", None),
        ("0::/\n", "/"),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0\n", "/system.slice/slurmstepd.scope/job_7/step_0"),
        ("8:pids:/docker/1\n1:cpu:/\n0::/\n", "/docker/1"),
        # Slurm beside systemd, version 1 and hybrid: all but the freezer name the service that started the job.
        (
            "9:name=systemd:/system.slice/slurmd.service\n8:pids:/system.slice/slurmd.service\n"
            "6:freezer:/slurm/uid_7/job_7\n0::/system.slice/slurmd.service\n",
            "/slurm/uid_7/job_7",
        ),
        ("6:freezer:/\n2:pids:/a\n0::/user.slice\n", "/user.slice"),
        ("2:pids:/a:freezer:/b\n0::/user.slice/x:freezer:y\n", "/user.slice/x:freezer:y"),
    ],
)
def test_which_of_the_cgroups_counts(text: str, path: str | None) -> None:
    assert cgroup_of(text) == path


def test_whether_a_process_is_in_a_pid_namespace_below() -> None:
    """That of a container; and one that has gone, or whose pid is another's now, is not taken for the host's."""
    me = os.getpid()
    assert not contained(me, start_time(me))
    assert contained(me, start_time(me) - 1)
    assert contained(0, 0)
    below = subprocess.Popen(["unshare", "--user", "--pid", "--fork", "--kill-child", "cat"], stdin=subprocess.PIPE)
    try:
        children = Path(f"/proc/{below.pid}/task/{below.pid}/children")
        deadline = time.monotonic() + 60
        while not (found := children.read_text().split()) and below.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if not found:
            pytest.skip("no pid namespace can be made here")
        assert contained(int(found[0]), start_time(int(found[0])))
        assert not contained(below.pid, start_time(below.pid)), "its parent is in this one"
    finally:
        below.kill()
        below.communicate()
