"""The package, built once, and a machine that has it installed with the simulator in NVIDIA's place."""

from __future__ import annotations

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


@pytest.fixture
def node(machine: Machine, package: Path) -> Machine:
    """A machine with the package installed and the simulator in the place of NVIDIA's programs; nothing is enabled."""
    install(machine, package)
    return machine


@pytest.fixture
def running(node: Machine) -> Machine:
    """Installed, configured, enabled: what an administrator does, and nothing else."""
    enable(node)
    return node
