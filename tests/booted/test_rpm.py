"""The .rpm, where there are the tools for it: the same files by another way, with scripts of its own."""

from __future__ import annotations

import shutil

import pytest

from tests.booted.machine import Machine
from tests.booted.package import build
from tests.booted.service import BOB, SIMULATED, assert_served_exactly, enable, installer


@pytest.mark.timeout(600)
@pytest.mark.skipif(not (shutil.which("rpmbuild") and shutil.which("rpm")), reason="rpm and rpmbuild are not installed")
def test_the_rpm_installs_works_and_goes(machine: Machine) -> None:
    """Its scripts make the users, enable nothing, and stop the agent when it is erased."""
    *rpm, _, _ = installer(".rpm")
    shutil.copyfile(build("rpm"), machine.path("/root/mpsagent.rpm"))
    # A Python for which it has no libraries: refused before anything is there.
    machine.run("mount", "--bind", "/bin/echo", "/usr/bin/python3")
    done = machine.run(*rpm, "--install", "/root/mpsagent.rpm", check=False)
    machine.run("umount", "/usr/bin/python3")
    assert done.returncode != 0
    assert "and this package has libraries for Python" in done.stderr
    assert not machine.path("/usr/lib/mpsagent").exists()
    machine.run(*rpm, "--install", "/root/mpsagent.rpm")
    assert machine.systemctl("is-enabled", "mpsagent.service", check=False) == "disabled"
    changed = machine.run(*rpm, "--verify", "mpsagent", check=False).stdout
    assert not changed, "files are not as the package says"
    machine.run("mpsagent-sim", "install", SIMULATED)
    machine.run("ln", "-s", f"{SIMULATED}/nvidia-cuda-mps-control", "/usr/bin/nvidia-cuda-mps-control")
    enable(machine)
    assert_served_exactly(machine, BOB)
    machine.run(*rpm, "--erase", "mpsagent")
    assert machine.run("pgrep", "-f", "mpsagent run", check=False).returncode == 1
    assert machine.run("pgrep", "-f", "nvidia-cuda-mps-control", check=False).returncode == 0, "MPS was to run on"
    for place in ("/usr/lib/mpsagent", "/usr/bin/mpsagent", "/usr/share/licenses/mpsagent", "/usr/share/doc/mpsagent"):
        assert not machine.path(place).exists(), place
