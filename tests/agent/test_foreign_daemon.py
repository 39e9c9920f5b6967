"""Control daemons that are not this agent's. One that was started by hand on the public directory is named for as long
as it runs, and the gate's units are left alone meanwhile. One of an instance that the policy has no more is named, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpsagent.agent import node
from mpsagent.agent.host import Agent
from tests.agent.inside import node_of, play, topics
from tests.coroutines import until

TOPIC = "foreign daemon"
WAITS = "import sys; print('on', flush=True); sys.stdin.read()"


@contextmanager
def daemon(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a control daemon's name and options."""
    directory.mkdir(parents=True)
    with subprocess.Popen(
        ["nvidia-cuda-mps-control", "-d", "-c", WAITS], executable=sys.executable,
        env={"CUDA_MPS_PIPE_DIRECTORY": str(directory)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"on\n"
        yield child
        child.kill()


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """On the agent's public directory."""
    with daemon(tmp_path / "p") as child:
        yield child


def test_it_is_said_and_its_place_is_taken_only_when_it_has_gone(
    theirs: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again meanwhile, the units would fail for want of the socket, again and again."""
    monkeypatch.setattr(node, "LOOK", 0.02)
    monkeypatch.setattr(node, "FOREIGN_AGAIN", 0.05)

    async def scenario(agent: Agent) -> None:
        last: list[bool] = []

        def look(*, missing: bool) -> None:
            last[:] = [missing]

        monkeypatch.setattr(node_of(agent).keeper, "look", look)
        await until(lambda: TOPIC in topics(agent))
        (said,) = [one for one in node_of(agent).conditions.all() if f"control daemon {theirs.pid} " in one.what]
        assert said.what == f"control daemon {theirs.pid} of uid {os.geteuid()} on {tmp_path}/p"
        assert said.do == f"echo quit | CUDA_MPS_PIPE_DIRECTORY={tmp_path}/p nvidia-cuda-mps-control"
        await until(lambda: last == [False])
        theirs.communicate()
        await until(lambda: TOPIC not in topics(agent))
        await until(lambda: last == [True])

    play(tmp_path, scenario)


def test_one_that_the_policy_has_no_more_is_said_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance was renamed, and the agent started again: its clients work on, and nobody looks after them."""
    monkeypatch.setattr(node, "LOOK", 0.02)
    monkeypatch.setattr(node, "FOREIGN_AGAIN", 0.05)
    place = tmp_path / "run" / "instances"

    async def scenario(agent: Agent) -> None:
        await until(lambda: "daemon left" in topics(agent))
        (said,) = [one for one in node_of(agent).conditions.all() if "the policy no longer has" in one.what]
        assert said.what.endswith(f': control daemon {old.pid} of an instance "old"')
        assert f"{place}/old/pipe" in said.do
        old.communicate()
        await until(lambda: "daemon left" not in topics(agent))

    with daemon(place / "old" / "pipe") as old, daemon(place / "x" / "pipe"):
        play(tmp_path, scenario)
