"""The package, built once, and a machine that has it installed with the simulator in NVIDIA's place."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.machine import Machine, booted, why_not
from tests.system.service import ALICE, BOB, POLICY, SIMULATED, ready, until

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEM_PYTHON = "/usr/bin/python3"
# What the package is made of; when none of it has changed, one that was built before will do.
INGREDIENTS = (
    "mpsagent",
    "systemd",
    "packaging",
    "policies",
    "docs/policy.md",
    "README.md",
    "requirements.lock",
    "pyproject.toml",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that asks for a machine needs root and namespaces; elsewhere it is skipped, with the reason."""
    for item in items:
        if {"machine", "node", "running"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.root)


@pytest.fixture(scope="session")
def possible() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"cannot boot a systemd here: {reason}")


@pytest.fixture
def machine(possible: None, tmp_path: Path) -> Iterator[Machine]:
    """A machine as this one is, with nothing of ours in it."""
    with booted(tmp_path / "machine") as one:
        yield one


def _digest() -> str:
    digest = hashlib.sha256()
    for ingredient in INGREDIENTS:
        path = ROOT / ingredient
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@pytest.fixture(scope="session")
def package(possible: None) -> Path:
    """The .deb of this checkout, for this machine's Python; several test processes build it once between them."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("not a Debian: no dpkg-deb")
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = subprocess.run([SYSTEM_PYTHON, "-c", version], capture_output=True, text=True, check=True).stdout.strip()
    place = ROOT / "build" / "test-package"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = place / _digest()
        if not built.exists():
            for old in place.glob("*/"):
                shutil.rmtree(old)
            new = place / "new"
            environment = {**os.environ, "PYTHONS": python, "COMPRESSION": "none", "DIST": str(new)}
            done = subprocess.run(
                [ROOT / "packaging/debian/build.sh"], env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"the package does not build:\n{done.stdout}{done.stderr}"
            new.rename(built)
        return next(built.glob("*.deb"))


@pytest.fixture
def node(machine: Machine, package: Path) -> Machine:
    """A machine with the package installed and the simulator in the place of NVIDIA's programs; nothing is enabled."""
    shutil.copyfile(package, machine.path("/root/mpsagent.deb"))
    machine.run("dpkg", "--install", "/root/mpsagent.deb")
    machine.run("mpsagent-sim", "install", SIMULATED)
    machine.run("ln", "-s", f"{SIMULATED}/nvidia-cuda-mps-control", "/usr/bin/nvidia-cuda-mps-control")
    return machine


@pytest.fixture
def running(node: Machine) -> Machine:
    """Installed, configured, enabled: what an administrator does, and nothing else."""
    if not node.path("/usr/bin/curl").exists():
        pytest.skip("curl is not installed")
    for user, name in ((ALICE, "alice"), (BOB, "bob")):
        node.run("useradd", "--uid", user, "--no-create-home", name)
    node.write("/etc/mpsagent/policy.d/10-test.toml", POLICY)
    # No GPU here, and no NVML to ask.
    node.write(
        "/etc/systemd/system/mpsagent.service.d/simulated.conf",
        "[Service]\nExecStart=\n"
        f"ExecStart=/usr/bin/mpsagent run --supervise systemd --devices {SIMULATED}/devices.json\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("enable", "--now", "mpsagent.socket", "mpsagent.service")
    until("ready for users", lambda: ready(node))
    return node
