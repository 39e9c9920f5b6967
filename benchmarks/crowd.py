"""Two thousand clients at the gate: what they cost while they are held, and how they are served."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time

from benchmarks.figure import Figure
from benchmarks.place import ALICE, USERS, Knocker, agent_and_gate, knocking, rss, shares, stage
from demo.stage import Stage, until

PATIENCE = 100.0
"""Seconds in which all are to be served; then it is said how many were."""


def crowd(quick: bool) -> list[Figure]:
    """One user has the GPU; four others come with 500 processes each, and are served when that one has left."""
    each, seconds = (50, 5) if quick else (500, 15)
    with stage(server="shared") as node:
        node.start_agent()
        node.open()
        first = node.client(ALICE, "sleep", "600")
        first.saw("^ctx")
        one = Knocker(node, ALICE)
        usual = statistics.median(one.knock() for _ in range(40))
        pids = agent_and_gate(node)
        empty = [rss(pid) for pid in pids]
        came = [knocking(node, uid, each) for uid in USERS[1:]]
        for process in came:
            assert process.stdout is not None
            if process.stdout.readline() != b"there\n":
                raise RuntimeError("a crowd did not come about")
        total = each * len(came)
        until("all of them at the gate", lambda: _waiting(node) == total)
        time.sleep(1)
        usage = shares(pids, seconds)
        beside = statistics.median(one.knock() for _ in range(40))
        full = [rss(pid) for pid in pids]
        first.process.kill()
        first.wait()
        began = time.time()
        times = _served(came, began + PATIENCE)
    took = (max(times) - began) if times else float("inf")
    every = took / max(1, len(times))
    return [
        Figure(f"resident memory of agent and gate with {total:,} held clients",
               f"{full[0] / 1024:.1f} MiB, {full[1] / 1024:.1f} MiB", "", None,
               f"with one client at work: {empty[0] / 1024:.1f} MiB, {empty[1] / 1024:.1f} MiB"),
        Figure(f"CPU of agent and gate while {total:,} clients are held, of a core, over {seconds} s",
               f"{usage[0]:.2f} %, {usage[1]:.2f} %"),
        Figure(f"hand-over beside {total:,} held clients, p50 of 40", f"{beside * 1000:.2f} ms", "", None,
               f"without them: {usual * 1000:.2f} ms, {beside / usual:.1f} times"),
        Figure(f"until {len(times):,} of these {total:,} clients of four users are served, one after the other",
               f"{took:.1f} s", "all", len(times) == total,
               f"{every * 1000:.1f} ms each; one alone: {usual * 1000:.1f} ms, {every / usual:.1f} times"),
    ]  # fmt: skip


def _waiting(node: Stage) -> int:
    return int(node.ask("/v1/status")["waiting_processes"])


def _served(came: list[subprocess.Popen[bytes]], deadline: float) -> list[float]:
    """When each was served (time.time()), as far as they are before the deadline."""
    times: list[float] = []

    def read(process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"served "):
                times.append(float(line.split()[1]))

    readers = [threading.Thread(target=read, args=(process,), daemon=True) for process in came]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(max(0.0, deadline - time.time()))
    return list(times)
