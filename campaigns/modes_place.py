"""What the parts of modes.py have in common: the GPUs that are theirs, and the agent on them."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from campaigns.gate_place import Here
from campaigns.gate_work import limit_of
from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.scenes.stage import Agent, Client, Json, Machine, Stage, StageError

OVERHEAD = 360
"""MiB of its memory limit that a client finds taken by its own context: 72 with 12 multiprocessors, 315 with 78."""


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
        one["mode"]["sharing"] == "apart" or (one["control"] and one["control"]["running"])
        for one in status["instances"]
    )


def _known(agent: Agent, uid: int) -> bool:
    with contextlib.suppress(StageError):
        return limit_of(agent, uid) > 0
    return False


class Limits:
    """What each user's clients are to have, by the policy and by what the agent says that it makes of it."""

    def __init__(self, stage: Stage, agent: Agent, percents: dict[int, float]) -> None:
        stage.until(lambda: _known(agent, next(iter(percents))), "the agent knows the GPU's memory")
        self.right = {
            uid: (multiprocessors_for_percent(percent, stage.machine.multiprocessors), limit_of(agent, uid))
            for uid, percent in percents.items()
        }
        self.seen: dict[int, list[tuple[int, int]]] = {uid: [] for uid in percents}
        self.exact = 0
        self.wrong: list[str] = []

    def judge(self, client: Client, rc: int | None = 0) -> bool:
        """Whether a client had its own limits exactly, as it says itself, and ended as it should."""
        sms, limit = self.right[client.uid]
        got = client.seen()
        good = client.rc == rc and got is not None and got[0] == sms and limit - OVERHEAD <= got[1] < limit
        if got is not None:
            self.seen[client.uid].append(got)
        self.exact += good
        if not good:
            said = client.started.err.read_text(errors="replace")[-200:]
            self.wrong.append(f"client of {client.uid}, rc {client.rc}, wanted {sms}, {limit}: {client.text()} {said}")
        return good

    def row(self, uid: int) -> list[object]:
        """Clients, multiprocessors that they saw, those that are right, free memory that they saw, the limit."""
        sms, limit = self.right[uid]
        counts = sorted({one[0] for one in self.seen[uid]})
        free = [one[1] for one in self.seen[uid]] or [0]
        span = f"{min(free)}" if min(free) == max(free) else f"{min(free)} to {max(free)}"
        return [len(self.seen[uid]), ", ".join(map(str, counts)), sms, span, limit]


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


def reasons(agent: Agent) -> list[tuple[int, str]]:
    return [(one["uid"], one["reason"]) for one in agent.api.get("/v1/queue")["queue"]]


def rows_of(agent: Agent) -> list[Json]:
    return list(agent.api.get("/v1/clients")["clients"])


def shuffled(draw: random.Random, clients: list[int]) -> list[int]:
    draw.shuffle(clients)
    return clients


def times(values: Iterable[float]) -> str:
    found = sorted(values)
    return f"{found[len(found) // 2]:.2f} ({found[0]:.2f} to {found[-1]:.2f})" if found else "none"


class Clock:
    """Whether there is time for another round."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() > self._end
