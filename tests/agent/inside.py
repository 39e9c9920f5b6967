"""An agent inside the test's own process, with neither daemon nor gate: for what goes wrong in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mpsagent.agent.host import Agent
from mpsagent.agent.node import Node
from mpsagent.agent.settings import Settings
from mpsagent.system.control import ControlProblem, ProblemKind
from mpsagent.system.names import Names
from mpsagent.system.store import Store

T = TypeVar("T")
_NODES: dict[Agent, Node] = {}


class NoDaemon:
    """A supervisor that finds and starts nothing. ``problem``: why not."""

    running = None
    problem = ControlProblem(ProblemKind.FAILED, "nothing is started here")

    async def start(self, environment: object, threads: float, *, multiuser: bool = False) -> ControlProblem:
        return self.problem

    async def adopt(self) -> ControlProblem:
        return ControlProblem(ProblemKind.ABSENT, "nothing runs")

    def kill(self) -> str:
        return "nothing runs"

    def close(self) -> None: ...

    async def forget(self) -> None: ...


async def _no_gate() -> None: ...


def settings_at(place: Path, text: str, instance: str, devices: Sequence[Mapping[str, object]] = ()) -> Settings:
    """With a policy, these GPUs, and directories of its own. Users take turns unless ``instance`` says
    otherwise."""
    instance = instance if "sharing =" in instance else f'sharing = "turns"\n{instance}'
    place.chmod(0o755)
    (place / "devices.json").write_text(json.dumps(list(devices)))
    (place / "state").mkdir(exist_ok=True)
    policy = place / "policy.toml"
    policy.write_text(
        f'{text}\n[instance.x]\npipe_directory = "{place}/p"\nlog_directory = "{place}/log"\n'
        f'control_daemon_path = "/nonexistent/control"\n{instance}\n'
    )
    state, devices = str(place / "state"), f"{place}/devices.json"
    return Settings(str(policy), f"{place}/agent.sock", state, f"{place}/run", devices_file=devices)


def play(
    place: Path,
    scenario: Callable[[Agent], Coroutine[Any, Any, T]],
    *,
    supervisor: Any = None,
    text: str = "[limits]\nactive_threads = '20%'\n",
    instance: str = "",
    devices: Sequence[Mapping[str, object]] = (),
) -> T:
    """Runs ``scenario(agent)`` with an agent that is at work."""
    settings = settings_at(place, text, instance, devices)

    async def main() -> T:
        node = Node(settings, Names(), Store(place / "state" / "state.json"))
        node.keeper.start = _no_gate  # type: ignore[method-assign]
        await node.start(lambda policy, where, gone: supervisor or NoDaemon())
        try:
            _NODES[node.agents[0]] = node
            return await asyncio.wait_for(scenario(node.agents[0]), 90)
        finally:
            _NODES.clear()
            await node.end()

    return asyncio.run(main())


def node_of(agent: Agent) -> Node:
    """The node of an agent that plays."""
    return _NODES[agent]


def topics(agent: Agent) -> set[str]:
    return {*agent.conditions.topics(), *node_of(agent).conditions.topics()}


def records(agent: Agent, kind: str) -> list[dict[str, Any]]:
    """As far as no api has them."""
    return [{"kind": one[1], "at": one[2], **json.loads(one[3])} for one in agent.shown.kept if one[1] == kind]
