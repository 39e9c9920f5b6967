"""NVML through its helper process: the real helper and the real pynvml, on a stand-in for NVIDIA's library."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from mpsagent.mps.gpus import ComputeProcess
from mpsagent.mps.work import Work
from mpsagent.system.nvml import Nvml
from tests.system.nvml_stand_in import PART, UUID, Machine

pytestmark = pytest.mark.usefixtures("no_leak")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(built: Machine) -> Machine:
    for path in built.place.iterdir():
        if path.name != "libnvidia-ml.so.1":
            path.unlink()
    return built


def asked(machine: Machine) -> Nvml:
    return Nvml(lambda: machine.environment, time.time)


async def gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists():
        await asyncio.sleep(0.01)


async def test_what_a_gpu_says_of_itself(machine: Machine) -> None:
    """All of it in one question, and the helper stays for the next."""
    nvml = asked(machine)
    gpus = await nvml.gpus()
    assert not isinstance(gpus, str), gpus
    (gpu,) = gpus
    assert (gpu.uuid, gpu.name, gpu.generation, gpu.multiprocessors) == (UUID, "NVIDIA Stand-in", "Hopper", 132)
    assert (gpu.memory, gpu.used, gpu.mode, gpu.mig) == (80 << 30, 3 << 30, "default", False)
    assert (gpu.utilization, gpu.power, gpu.temperature, gpu.problem) == (0.42, 123.456, 55, None)
    pid = nvml.pid
    assert await nvml.gpus() == gpus
    assert nvml.pid == pid is not None
    nvml.close()


async def test_processes_are_told_apart(machine: Machine) -> None:
    """Clients of MPS, others, and those that draw as well; a size that NVML does not know is none."""
    machine.set("processes", f"11 plain 5\n12 mps 6\n13 plain {2**64 - 1}\n13 display 1")
    nvml = asked(machine)
    found = await nvml.processes()
    assert not isinstance(found, str), found
    assert set(found) == {
        ComputeProcess(11, UUID, False, 5),
        ComputeProcess(12, UUID, True, 6),
        ComputeProcess(13, UUID, False, None, display=True),
    }
    nvml.close()


async def test_what_a_gpu_has_done(machine: Machine) -> None:
    """Utilisation of the samples since the last question, times the seconds between. Energy is the
    driver's counter."""
    machine.set("samples", "1000 100\n2000 100")
    machine.set("energy", 5_000_000)
    nvml = asked(machine)
    first = await nvml.work()
    assert first == {UUID: Work(0.0, 0.0, 5000.0)}
    await asyncio.sleep(0.3)
    machine.set("samples", "1000 100\n2000 100\n3000 20\n4000 60")
    machine.set("energy", 5_090_000)
    second = await nvml.work()
    assert not isinstance(second, str), second
    work = second[UUID]
    assert 0.3 <= work.seconds < 60
    assert (work.busy, work.energy) == (pytest.approx(0.4 * work.seconds), 5090.0)
    third = await nvml.work()  # no sample since then: what NVML says now
    assert not isinstance(third, str), third
    between = third[UUID].seconds - work.seconds
    assert third[UUID].busy - work.busy == pytest.approx(0.42 * between)
    nvml.close()


async def test_counters_go_on_with_the_next_helper(machine: Machine) -> None:
    """What a GPU did while there was no helper is not known and not counted, but for its energy."""
    machine.set("samples", "1000 100")
    machine.set("energy", 1000)
    nvml = asked(machine)
    await nvml.work()
    await asyncio.sleep(0.05)
    before = await nvml.work()
    assert not isinstance(before, str), before
    nvml._drop()
    machine.set("energy", 3000)
    after = await nvml.work()
    assert after == {UUID: before[UUID]._replace(energy=3.0)}
    nvml.close()


async def test_a_gpu_that_cannot_say_what_it_does(machine: Machine) -> None:
    """As one that is divided into MIG devices: no seconds are counted, so nobody is said to have been idle."""
    machine.set("mig")
    nvml = asked(machine)
    await nvml.work()
    await asyncio.sleep(0.02)
    assert await nvml.work() == {UUID: Work(0.0, 0.0, 0.0)}
    machine.set("lost")
    assert await nvml.work() == {UUID: Work(0.0, 0.0, 0.0)}
    nvml.close()


async def test_a_mig_device_is_known_by_its_own_name(machine: Machine) -> None:
    """What its GPU does not say of itself then is not known, and no mistake."""
    machine.set("mig")
    machine.set("processes", "11 plain 5")
    nvml = asked(machine)
    gpus = await nvml.gpus()
    assert not isinstance(gpus, str), gpus
    assert gpus[0].mig
    assert gpus[0].utilization is None
    assert [part.uuid for part in gpus[0].parts] == [PART]
    assert gpus[0].has(PART)
    assert await nvml.processes() == (ComputeProcess(11, PART, False, 5),)
    nvml.close()


