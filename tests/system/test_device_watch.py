"""Who opens a GPU's file is noticed at once; who does so without end costs nothing more."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from mpsagent.system import device_watch
from mpsagent.system.device_watch import DeviceWatch

pytestmark = pytest.mark.usefixtures("no_leak")


class Told:
    def __init__(self, place: Path) -> None:
        self.count = 0
        self.ours = False
        self.number = place / "refcnt"
        self.number.write_text("3\n")
        self.place = place
        (place / "nvidia-uvm").touch()
        (place / "nvidia0").touch()

    def watch(self) -> DeviceWatch:
        watch = DeviceWatch(str(self.place), self.opened, lambda: self.ours, str(self.number))
        if watch.problem is not None:
            pytest.skip(watch.problem)  # others have taken all of the machine's inotify instances
        return watch

    def opened(self) -> None:
        self.count += 1

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while self.count < count:
                await asyncio.sleep(0.01)


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(device_watch, "PAUSE", 0.05)
    return Told(tmp_path)


@pytest.mark.parametrize("name", ["nvidia-uvm", "nvidia0"])
async def test_an_open_is_told(told: Told, name: str) -> None:
    watch = told.watch()
    for number in (1, 2):
        (told.place / name).read_bytes()
        await told.until(number)
        await asyncio.sleep(0.2)  # the pause after the first one
    watch.close()


async def test_our_own_helper_is_not_told_of(told: Told) -> None:
    """It opens the GPU's file, and would set itself off again and again; a CUDA program opens nvidia-uvm as well."""
    watch = told.watch()
    told.ours = True
    (told.place / "nvidia0").read_bytes()
    await asyncio.sleep(0.3)
    assert told.count == 0
    (told.place / "nvidia-uvm").read_bytes()
    await told.until(1)
    watch.close()


async def test_opens_without_end_are_told_once_a_pause(told: Told) -> None:
    watch = told.watch()
    begun = asyncio.get_running_loop().time()
    opens = 0
    while told.count < 3:
        (told.place / "nvidia-uvm").read_bytes()
        opens += 1
        await asyncio.sleep(0)
    spent = asyncio.get_running_loop().time() - begun
    assert opens > told.count
    assert spent >= 2 * device_watch.PAUSE
    watch.close()


async def test_containers_are_seen_by_the_modules_count(told: Told) -> None:
    """Their device file has another inode. Fewer users than before are no news."""
    watch = told.watch()
    told.number.write_text("2\n")
    watch.look()
    told.number.write_text("5\n")
    watch.look()
    await told.until(1)
    watch.look()
    await asyncio.sleep(0.2)
    assert told.count == 1
    watch.close()


async def test_a_driver_that_is_loaded_later_is_watched(tmp_path: Path, told: Told) -> None:
    (tmp_path / "nvidia-uvm").unlink()
    watch = told.watch()
    (tmp_path / "nvidia-uvm").touch()
    await told.until(1)
    await asyncio.sleep(0.2)
    before = told.count
    (tmp_path / "nvidia-uvm").read_bytes()
    await told.until(before + 1)
    watch.close()


async def test_without_a_directory_nothing_is_watched(tmp_path: Path) -> None:
    watch = DeviceWatch(str(tmp_path / "none"), lambda: None, lambda: False)
    watch.look()
    assert watch.problem is None
    watch.close()


async def test_while_nothing_can_be_watched_it_is_told_now_and_then(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of inotify instances: said, tried again, and meanwhile it looks every ten seconds."""

    def none() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(device_watch, "Inotify", none)
        watch = DeviceWatch(str(told.place), told.opened, lambda: False, str(told.number))
        assert "Too many open files" in (watch.problem or "")
        for _ in range(device_watch.BLIND):
            watch.look()
        await told.until(1)
        assert watch.problem is not None
    watch.close()
