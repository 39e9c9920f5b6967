"""A machine without systemd, by the lines of docs/operations.md: everything where it is by default, in namespaces in
which those places are new."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.stage import A
from tests.conformance.backends import REPOSITORY, sim_backend

pytestmark = pytest.mark.root
# What lies in the first argument stays where it is.
_PLACES = """
mount --make-rprivate /
mount -t tmpfs tmpfs /run
mkdir /run/kept
mount --bind "$1" /run/kept
mount -t tmpfs -o mode=1777 tmpfs /tmp
mkdir -p "$1"
mount --move /run/kept "$1"
rmdir /run/kept
for place in /var/lib /var/log; do mount -t tmpfs -o mode=755 tmpfs "$place"; done
echo ready
exec sleep infinity
"""
_NEW = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


class Node:
    """Programs run inside it, as root or another user."""

    def __init__(self, place: Path) -> None:
        self.place, backend = place, sim_backend(place)
        self.client = backend.client
        devices = Path(backend.control).with_name("devices.json")
        policy = place / "policy.toml"
        policy.write_text(
            f'[limits]\nactive_threads = "50%"\n[instance.default]\ncontrol_daemon_path = "{backend.control}"\n'
        )
        self.agent = ["mpsagent.agent.main", "run", "--supervise", "child", "--policy", str(policy)]
        self.agent += ["--devices", str(devices)]
        self._environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
        self._init = subprocess.Popen([*_NEW, "sh", "-euc", _PLACES, "sh", place], stdout=subprocess.PIPE, text=True)
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "ready\n":
            pytest.skip("no namespaces here")
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text()
        self._enter = ["nsenter", "-t", children.split()[0], "-m", "-p", "-r", "--"]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._enter, *words], env=self._environment, cwd="/", capture_output=True, text=True, timeout=100
        )

    def start(self, *words: str) -> None:
        """One of our programs, to its end; what it says goes to a file."""
        with (self.place / "said").open("ab") as said:
            command = [*self._enter, sys.executable, "-m", *words]
            subprocess.Popen(command, env=self._environment, cwd="/", stdout=said, stderr=said)

    def until(self, *wanted: str) -> None:
        """`status` says each of them; with nothing wanted, that all is well."""
        end = time.monotonic() + 60
        while True:
            done = self.run(sys.executable, "-m", "mpsagent.cli.main", "status")
            if all(text in done.stdout for text in wanted) if wanted else done.returncode == 0:
                return
            assert time.monotonic() < end, (done.stdout, (self.place / "said").read_text())
            time.sleep(0.2)

    def served(self) -> str:
        words = ["setpriv", "--reuid", str(A), "--regid", str(A), "--clear-groups", *self.client, "query"]
        return self.run(*words).stdout

    def end(self) -> None:
        self._init.kill()
        self._init.wait(60)


@pytest.fixture
def node() -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    place = Path(tempfile.mkdtemp(prefix="mpsw", dir="/tmp"))
    place.chmod(0o755)
    one = Node(place)
    yield one
    one.end()
    shutil.rmtree(place, ignore_errors=True)


def test_one_command_starts_everything(node: Node) -> None:
    """Where not even /run/mpsagent is there. Users reach the agent's socket, and are served with their limits."""
    node.start(*node.agent)
    node.until()
    assert "sms 66 " in node.served()
    asked = node.run("setpriv", "--reuid", str(A), "--clear-groups", "stat", "/run/mpsagent/mpsagent.sock")
    assert asked.returncode == 0, asked.stderr


def test_a_keeper_that_was_started_first_and_the_agent_meet(node: Node) -> None:
    """Both have the same defaults; they listened in different places, and every client hung."""
    node.start("mpsagent.gate.main", "keep")
    while node.run("test", "-S", "/tmp/nvidia-mps/control").returncode:
        time.sleep(0.05)
    node.start(*node.agent)
    node.until()
    assert "sms 66 " in node.served()


def test_a_gate_that_waits_elsewhere_for_an_agent_is_said(node: Node) -> None:
    node.start("mpsagent.gate.main", "keep", "--link", "/run/elsewhere")
    while node.run("test", "-S", "/tmp/nvidia-mps/control").returncode:
        time.sleep(0.05)
    node.start(*node.agent)
    node.until("the gate cannot be reached at /run/mpsagent/gate.sock")


def test_a_directory_that_is_not_there_is_named(node: Node) -> None:
    done = node.run(sys.executable, "-m", *node.agent, "--socket", "/run/not/here/api.sock")
    assert done.returncode == 1
    assert "/run/not/here" in done.stdout + done.stderr
