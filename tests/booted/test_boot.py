"""The machine itself, and the package on it before anything is enabled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.booted.machine import Machine
from tests.booted.service import install


@pytest.fixture
def node(machine: Machine, package: Path) -> Machine:
    """Installed while it runs, as an administrator does; other tests begin with a machine that has it already."""
    install(machine, package)
    return machine


def test_a_systemd_boots_and_reboots(machine: Machine) -> None:
    """If the ground does not hold, no other test here means anything."""
    assert machine.run("ps", "-p", "1", "-o", "comm=").stdout.strip() == "systemd"
    assert machine.systemctl("is-system-running", check=False) == "running", machine.systemctl("--failed")
    machine.write("/etc/kept", "kept")
    machine.write("/run/lost", "lost")
    machine.reboot()
    assert machine.systemctl("is-system-running", check=False) == "running", machine.systemctl("--failed")
    assert machine.path("/etc/kept").exists()
    assert not machine.path("/run/lost").exists()


def test_installing_enables_nothing(node: Machine) -> None:
    """Whether the agent takes over a node's GPUs is for its administrator to say."""
    gate = ("mpsagent-gate.service", "mpsagent-gate.socket", "mpsagent-gate-privileged.socket")
    api = ("mpsagent-api.service", "mpsagent-api.socket", "mpsagent-pages.socket")
    for unit in ("mpsagent.service", "mpsagent.socket", "mpsagent-admin.socket", *api, *gate):
        assert node.systemctl("is-enabled", unit, check=False) == "disabled"
        assert node.systemctl("is-active", unit, check=False) == "inactive"
    assert not node.path("/run/mpsagent").exists()
    assert node.run("getent", "group", "mpsagent-admin").stdout


def test_what_was_installed_works_without_the_checkout(node: Machine) -> None:
    """The package carries its own libraries: nothing may come from a virtual environment that only developers have."""
    where = (
        "import sys; sys.path[:0] = ['/usr/lib/mpsagent/lib/python%d.%d' % sys.version_info[:2]]; "
        "import mpsagent; print(mpsagent.__file__)"
    )
    assert node.run("/usr/bin/python3", "-IS", "-c", where).stdout.startswith("/usr/lib/mpsagent/lib/")
    assert "OK" in node.run("mpsagent-cli", "policy", "check").stdout
    assert node.run("mpsagent-cli", "status", check=False).returncode == 3, "there is no agent yet"
    assert "COMP_WORDS" in node.path("/usr/share/bash-completion/completions/mpsagent-cli").read_text()
    assert "The policy was rejected" in node.run("journalctl", "--list-catalog").stdout


def ours(node: Machine) -> set[str]:
    """Files that bear our name, but for those of dpkg's own and of what is written down anyway."""
    found = node.run(
        *("find", "/etc", "/usr", "/var", "/run", "-xdev", "-iname", "*mpsagent*"),
        *("-not", "-path", "/var/log/journal/*", "-not", "-path", "/run/systemd/*", "-not", "-path", "/var/cache/*"),
    ).stdout
    return {line for line in found.splitlines() if "/dpkg/" not in line}


def test_purge_leaves_nothing(machine: Machine, package: Path) -> None:
    """Whoever tries the agent out can be rid of it without a trace."""
    node, before = machine, ours(machine)
    install(node, package)
    assert ours(node) - before
    node.systemctl("enable", "mpsagent.service")
    node.write("/etc/mpsagent/policy.d/10-mine.toml", "[limits]\nactive_threads = '50%'\n")
    node.run("dpkg", "--remove", "mpsagent")
    assert node.path("/etc/mpsagent/policy.d/10-mine.toml").exists(), "remove keeps the configuration"
    node.run("dpkg", "--purge", "mpsagent")
    assert ours(node) - before == set()
    assert node.run("getent", "group", "mpsagent-admin", check=False).returncode == 2
    assert node.run("getent", "passwd", "mpsagent-api", check=False).returncode == 2
