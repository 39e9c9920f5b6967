"""What the kernel says of a process, as far as it is text."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mpsagent.linux.proc import cgroup_of, contained, start_time
from mpsagent.mps.rendezvous import CREDENTIALS
from mpsagent.wire.link import Knock, Left, Refused, Synced
from tests.gate.rig import ROOT, A, B, Rig, admissions, everybody, introduce, raw


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
        *(
            (f"0::/user.slice/x{end}1:freezer:/slurm/uid_7/job_7\n", f"/user.slice/x{end}1:freezer:/slurm/uid_7/job_7")
            for end in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
        ),
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


_USED_AGAIN = """
import os, socket, subprocess, sys, time
from pathlib import Path
from mpsagent.linux import proc
from mpsagent.linux import peers
from mpsagent.gate.connection import accepted
path, users, other, pidfds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if pidfds == "without":
    peers.SO_PEERPIDFD = 9999  # as on Linux before 6.5
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path); os.chmod(path, 0o777); listener.listen()
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
pid = os.fork()
if not pid:
    os.setgid(users); os.setuid(users)
    sock.connect(path)
    os._exit(0)
os.waitpid(pid, 0)
for _ in range(200):
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    bystander = subprocess.Popen(["sleep", "600"], user=other, group=other)
    if bystander.pid == pid:
        break
    bystander.kill(); bystander.wait()
else:
    sys.exit("the number could not be had again")
connection = accepted(listener.accept()[0], 1, lambda one: None, privileged=False)
assert connection.peer.pid == pid and connection.peer.uid == users
held = peers.peer_pidfd(connection.sock, pid, connection.start)
print("told of", connection.start == proc.start_time(pid))
print("held", held is not None and proc.pid_of(held) == pid)
bystander.kill()
"""


@pytest.mark.root
@pytest.mark.parametrize("pidfds", ["with", "without"])
def test_who_has_a_pid_that_was_used_again_is_not_who_connected(pidfds: str) -> None:
    """A process connects, leaves the connection to its parent and ends before the gate has accepted it. Another user's
    process has its number by then: it would be ended with that client. The next pid is chosen, in a pid namespace."""
    place = Path(tempfile.mkdtemp(prefix="gate"))
    place.chmod(0o755)
    words = [sys.executable, "-c", _USED_AGAIN, str(place / "s"), str(A), str(B), pidfds]
    unshare = ["unshare", "--mount-proc", "--propagation", "unchanged", "--pid", "--fork", "--kill-child"]
    try:
        done = subprocess.run(
            [*unshare, *words], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
        )
    finally:
        shutil.rmtree(place)
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"no new pid namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["told of False", "held False"]


@pytest.mark.root
def test_a_connection_that_changed_hands_is_refused(rig: Rig) -> None:
    """Who connected is who would be ended for it, so a child may not take its parent's place."""
    _, agent = rig.start()
    agent.wait(Synced)
    sock = raw(rig.public / "control")
    child = os.fork()
    if child == 0:
        who = struct.pack("iII", os.getpid(), 0, 0)
        sock.sendmsg([CREDENTIALS], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
        os._exit(0)
    os.waitpid(child, 0)
    assert sock.recv(64) == b""
    assert f"process {child}" in agent.wait(Refused).why


@pytest.mark.root
def test_a_connection_whose_process_has_ended_is_not_handed_over(rig: Rig) -> None:
    """A child may hold it open."""
    daemon, agent = rig.start()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sock = introduce(raw(rig.public / "control"))
        if os.fork() == 0:
            os.close(write)
            os.read(read, 1)
        os._exit(sock.fileno() & 0)
    os.waitpid(child, 0)
    agent.wait(Knock)
    agent.say(admissions(others=everybody()))
    agent.wait(Left)
    rig.client(A).served()
    assert not daemon.saw("gave", uid=0)
    os.close(write)
    os.close(read)
