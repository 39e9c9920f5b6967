"""Launchers: a process that has called cuInit and makes no context, such as torchrun or a `multiprocessing` parent.

It is a client of MPS for its whole life, with 0 MiB (seen with torchrun of PyTorch 2.11 on an H100). It takes no share
of what its ranks need.
"""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest

from tests.agent.stage import A, Agent, Client, Stage

SHARING = {
    "apart": 'sharing = "per-user"\n',
    "together": 'sharing = "one-server"\nserver_scope = "all"\n',
    "turns": 'sharing = "turns"\nserver_scope = "user"\n',
}
LIMITS = {
    "max_clients": ("[limits]\nactive_threads = '30%'\nmax_clients = {ranks}\n", 2),
    "max_contexts": ("[limits]\nactive_threads = '30%'\nmax_contexts = {ranks}\n", 2),
    "total_threads": ("[limits]\nactive_threads = '50%'\ntotal_active_threads = '100%'\n", 2),
    "total_memory": ('[limits]\nactive_threads = "50%"\nmemory_limit = "20G"\ntotal_memory_limit = "40G"\n', 2),
    "one rank": ("[limits]\nactive_threads = '30%'\ntotal_active_threads = '30%'\n", 1),
}


def ranks_of(launcher: Client, count: int) -> list[int]:
    assert launcher.saw(r"\] ranks "), launcher.text()
    found = re.search(r"\] ranks ([\d ]+)", launcher.text())
    assert found is not None
    pids = [int(word) for word in found[1].split()]
    assert len(pids) == count
    return pids


def contexts(agent: Agent) -> dict[int, int]:
    """Contexts by process, of those that passed the gate."""
    rows = agent.api.get("/v1/clients")["clients"]
    return {one["pid"]: one["contexts"] for one in rows if one["state"] != "waiting"}


def all_work(stage: Stage, agent: Agent, pids: list[int]) -> None:
    stage.until(lambda: all(contexts(agent).get(pid) == 1 for pid in pids), f"all ranks have their contexts: {pids}")


def row(agent: Agent) -> dict[str, Any]:
    """What the queue says of the only user."""
    rows = agent.api.get("/v1/queue")["queue"]
    return dict(rows[0]) if rows else {}


def still_waits(stage: Stage, agent: Agent) -> None:
    stage.until(lambda: "has no context yet" in str(row(agent)), "the launcher's first context waits, and this is said")


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("sharing", SHARING)
def test_a_launcher_takes_no_share_of_its_user(stage: Stage, sharing: str, limits: str) -> None:
    text, count = LIMITS[limits]
    agent = stage.with_agent(text.format(ranks=count), extra=SHARING[sharing])
    launcher = stage.client(A, "launch", count, 600)
    ranks = ranks_of(launcher, count)
    all_work(stage, agent, ranks)
    assert contexts(agent)[launcher.pid] == 0


@pytest.mark.parametrize("sharing", ["apart", "together"])
def test_a_launcher_takes_no_share_of_its_job(stage: Stage, sharing: str) -> None:
    """As a Slurm job gets it by default: the share of exactly one process."""
    agent = stage.with_agent("[limits]\nactive_threads = '50%'\n", extra=SHARING[sharing])
    lease = {
        "uid": A,
        "active_threads": "30%",
        "total_active_threads": "30%",
        "max_clients": 1,
        "until": "10m",
        "name": "job",
    }
    assert agent.api.order("lease", **lease)[0] == 200
    launcher = stage.client(A, "launch", 1, 600)
    all_work(stage, agent, ranks_of(launcher, 1))
    other = stage.client(A, "sleep", 600)
    other.queued()
    stage.until(lambda: row(agent).get("reason") in ("max_clients", "total"), "the job has no room for another one")
    assert other.pid not in contexts(agent)


@pytest.mark.parametrize("sharing", ["apart", "together"])
def test_its_own_context_waits_for_room_and_no_total_is_exceeded(stage: Stage, sharing: str) -> None:
    """Whichever process is killed meanwhile: agent, gate, or both."""
    text = "[limits]\nactive_threads = '30%'\nmax_clients = 2\ntotal_active_threads = '60%'\n"
    agent = stage.with_agent(text, extra=SHARING[sharing])
    launcher = stage.client(A, "launch", 2, 600)
    ranks = ranks_of(launcher, 2)
    all_work(stage, agent, ranks)
    launcher.signal(signal.SIGUSR1)
    still_waits(stage, agent)
    assert str(launcher.pid) in row(agent)["why"]
    assert all(str(pid) in row(agent)["why"] for pid in ranks), "it names the processes that hold it up"
    for kill in ("gate", "agent", "both"):
        if kill != "agent":
            os.kill(stage.gate(agent), signal.SIGKILL)
        if kill != "gate":
            stage.killed(agent)
            agent = stage.again()
        still_waits(stage, agent)
        late = stage.client(A, "query")
        late.queued()
        assert {pid for pid, count in contexts(agent).items() if count} <= {*ranks}
        late.kill()
    os.kill(ranks[0], signal.SIGKILL)
    assert launcher.saw("own ctx CUDA_SUCCESS"), launcher.text()
    stage.until(lambda: contexts(agent).get(launcher.pid) == 1, "the launcher has its context")
    late = stage.client(A, "query")
    late.queued()
    stage.until(lambda: row(agent).get("reason") == "max_clients", "its context counts from now on")
