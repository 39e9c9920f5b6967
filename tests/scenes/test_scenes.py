"""Every scene on the simulator, with small counts: the promises are kept here before they are shown on a GPU.

The figures are those of `make test-gpu`; here only what is promised is asserted, with time to spare for a busy machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.rig import Backend
from tests.scenes import catalog
from tests.scenes.stage import Machine, Stage, backend_of

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of several users")
# In `make test` each mechanism once; the GPU machine plays all of them.
LEFT_OUT = {
    "change-6", "change-10", "change-20", "limits-unset", "starvation-plain", "dead-waiter-plain", "fault-plain",
    "ladder-ignoring", "ladder-spinning-and-ignoring", "ladder-stopped-shared", "fault", "hang-server-stop-busy",
}  # fmt: skip


@pytest.fixture(scope="module")
def simulated() -> Iterator[tuple[Backend, Machine]]:
    """The simulator's programs, and the device that they show. A short path: a socket's has at most 108 bytes."""
    with backend_of("sim", Path(tempfile.mkdtemp(prefix="mpss", dir="/tmp"))) as found:
        yield found


@pytest.mark.root
@needs_root
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in catalog.ALL if name not in LEFT_OUT])
def test_scene(name: str, simulated: tuple[Backend, Machine]) -> None:
    """What the scene's title says, and nothing that it started is left behind."""
    backend, machine = simulated
    scene = catalog.ALL[name]
    place = Path(tempfile.mkdtemp(prefix="mpst", dir="/tmp"))
    place.chmod(0o755)
    try:
        with Stage(backend, place / "s", machine, quick=True) as stage:
            result = scene.play(stage, scene.quick)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    told = "\n".join([result.verdict, *(f"{key}: {value}" for key, value in result.figures.items())])
    assert result.good, told + "\n" + "\n".join(str(one) for one in [*result.raw, *stage.said][-60:])
    assert not stage.left, stage.left


def test_the_script_lists_what_it_would_play() -> None:
    """campaigns/run.py starts with nothing installed beside it, and every name is taken once."""
    script = Path(__file__).parents[2] / "campaigns/run.py"
    done = subprocess.run([sys.executable, str(script), "--list"], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [name for name, scene in catalog.ALL.items() if scene.only in ("", "real")]
    assert len(catalog.ALL) == sum(len(module.SCENES) for module in catalog.MODULES)
