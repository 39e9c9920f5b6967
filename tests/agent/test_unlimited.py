"""Clients that MPS does not hold to their limits, because of their environment: found, told of, and ended where the
policy says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpsagent.agent import lifted_limits
from mpsagent.agent.host import Agent
from mpsagent.agent.lifted_limits import Lifted
from mpsagent.core.inputs import Lifts
from mpsagent.linux.proc import start_time
from mpsagent.linux.threads import THREADS, in_thread
from tests.agent.stage import A, B, Stage

ASKING = {"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1"}


OWN = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
WAYS = {
    "own": "",
    "shared": 'server_scope = "all"',
    "together": 'sharing = "one-server"',
    "apart": 'sharing = "per-user"',
}


def limited(stage: Stage, way: str) -> Agent:
    return stage.with_agent('[limits]\nmemory_limit = "4G"\n[timeouts]\nsigkill_delay = "1s"\n', extra=WAYS[way])


def test_who_waits_learns_that_its_environment_would_lift_its_limit(stage: Stage) -> None:
    """In `queue` and in an event, before anybody is ended for it; whoever has a right value hears nothing."""
    agent = limited(stage, "own")
    holder = stage.client(A, "sleep", 600, **{MEMORY: "0=2G"})
    holder.working()
    waiting = stage.client(B, "query", **{MEMORY: "0=2G,1=4G"})
    told = stage.record("client.environment")
    assert (told["pid"], told["uid"]) == (waiting.pid, B)
    words = f"its environment may take its memory limit away ({MEMORY}=0=2G,1=4G)"
    stage.until(lambda: words in " ".join(stage.cli(agent, "queue")[1].split()), "the queue says it")
    assert [one["pid"] for one in stage.records("client.environment")] == [waiting.pid]


def test_thousands_that_wait_with_such_an_environment_are_not_all_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decision goes through them; a client is always one of them."""
    monkeypatch.setattr(lifted_limits.outsider, "lifts", lambda fresh, devices: [(True, "x")] * len(fresh))
    held = {pid: SimpleNamespace(peer=SimpleNamespace(pid=pid, start=1)) for pid in range(10_000, 11_000)}
    state = cast("Any", SimpleNamespace(clients={}, held=held, devices=()))

    async def scenario() -> dict[int, Lifts]:
        looks = list[asyncio.Task[None]]()
        one = Lifted(lambda: state, lambda work: looks.append(asyncio.create_task(work)))
        for _ in range(20):
            one.look()
            await looks[-1]
            if len(looks) == 10:
                state.clients[20_000] = SimpleNamespace(peer=SimpleNamespace(start=1))
        return one.found

    found = asyncio.run(scenario())
    assert len(found) == lifted_limits.MOST_FOUND + 1
    assert found[20_000] == Lifts(1, True, "x")


_NEVER_COMES = """
import ctypes, fcntl, os, struct, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]) & ~4095, (int(fields[48]) + 4095) & ~4095
faults = libc.syscall(323, os.O_CLOEXEC)
if faults < 0: raise SystemExit("no userfaultfd")
fcntl.ioctl(faults, 0xC018AA3F, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
assert libc.mmap(begin, end - begin, 3, 0x32, -1, 0) == begin
fcntl.ioctl(faults, 0xC020AA00, bytearray(struct.pack("QQQQ", begin, end - begin, 1, 0)))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.root
def test_clients_whose_environment_never_comes_do_not_take_the_threads_of_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at such a page waits for as long as its process lives; after 32 of them no name was asked and no history
    written any more."""
    monkeypatch.setattr(lifted_limits, "DEADLINE", 0.02)

    async def scenario(pid: int) -> None:
        peer = SimpleNamespace(start=start_time(pid))
        state = cast("Any", SimpleNamespace(clients={pid: SimpleNamespace(peer=peer)}, held={}, devices=()))
        looks = list[asyncio.Task[None]]()
        for _ in range(THREADS):
            Lifted(lambda: state, lambda work: looks.append(asyncio.create_task(work))).look()
        await asyncio.gather(*looks)
        assert await in_thread(os.getpid, deadline=30) == os.getpid()

    words = [sys.executable, "-I", "-S", "-c", _NEVER_COMES]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "ready\n":
                pytest.skip("no userfaultfd here")
            asyncio.run(scenario(process.pid))
        finally:
            process.kill()
