"""The package, built once, and a machine that has it installed with the simulator in NVIDIA's place."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.booted.machine import Machine, booted, why_not
from tests.booted.package import build
from tests.booted.service import enable, install


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test that asks for a machine needs root and namespaces; elsewhere it is skipped, with the reason."""
    for item in items:
        if {"machine", "node", "running"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.root)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600))  # a boot and an installation on a busy machine take a minute


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


@pytest.fixture(scope="session")
def package(possible: None) -> Path:
    """The .deb of this checkout, for this machine's Python; several test processes build it once between them."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("not a Debian: no dpkg-deb")
    return build()


@pytest.fixture(scope="session")
def installed(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The disk of a machine on which the package was installed; several test processes do that once between them."""
    base = tmp_path_factory.getbasetemp()
    place = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    disk = place / "installed.tar"
    with disk.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not disk.exists():
            with booted(tmp_path_factory.mktemp("installed") / "machine") as one:
                install(one, package)
                one.keep(disk.with_suffix(".new"))
            disk.with_suffix(".new").rename(disk)
    return disk


@pytest.fixture
def node(installed: Path, tmp_path: Path) -> Iterator[Machine]:
    """Booted with the package installed and the simulator in the place of NVIDIA's programs; nothing is enabled."""
    with booted(tmp_path / "machine", changes=installed) as one:
        yield one


@pytest.fixture
def running(node: Machine) -> Machine:
    """Installed, configured, enabled: what an administrator does, and nothing else."""
    enable(node)
    return node
