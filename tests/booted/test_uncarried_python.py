"""A Python that the package has no libraries for, and an agent that cannot start: refused or reported, not a hang."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.booted.machine import Machine
from tests.booted.service import BOB, agent_pid, assert_served_exactly, enable, ready, until

LIBRARIES = "/usr/lib/mpsagent/lib"
BROKEN = "/etc/systemd/system/mpsagent.service.d/simulated.conf"


def python(node: Machine) -> str:
    """Return the version of the machine's Python as "3.11"."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    return node.run("/usr/bin/python3", "-c", ask).stdout.strip()


def repacked(package: Path, place: Path, *, version: str, names: tuple[str, ...]) -> Path:
    """Return the package as a newer one, with another Python's version in these of its control files."""
    carried = subprocess.run(["dpkg-deb", "-f", package, "Pre-Depends", "Depends"], capture_output=True, text=True)
    root = place / "root"
    subprocess.run(["dpkg-deb", "-R", package, root], check=True)
    control = root / "DEBIAN" / "control"
    control.write_text(control.read_text().replace("\nVersion: ", "\nVersion: 99:"))
    for name in names:
        file = root / "DEBIAN" / name
        major, _, minor = version.partition(".")
        text = file.read_text().replace(f"{major}.{int(minor) + 1}", "3.91").replace(version, "3.90")
        assert text != file.read_text(), f"{name} names no Python: {carried.stdout}"
        file.write_text(text)
    subprocess.run(["dpkg-deb", "-Znone", "--root-owner-group", "-b", root, place / "other.deb"], check=True)
    return place / "other.deb"


@pytest.mark.parametrize(("names", "said"), [
    (("control",), "pre-dependency problem"),
    (("preinst",), "this package has libraries for Python 3.90 only"),
], ids=["by its dependencies", "by its script"])  # fmt: skip
def test_a_package_without_this_python_is_refused_before_anything_is_replaced(
    running: Machine, package: Path, tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    """It installed, and then its gate and agent did not start: users ran without limits, or waited."""
    other = repacked(package, tmp_path, version=python(running), names=names)
    shutil.copyfile(other, running.path("/root/other.deb"))
    agent = agent_pid(running)
    done = running.run("dpkg", "--install", "/root/other.deb", check=False)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    state = running.run("dpkg-query", "-W", "-f", "${Status} ${Version}", "mpsagent").stdout
    assert state.startswith("install ok installed")
    assert "99:" not in state
    assert agent_pid(running) == agent
    assert_served_exactly(running, BOB)


def test_a_new_python_that_is_not_carried_is_reported_by_the_trigger(node: Machine) -> None:
    """A new release's Python comes under a running agent, which works until its next start."""
    version = python(node)
    node.run("mv", f"{LIBRARIES}/python{version}", f"{LIBRARIES}/python3.90")
    node.run("dpkg-trigger", "--by-package=python3", "/usr/bin/python3")
    done = node.run("dpkg", "--triggers-only", "mpsagent")
    assert f"/usr/bin/python3 is Python {version}, and this package has libraries for Python 3.90 only" in done.stderr
    assert "systemctl disable --now" in done.stderr
    node.run("mv", f"{LIBRARIES}/python3.90", f"{LIBRARIES}/python{version}")
    node.run("dpkg-trigger", "--by-package=python3", "/usr/bin/python3")
    assert node.run("dpkg", "--triggers-only", "mpsagent").stderr == ""


def cannot_start(node: Machine) -> str:
    """Give the agent a command that fails. Returns the drop-in with which it works."""
    good = node.path(BROKEN).read_text()
    node.write(BROKEN, "[Service]\nExecStart=\nExecStart=/bin/false\n")
    node.systemctl("daemon-reload")
    return good


def test_an_upgrade_whose_agent_does_not_start_comes_back_and_says_so(running: Machine, package: Path) -> None:
    """From systemd 254 on apt waited without end, with its lock; before, it reported success."""
    good = cannot_start(running)
    shutil.copyfile(package, running.path("/root/mpsagent.deb"))
    done = running.run("dpkg", "--install", "/root/mpsagent.deb", timeout=300)
    assert "The agent has not started" in done.stderr
    assert "journalctl -u mpsagent" in done.stderr
    assert running.run("dpkg-query", "-W", "-f", "${Status}", "mpsagent").stdout == "install ok installed"
    running.write(BROKEN, good)
    running.systemctl("daemon-reload")
    assert "has not started" not in running.run("dpkg", "--install", "/root/mpsagent.deb", timeout=300).stderr
    until("ready for users", lambda: ready(running))


def test_the_start_of_an_agent_that_cannot_start_fails(node: Machine) -> None:
    """From systemd 254 on the command hung, whatever kept the agent from starting. It is still tried again."""
    enable(node)
    cannot_start(node)
    for order in ("restart", "start"):
        assert node.run("systemctl", order, "mpsagent.service", check=False, timeout=300).returncode != 0
    began = int(node.show("mpsagent.service", "NRestarts")["NRestarts"])
    until("another start", lambda: int(node.show("mpsagent.service", "NRestarts")["NRestarts"]) > began + 1)
