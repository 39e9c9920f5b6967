"""The agent's sandbox, tried from inside: what the agent has to do is allowed, and what it must not do is not.

The probe runs as mpsagent.service itself, with only its program replaced, so that a directive that is one too many
shows here and not at three in the morning.
"""

from __future__ import annotations

import json

import pytest

from tests.booted.machine import Machine

PROBE = r"""
import ctypes, json, os, signal, socket, subprocess, sys, traceback

sys.path.insert(0, "/usr/lib/mpsagent/lib/python%d.%d" % sys.version_info[:2])
other, daemon = int(sys.argv[1]), int(sys.argv[2])
results = {}


def attempt(name):
    def run(function):
        try:
            function()
            results[name] = "done"
        except BaseException as error:
            results[name] = "%s: %s" % (type(error).__name__, error)
    return run


@attempt("make the pipe directory and open its door")
def _():
    os.mkdir("/tmp/nvidia-mps-probe", 0o700)
    os.chmod("/tmp/nvidia-mps-probe", 0o755)

@attempt("write where its files are")
def _():
    for place in ("/run/mpsagent", "/var/lib/mpsagent", "/var/log/nvidia-mps"):
        with open(place + "/probe", "w") as file:
            file.write("x")

@attempt("clear away what others put into its pipe directory")
def _():
    os.unlink("/tmp/nvidia-mps/left-by-a-user")

@attempt("prove what a daemon is")
def _():
    os.readlink("/proc/%d/exe" % daemon)
    open("/proc/%d/environ" % daemon, "rb").read()
    open("/proc/%d/cmdline" % daemon, "rb").read()

@attempt("end another user's process by its pidfd")
def _():
    fd = os.pidfd_open(other)
    signal.pidfd_send_signal(fd, signal.SIGTERM)

@attempt("run the front-end")
def _():
    done = subprocess.run(["nvidia-cuda-mps-control"], input=b"get_server_list\n", capture_output=True, timeout=10,
                          env={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr

@attempt("watch files")
def _():
    from asyncinotify import Inotify, Mask
    with Inotify() as watch:
        watch.add_watch("/var/log/nvidia-mps", Mask.CREATE)

@attempt("lower a helper's priority")
def _():
    os.setpriority(os.PRIO_PROCESS, 0, 0)

@attempt("start a unit over D-Bus")
def _():
    from pystemd.systemd1 import Manager
    with Manager() as manager:
        manager.Manager.StartUnit(b"probe-target.target", b"replace")

@attempt("call through ctypes")
def _():
    assert ctypes.CDLL(None).getpid() == os.getpid()

@attempt("speak to a user database over its socket")
def _():
    socket.socket(socket.AF_UNIX)

@attempt("FORBIDDEN: reach the network")
def _():
    socket.socket(socket.AF_INET)

@attempt("FORBIDDEN: change the system")
def _():
    open("/usr/bin/probe", "w")

@attempt("FORBIDDEN: change the policy")
def _():
    open("/etc/passwd", "a")

@attempt("FORBIDDEN: look into homes")
def _():
    assert os.listdir("/root"), "empty"

@attempt("FORBIDDEN: become somebody else")
def _():
    os.setuid(2001)

@attempt("FORBIDDEN: give files away")
def _():
    os.chown("/var/lib/mpsagent/probe", 2001, 2001)

@attempt("FORBIDDEN: make a device")
def _():
    os.mknod("/tmp/null", 0o600 | 0o020000, os.makedev(1, 3))

@attempt("FORBIDDEN: mount")
def _():
    failed = ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)
    assert not failed, os.strerror(ctypes.get_errno())

with open("/run/mpsagent/results.json", "w") as file:
    json.dump(results, file)
"""


@pytest.fixture
def results(node: Machine) -> dict[str, str]:
    node.run("install", "-d", "-m", "0755", "/tmp/nvidia-mps", "/var/log/nvidia-mps")
    node.run("install", "-o", "2001", "-m", "0600", "/dev/null", "/tmp/nvidia-mps/left-by-a-user")
    pipe = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps", "CUDA_MPS_LOG_DIRECTORY": "/var/log/nvidia-mps"}
    node.run("nvidia-cuda-mps-control", "-d", environment=pipe)
    daemon = node.path("/tmp/nvidia-mps/nvidia-cuda-mps-control.pid").read_text().strip()
    # Inside its own pid namespace the other user's process has another number than out here.
    other = node.run("sh", "-c", "setpriv --reuid 2001 --regid 2001 --clear-groups sleep 600 >/dev/null 2>&1 & echo $!")
    node.write("/etc/systemd/system/probe-target.target", "[Unit]\nDescription=Probe\n")
    node.write("/opt/probe.py", PROBE)
    node.write(
        "/etc/systemd/system/mpsagent.service.d/probe.conf",
        "[Service]\nType=oneshot\nRestart=no\nWatchdogSec=0\nExecStart=\n"
        f"ExecStart=/usr/bin/python3 -I /opt/probe.py {other.stdout.strip()} {daemon}\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("start", "mpsagent.service")
    found: dict[str, str] = json.loads(node.path("/run/mpsagent/results.json").read_text())
    assert node.systemctl("is-active", "probe-target.target") == "active"
    return found


def test_the_sandbox_lets_the_agent_work_and_nothing_else(results: dict[str, str]) -> None:
    """One machine for both directions: booting one for each attempt would take a minute."""
    wanted = {name: said for name, said in results.items() if not name.startswith("FORBIDDEN")}
    unwanted = {name: said for name, said in results.items() if name.startswith("FORBIDDEN")}
    assert set(wanted.values()) == {"done"}, json.dumps(wanted, indent=2)
    assert "done" not in unwanted.values(), json.dumps(unwanted, indent=2)
    assert len(unwanted) >= 8
