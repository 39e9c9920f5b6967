"""Where each connection of the gate's waits, in the agent's books."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpsagent.agent.host import Agent
from mpsagent.linux.processes import Process
from mpsagent.mps.gpus import Gpu
from mpsagent.mps.limits import Limits
from mpsagent.wire import link
from tests.agent.inside import node_of, play
from tests.coroutines import until

USER = 20001
HANDING = link.Handing(7, os.getpid(), USER, 1.0, "y")
PASSED = link.Passed(7, os.getpid(), USER, 5, Limits(), 0.1, 1.0, instance="y")


@pytest.mark.parametrize("said", [HANDING, PASSED], ids=["handing", "passed"])
def test_who_is_handed_over_before_the_name_is_known_waits_for_it_no_more(
    tmp_path: Path, said: link.Handing | link.Passed
) -> None:
    """The gate's table named the user already. The connection stayed among those that wait for a name: for good, with
    a descriptor, and when the name came the agent thought that it waits."""

    async def scenario(first: Agent) -> None:
        placing = node_of(first).placing
        process = Process.open(os.getpid())
        placing._receive(link.Knock(7, os.getpid(), USER, USER, 5, 1.0, instance=None), process)
        assert placing.unplaced == 1
        placing._receive(said, None)
        assert placing.unplaced == 0
        holds = [agent.clients.holds(7) for agent in placing._agents]
        assert holds == [False, said is HANDING]

    more = f'users = ["alice"]\n[instance.y]\npipe_directory = "{tmp_path}/p"\nlog_directory = "{tmp_path}/logy"\n'
    play(tmp_path, scenario, instance=f'{more}control_daemon_path = "/nonexistent/control"\n')


def test_a_gpu_that_is_lost_draws_nobody(tmp_path: Path) -> None:
    """With least-loaded the GPU that fell off the bus is the emptiest one."""
    devices = [
        {"ordinal": number, "uuid": f"GPU-{number}", "name": "A", "memory": 1 << 34, "multiprocessors": 80}
        for number in range(2)
    ]

    async def scenario(first: Agent) -> None:
        placing = node_of(first).placing
        assert [one.able for one in placing.places()] == [True, True]
        gpus = first.observer._gpus
        await until(lambda: len(gpus.seen) == 2 and all(agent.devices for agent in placing._agents))
        for lost in ("says", "gone"):
            healthy = Gpu(1, "GPU-1")
            gpus.all = (Gpu(0, "GPU-0", problem="GPU is lost"), healthy) if lost == "says" else (healthy,)
            gpus.seen = {one.uuid: one for one in gpus.all if one.uuid is not None}
            assert [one.able for one in placing.places()] == [False, True]
        gpus.problem, gpus.all, gpus.seen = "NVML does not answer", (), {}
        assert [one.able for one in placing.places()] == [True, True], "not known is not lost"

    more = f'devices = ["GPU-0"]\n[instance.y]\ndevices = ["GPU-1"]\npipe_directory = "{tmp_path}/p"\n'
    more += f'log_directory = "{tmp_path}/logy"\ncontrol_daemon_path = "/nonexistent/control"\n'
    play(tmp_path, scenario, text='[agent]\nplacement = "least-loaded"\n', instance=more, devices=devices)


@pytest.mark.parametrize("users_own", [False, True], ids=["one daemon", "apart"])
def test_a_known_process_of_an_instance_that_is_gone_is_told_so(tmp_path: Path, users_own: bool) -> None:
    """It waited for ever: at the gate where its client is, with a closed table, while the agent believed that it waits
    at another instance. One whose instance is kept, or is made again, is not refused."""
    start = 5

    async def scenario(first: Agent) -> None:
        placing, sent = node_of(first).placing, list[object]()
        placing.link.send = sent.append  # type: ignore[method-assign, assignment]
        placing._receive(link.Hello(60, 1.0), None)
        names = ("old", "y") if not users_own else (f"old-u{USER}", f"y-u{USER}")
        for number, name in enumerate(names):
            known = link.Known(100 + number, USER, USER, start, 1.0, Limits(), None, 2, name)
            placing._receive(known, None)
            placing._receive(link.Knock(number, 100 + number, USER, USER, start, 1.0, instance=name), None)
        placing._receive(link.Knock(7, 107, USER, USER, start, 1.0, instance=names[0]), None)
        await until(lambda: any(isinstance(one, link.Refuse) for one in sent))  # after the line with the reason
        refused = [one for one in sent if isinstance(one, link.Refuse)]
        assert [one.connection for one in refused] == [0]
        assert "has worked at instance old, which the policy no longer has" in refused[0].why

    more = f'devices = []\n[instance.y]\npipe_directory = "{tmp_path}/p"\nlog_directory = "{tmp_path}/logy"\n'
    play(tmp_path, scenario, instance=f'{more}control_daemon_path = "/nonexistent/control"\n')
