"""Several control daemons may write into the same log files: only the lines of ours, and of its servers, count."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from mpsagent.agent.clock import SteadyClock
from mpsagent.agent.conditions import Conditions
from mpsagent.agent.log_side import LogSide
from mpsagent.core.model import State
from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LogParser
from mpsagent.policy.policy import Policy

CONTROL = b"""\
[2026-11-20 23:56:21.000 Control    40] Accepting connection...
[2026-11-20 23:56:21.001 Control    99] Cmd:quit
[2026-11-20 23:56:21.002 Control    61] Starting new server 61 for user 1000
[2026-11-20 23:56:21.003 Control    62] Starting new server 62 for user 1000
[2026-11-20 23:56:21.004 Control    99] Starting new server 61 for user 1001
[2026-11-20 23:56:21.004 Control    61] Failed to start server using uid 1000. No memory
[2026-11-20 23:56:21.004 Control    62] Failed to start server using uid 1000. No memory
[2026-11-20 23:56:21.005 Control    40] NEW SERVER 61: Ready
[2026-11-20 23:56:21.006 Control    99] Server 61 exited with status 0
"""
SERVER = b"""\
[2026-11-20 23:56:21.000 Other     61] Startup
[2026-11-20 23:56:21.001 Other     62] Startup
[2026-11-20 23:56:21.002 Server    61] Client {PID: 7, Context ID: 0} connected
[2026-11-20 23:56:21.003 Server    62] Client {PID: 8, Context ID: 0} connected
"""


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_lines_of_another_daemon_are_left_out_and_it_is_named(step: int) -> None:
    """A `quit` that another daemon was given would stop all turns of ours."""
    parser = LogParser("control")
    parser.daemon, parser.ours = 40, lambda pid: pid == 61
    found = [event for at in range(0, len(CONTROL), step) for event in parser.feed(CONTROL[at : at + step])]
    assert [event.what for event in found] == [ev.ConnectionLine, ev.ServerStarting, ev.ServerFailed, ev.ServerReady]
    assert parser.other == 99


def test_servers_of_another_daemon_are_left_out_and_asked_about_once() -> None:
    """Each line would cost a look into /proc otherwise."""
    asked: list[int] = []

    def ours(pid: int) -> bool:
        asked.append(pid)
        return pid == 61

    parser = LogParser("server")
    parser.ours = ours
    found = parser.feed(SERVER)
    assert [(event.what, event.server) for event in found] == [
        (ev.ServerStartup, 61), (ev.ContextConnected, 61),
    ]  # fmt: skip
    assert asked == [61, 62]
    parser.feed(SERVER[: SERVER.index(b"\n") + 1])
    assert asked == [61, 62, 61], "a number is used again"


def test_without_a_daemon_everything_counts() -> None:
    """Replay, and the moments in which ours is not known yet."""
    assert len(LogParser("control").feed(CONTROL)) == 9
    assert len(LogParser("server").feed(SERVER)) == 4


def test_the_two_logs_of_a_daemon_share_what_the_policy_gives_them(tmp_path: Path) -> None:
    """`log_size`, as it is now; and where their beginnings cannot be dropped, that is told with what helps."""
    conditions = Conditions()
    state = State(Policy(log_directory=str(tmp_path), log_size=64 << 20))
    for name in ("control", "server"):
        (tmp_path / f"{name}.log").write_bytes(b"\0" * (40 << 20))
        os.link(tmp_path / f"{name}.log", tmp_path / f"{name}.other")

    async def scenario() -> None:
        side = LogSide(str(tmp_path), lambda: state, SteadyClock(), conditions, lambda *_: None, lambda _: None)
        for name in ("control", "server"):
            await side.follow(name, None, LogParser(name))
        while len(conditions.all()) < 2:
            await asyncio.sleep(0.01)
        side.close()

    asyncio.run(scenario())
    for told in conditions.all():
        assert "another name" in told.what
        assert "copytruncate" in told.do
