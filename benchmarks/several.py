"""Agent and gate with 1, 8 and 64 instances, or users apart: what they take while nothing happens, and a hand-over
beside busy ones."""

from __future__ import annotations

import threading
import time

from benchmarks.figure import Figure, p50_p99, percentile
from benchmarks.place import ALICE, BOB, CAROL, DAVE, ERIN, Knocker, agent_and_gate, rss, shares, stage
from demo.stage import Stage

MOST_MEMORY, MOST_CPU = 80e6, 0.5
"""Bytes, and percent of a core: aims for the agent with 8 instances."""


def several(quick: bool) -> list[Figure]:
    found, one = [], (0, 0)
    seconds = 10 if quick else 60
    for count in (1, 8, 64):
        with stage(instances=count) as node:
            began = time.monotonic()
            node.start_agent()
            node.open()
            opened = time.monotonic() - began
            usage, agent, gate = _cost(node, seconds)
            if count == 1:
                one = agent, gate
            aim = count == 8
            found += [
                Figure(f"resident memory of the agent with {count} instances, all idle", f"{agent / 1024:.1f} MiB",
                       "under 80 MB" if aim else "", agent * 1024 < MOST_MEMORY if aim else None,
                       f"with 1: {one[0] / 1024:.1f} MiB; the gate: {gate / 1024:.1f} MiB, with 1 {one[1] / 1024:.1f}"),
                Figure(f"CPU of agent and gate with {count} idle instances, of a core, over {seconds} s",
                       f"{usage[0]:.2f} %, {usage[1]:.2f} %", "agent under 0.5 %" if aim else "",
                       usage[0] < MOST_CPU if aim else None, f"open {opened:.1f} s after the start"),
            ]  # fmt: skip
    return [*found, *_busy(40 if quick else 300), *apart(quick)]


def apart(quick: bool) -> list[Figure]:
    """Users with a control daemon, a server and an idle client each."""
    found = []
    seconds = 10 if quick else 60
    for count in (8,) if quick else (8, 64):
        with stage(extra=f'sharing = "per-user"\nmax_users = {count}\n') as node:
            node.start_agent()
            clients = [node.client(ALICE + number, "sleep", "600") for number in range(count)]
            for client in clients:
                client.saw("^ctx CUDA_SUCCESS", 300)
            usage, agent, gate = _cost(node, seconds)
            aim = count == 8
            found += [
                Figure(f"resident memory of the agent with {count} users apart", f"{agent / 1024:.1f} MiB",
                       "under 80 MB" if aim else "", agent * 1024 < MOST_MEMORY if aim else None,
                       f"a daemon, a server and an idle client each; the gate: {gate / 1024:.1f} MiB"),
                Figure(f"CPU of agent and gate with {count} users apart, of a core, over {seconds} s",
                       f"{usage[0]:.2f} %, {usage[1]:.2f} %", "agent under 0.5 %" if aim else "",
                       usage[0] < MOST_CPU if aim else None, "clients at work, which do nothing"),
            ]  # fmt: skip
    return found


def _cost(node: Stage, seconds: int) -> tuple[list[float], int, int]:
    """Percent of a core of agent and gate over so long; KiB of the agent and of the gate."""
    pids = agent_and_gate(node)
    time.sleep(3)
    usage = shares(pids, seconds)
    agent, gate = map(rss, pids)
    return usage, agent, gate


def _busy(count: int) -> list[Figure]:
    """Four users knock without a pause at instances of their own beside the one that is measured."""
    with stage(server="shared", instances=8) as node:
        node.start_agent()
        node.open()
        stay = [node.client(uid, "sleep", "600") for uid in (ALICE, BOB, CAROL, DAVE, ERIN)]
        for client in stay:
            client.saw("^ctx")
        mine = Knocker(node, ALICE)
        alone = _knocks(mine, count)
        over = threading.Event()
        others = [threading.Thread(target=_until, args=(Knocker(node, one.uid), over)) for one in stay[1:]]
        for other in others:
            other.start()
        beside = _knocks(mine, count)
        over.set()
        for other in others:
            other.join()
    middle = percentile(beside, 0.5) / percentile(alone, 0.5)
    return [
        Figure(f"hand-over with 8 instances, 4 others handing over all the time: p50, p99 of {count}", p50_p99(beside),
               "", None, f"the others idle: {p50_p99(alone)}; p50 {middle:.1f} times")
    ]  # fmt: skip


def _knocks(mine: Knocker, count: int) -> list[float]:
    return [mine.knock() for _ in range(count)]


def _until(other: Knocker, over: threading.Event) -> None:
    while not over.is_set():
        other.knock()
