"""The agent's descriptors: one user's connections do not take them, and a client is never lost for want of one."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mpsagent.agent.clients import ClientProcesses
from mpsagent.agent.conditions import FILES
from mpsagent.gate.queue import MOST_HELD
from mpsagent.linux.descriptors import KEPT
from mpsagent.linux.proc import start_time
from mpsagent.linux.processes import Process
from mpsagent.system import gate_link
from mpsagent.wire.link import Knock
from tests.coroutines import until


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as found:
        yield found
        found.kill()


@contextmanager
def no_room() -> Iterator[None]:
    """No descriptor is left, as if users had taken all."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while True:
            try:
                stack.callback(os.close, os.dup(0))
            except OSError:
                break
        yield


def pidfds() -> int:
    found = 0
    for one in os.listdir("/proc/self/fd"):
        link = Path("/proc/self/fd", one)
        found += link.is_symlink() and "pidfd" in os.readlink(link)
    return found


def knock(pid: int, connection: int) -> Knock:
    return Knock(connection, pid, 0, 0, start_time(pid), 0.0)


def test_there_are_enough_for_all_that_the_gate_may_hold() -> None:
    """4,096 connections of five uids put the agent out of work: it could neither start MPS nor ask it."""
    assert MOST_HELD + KEPT + 4096 <= FILES


def test_a_process_with_a_thousand_connections_costs_one_pidfd(program: subprocess.Popen[bytes]) -> None:
    async def scenario() -> None:
        clients, before = ClientProcesses(lambda *_: None), pidfds()
        pid = program.pid
        for connection in range(1000):
            clients.came(knock(pid, connection), Process.open(pid))
        assert pidfds() == before + 1
        for connection in range(500):
            clients.left(connection)
        assert clients.waiting(999, start_time(pid)) is not None
        _, process = clients.give(999)
        assert process is not None
        process.close()
        assert clients.passed(998, pid, start_time(pid))
        client = clients.get(pid, start_time(pid))
        for connection in range(500, 998):
            clients.left(connection)
        assert client is not None
        assert client.alive
        assert pidfds() == before + 1
        clients.close()
        assert pidfds() == before

    asyncio.run(scenario())


def test_a_client_whose_pidfd_could_not_be_taken_has_not_ended(program: subprocess.Popen[bytes]) -> None:
    """It was recorded as ended at once and worked on: no limit, turn or order reached it."""

    async def scenario() -> None:
        ended: list[tuple[int, int, bool]] = []
        clients, pid = ClientProcesses(lambda *found: ended.append(found)), program.pid
        start = start_time(pid)
        with no_room():
            clients.came(knock(pid, 1), None)
            assert clients.passed(1, pid, start)
            assert clients.get(pid, start) is None
            clients.hold_again()
            assert clients.unheld == 1
        clients.hold_again()
        assert clients.unheld == 0
        assert clients.get(pid, start) is not None
        assert ended == []
        program.kill()
        await until(lambda: ended == [(pid, start, False)])
        clients.close()

    asyncio.run(scenario())


def test_one_that_ends_before_there_is_room_again_is_recorded_as_ended(program: subprocess.Popen[bytes]) -> None:
    async def scenario() -> None:
        ended: list[tuple[int, int, bool]] = []
        clients, pid = ClientProcesses(lambda *found: ended.append(found)), program.pid
        start = start_time(pid)
        with no_room():
            assert clients.passed(1, pid, start)
            program.kill()
            program.wait()
            clients.hold_again()
        assert ended == [(pid, start, False)]
        assert clients.unheld == 0
        assert not clients.passed(2, pid, start)
        clients.close()

    asyncio.run(scenario())


def test_some_are_kept_for_the_agents_own_work(
    program: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pidfd that would take one of the last is closed: its connection waits without it."""
    message = knock(program.pid, 1)
    process = gate_link._process(message, [os.pidfd_open(program.pid)])
    assert process is not None
    process.close()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (KEPT, KEPT))
    before = pidfds()
    assert gate_link._process(message, [os.pidfd_open(program.pid)]) is None
    assert pidfds() == before
