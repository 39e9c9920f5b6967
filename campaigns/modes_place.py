"""What the parts of modes.py have in common: the GPUs that are theirs, and the agent on them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from campaigns.gate_place import Here
from tests.conformance import rig as rigs
from tests.scenes.stage import Agent, Client, Json, Machine, Stage


class Lane(Here):
    """Parts that play on these GPUs one after the other."""

    def __init__(
        self, backend: rigs.Backend, machine: Machine, base: Path, quick: bool, echo: Callable[[str], None] | None,
        gpus: tuple[str, ...], cores: list[int],
    ) -> None:  # fmt: skip
        super().__init__(backend, machine, base, quick, echo)
        self.gpus, self.cores = gpus, cores

    def agent(self, stage: Stage, policy: str, extra: str = "", gpus: Iterable[str] = ()) -> Agent:
        """The agent at work on the first GPU, or on these."""
        named = ", ".join(f'"{uuid}"' for uuid in gpus or self.gpus[:1])
        stage.policy(policy, extra=f"devices = [{named}]\n{extra}")
        agent = stage.start_agent()
        stage.answering(agent)
        stage.until(lambda: serves(agent), "all instances serve")
        return agent


def serves(agent: Agent) -> bool:
    """Users apart have no control daemon before they come."""
    status = agent.api.status()
    return bool(status["gate"]["in_force"]) and all(
        one["mode"]["sharing"] == "per-user" or (one["control"] and one["control"]["running"])
        for one in status["instances"]
    )


def at_work(stage: Stage, clients: Iterable[Client]) -> list[Client]:
    """Those that get their contexts; all of them are to."""
    return [one for one in clients if one.working(60)]


def all_end(clients: Iterable[Client]) -> None:
    """They have worked enough, and end by themselves."""
    told = list(clients)
    for one in told:
        one.signal(signal.SIGUSR1)
    for one in told:
        one.ended()


def rows_of(agent: Agent) -> list[Json]:
    return list(agent.api.get("/v1/clients")["clients"])


def shuffled(draw: random.Random, clients: list[int]) -> list[int]:
    draw.shuffle(clients)
    return clients