async def test_a_hung_helper_is_killed_and_replaced(machine: Machine) -> None:
    """The deadline ends the question, nothing else waits for it, and the next question has an answer."""
    nvml = asked(machine)
    assert not isinstance(await nvml.gpus(), str)
    first = nvml.pid
    assert first is not None
    machine.set("hang")
    problem = await nvml.gpus(deadline=0.3)
    assert isinstance(problem, str)
    assert "did not answer within 0.3 s" in problem
    await gone(first)
    machine.unset("hang")
    found = await nvml.gpus()
    assert not isinstance(found, str), found
    assert nvml.pid not in (None, first)
    nvml.close()


async def test_the_loop_goes_on_while_nvml_is_slow(machine: Machine) -> None:
    """A driver that needs a second for its lists holds up who asked, and no one else."""
    machine.set("slow", 1000)
    nvml = asked(machine)
    await nvml.gpus()
    question = asyncio.create_task(nvml.processes())
    turns = 0
    while not question.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert turns > 2
    assert not isinstance(await question, str)
    nvml.close()


async def test_a_killed_helper_is_replaced_within_the_same_question(machine: Machine) -> None:
    """By the OOM killer or by hand: who asks does not notice."""
    nvml = asked(machine)
    await nvml.gpus()
    first = nvml.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await gone(first)
    assert not isinstance(await nvml.gpus(), str)
    machine.set("slow", 60_000)
    question = asyncio.create_task(nvml.processes())
    await asyncio.sleep(0.2)  # asked by now, or not: killed in both cases
    machine.unset("slow")
    second = nvml.pid
    assert second not in (None, first)
    os.kill(second or 0, signal.SIGKILL)
    assert await question == ()
    nvml.close()


async def test_a_gpu_that_falls_off_keeps_its_name_and_says_what_it_is(machine: Machine) -> None:
    """It is one GPU's problem, not NVML's."""
    nvml = asked(machine)
    await nvml.gpus()
    machine.set("lost")
    found = await nvml.gpus()
    assert not isinstance(found, str), found
    assert (found[0].uuid, found[0].memory) == (UUID, None)
    assert "fallen off the bus" in (found[0].problem or "")
    assert await nvml.processes() == ()
    machine.unset("lost")
    again = await nvml.gpus()
    assert not isinstance(again, str)
    assert again[0].problem is None
    nvml.close()


async def test_without_a_driver_or_a_library_it_says_so(machine: Machine, tmp_path: Path) -> None:
    """And it is asked anew each time, by a new process: the driver may be loaded later."""
    machine.set("no_driver")
    nvml = asked(machine)
    assert await nvml.gpus() == "NVML could not be asked: Driver Not Loaded"
    machine.unset("no_driver")
    assert not isinstance(await nvml.gpus(), str)
    nvml.close()
    (tmp_path / "libnvidia-ml.so.1").write_text("no library")
    without = Nvml(lambda: {**machine.environment, "LD_LIBRARY_PATH": str(tmp_path)}, time.time)
    problem = await without.gpus()
    assert isinstance(problem, str) or all(gpu.uuid != UUID for gpu in problem)  # a machine may have a real one
    without.close()


async def test_a_helper_that_cannot_be_killed_is_the_only_one(machine: Machine) -> None:
    """In the kernel's uninterruptible sleep not even SIGKILL helps; one more each minute would fill the machine."""
    nvml = asked(machine)
    await nvml.gpus()
    machine.set("hang")
    helper = nvml._helper
    assert helper is not None
    real, helper.kill = helper.kill, helper._hang_up  # type: ignore[method-assign]  # as the kernel would have it
    assert "killed" in str(await nvml.gpus(deadline=0.3))
    assert "cannot even be killed" in str(await nvml.gpus())
    assert nvml.pid is None
    real()
    await gone(helper.pid)
    machine.unset("hang")
    assert not isinstance(await nvml.gpus(), str)
    nvml.close()


async def test_xid_events_are_heard_of(machine: Machine) -> None:
    """As soon as a helper is there."""
    nvml = asked(machine)
    await nvml.gpus()
    machine.set("xid", 79)
    async with asyncio.timeout(60):
        while not nvml.xids:
            await asyncio.sleep(0.02)
    assert [(xid.device, xid.number) for xid in nvml.xids[UUID]] == [(UUID, 79)]
    nvml.close()


async def test_the_helper_ends_with_whoever_asks(machine: Machine) -> None:
    """An agent that is killed leaves none behind: the end of its input is the helper's end."""
    nvml = asked(machine)
    await nvml.gpus()
    helper = nvml._helper
    assert helper is not None
    helper._hang_up()
    await gone(helper.pid)
    nvml.close()
