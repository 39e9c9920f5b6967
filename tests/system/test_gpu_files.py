"""The files of the GPU that a process has open stay open after its death, for as long as they are held."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.linux.processes import Process
from mpsagent.system.gpu_files import GpuFiles

OPENS = """
import fcntl, sys
for path in sys.argv[1:]:
    file = open(path, "r+b", 0)
    fcntl.flock(file, fcntl.LOCK_EX)
    globals()[path] = file
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("nvidia-uvm", "nvidia0", "other"):
        (tmp_path / name).touch()
    return tmp_path


def program(*paths: Path) -> subprocess.Popen[str]:
    started = subprocess.Popen(
        [sys.executable, "-c", OPENS, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "open\n"
    return started


def is_open(path: Path) -> bool:
    """A lock is kept by the last duplicate of the descriptor."""
    with path.open("r+b", 0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def started(place: Path) -> Iterator[subprocess.Popen[str]]:
    one = program(*(place / name for name in ("nvidia-uvm", "nvidia0", "other")))
    yield one
    one.kill()
    one.wait()


def test_they_are_held_beyond_the_end_of_the_process(place: Path, started: subprocess.Popen[str]) -> None:
    async def held() -> list[bool]:
        process = Process.open(started.pid)
        assert process is not None
        before = len(os.listdir("/proc/self/fd"))
        hold = GpuFiles(str(place)).hold(process, 600)
        process.close()
        assert len(os.listdir("/proc/self/fd")) <= before, "only the process that holds them has them"
        started.kill()
        started.wait()
        found = [is_open(place / name) for name in ("nvidia-uvm", "nvidia0", "other")]
        hold.end_after(0.0)
        await hold.ended
        return found

    assert asyncio.run(held()) == [True, True, False]
    assert not is_open(place / "nvidia-uvm")


def test_what_cannot_be_held_is_said(place: Path, started: subprocess.Popen[str]) -> None:
    async def refused(process: Process) -> str:
        with pytest.raises(OSError, match=r".") as error:
            GpuFiles(f"{place}/none").hold(process, 600)
        return str(error.value.strerror)

    process = Process.open(started.pid)
    assert process is not None
    assert asyncio.run(refused(process)) == "it has none open"
    started.kill()
    started.wait()
    with pytest.raises(OSError, match=r"."):
        process.duplicate(0)
    process.close()
