"""A client that asks for partitioning by context in its environment: MPS does not hold it to its limit, and it is told
of."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import pytest

from mpsagent.agent import unlimited
from mpsagent.agent.host import Agent
from mpsagent.agent.unlimited import Unlimited
from mpsagent.system.processes import start_time
from mpsagent.system.threads import THREADS, in_thread
from tests.agent.stage import A, B, C, Stage, alive

ASKING = {"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1"}


OWN = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def test_a_client_that_asks_for_partitioning_by_context_is_told_of_while_it_lives(stage: Stage) -> None:
    """Not one that says no, and not one that has all multiprocessors anyway; and it is not ended."""
    policy = f"[limits]\nthreads = 20\n[user.{C}]\nthreads = 100\n"
    agent = stage.with_agent(policy, extra='sharing = "together"')
    says_no = stage.client(A, "sleep", 600, **dict.fromkeys(ASKING, "0"))
    has_all = stage.client(C, "sleep", 600, **ASKING)
    for client in (says_no, has_all):
        client.working()
    asking = stage.client(B, "sleep", 600, **ASKING)
    asking.working()
    assert "] sms 132 " in asking.text()
    assert "] sms 26 " in says_no.text()
    found = stage.record("client.unlimited")
    assert (found["pid"], found["uid"]) == (asking.pid, B)
    assert f"process {asking.pid} of user {B}" in stage.problem(agent, "whatever its thread limit")
    asking.kill()
    stage.until(lambda: not any("thread limit" in one for one in agent.api.problems()), "over when it has ended")
    assert [one["pid"] for one in stage.records("client.unlimited")] == [asking.pid]
    assert stage.records("action", action="TerminateClient") == []


def test_it_is_ended_where_the_policy_says_so_unless_it_keeps_to_its_limit(stage: Stage) -> None:
    """One with the environment of `mpsagent-cli env --partitioning` keeps to it; of one that may, nothing is
    said."""
    policy = f'[limits]\nthreads = 20\npartitioning = "terminate"\n[user.{C}]\npartitioning = "allow"\n'
    agent = stage.with_agent(policy, extra='sharing = "together"')
    status, text = stage.cli(agent, "env", "--partitioning", "--json")
    assert status == 0, text
    printed = {name: value for name, value in json.loads(text).items() if name in (*ASKING, OWN)}
    assert printed == {**ASKING, OWN: "20.0"}
    keeping = [stage.client(A, "sleep", 600, **printed), stage.client(A, "sleep", 600, **ASKING, **{OWN: "10"})]
    allowed = stage.client(C, "sleep", 600, **ASKING)
    for client in (*keeping, allowed):
        client.working()
    assert "] sms 26 " in keeping[0].text()
    assert "] sms 12 " in keeping[1].text()
    passing = stage.client(B, "sleep", 600, **ASKING)
    assert passing.ended() is not None
    assert "] sms 132 " in passing.text()
    asked = stage.record("action.done", action="TerminateClient")
    assert (asked["pid"], asked["rule"]) == (passing.pid, "limits.partitioning")
    assert [one["pid"] for one in stage.records("client.unlimited")] == [passing.pid]
    assert all(alive(client.pid) for client in (*keeping, allowed))


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
    monkeypatch.setattr(unlimited, "DEADLINE", 0.02)

    async def scenario(pid: int) -> None:
        peer = SimpleNamespace(start=start_time(pid))
        state, looks = SimpleNamespace(clients={pid: SimpleNamespace(peer=peer)}), list[asyncio.Task[None]]()
        agent = SimpleNamespace(state=state, spawn=lambda work: looks.append(asyncio.create_task(work)))
        for _ in range(THREADS):
            Unlimited(cast("Agent", agent)).look()
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
