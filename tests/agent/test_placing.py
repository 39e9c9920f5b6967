"""Where each connection of the gate's waits, in the agent's books."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpsagent.agent.host import Agent
from mpsagent.mps.limits import Limits
from mpsagent.system.processes import Process
from mpsagent.wire import link
from tests.agent.inside import node_of, play

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
    play(tmp_path, scenario, instance=f'{more}control_program = "/nonexistent/control"\n')
