"""Agent and gate while nothing happens: memory, CPU time, lines they cause in the log; and what `status` takes."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.place import ALICE, agent_and_gate, bare_rss, rss, shares, stage, timed
from demo.stage import Stage, until

CLIENTS = 48


def at_rest(quick: bool) -> list[Figure]:
    """One agent without clients and one with 48 clients that sleep, in the same minute."""
    seconds = 10 if quick else 60
    with stage() as empty, stage() as full:
        for node in (empty, full):
            node.start_agent()
            node.open()
        clients = [full.client(ALICE, "sleep", "600") for _ in range(CLIENTS)]
        for client in clients:
            client.saw("^sms")
        until("48 clients", lambda: full.ask("/v1/status")["clients"] == CLIENTS)
        time.sleep(3)
        pids = agent_and_gate(empty) + agent_and_gate(full)
        lines, began = _lines(empty), time.monotonic()
        usage = shares(pids, seconds)
        caused = (_lines(empty) - lines) / (time.monotonic() - began) * 60
        agent, gate, bare = rss(pids[2]), rss(pids[3]), bare_rss()
        return [
            Figure("resident memory of the agent with 48 clients", f"{agent / 1024:.1f} MiB", "under 60 MB",
                   agent * 1024 < 60e6, f"python with aiohttp: {bare / 1024:.1f} MiB, {agent / bare:.2f} times"),
            Figure("resident memory of the gate with 48 clients", f"{gate / 1024:.1f} MiB", "", None,
                   f"with none: {rss(pids[1]) / 1024:.1f} MiB; python with aiohttp: {gate / bare:.2f} times"),
            Figure(f"CPU of agent and gate while idle, of a core, over {seconds} s",
                   f"{usage[0]:.2f} %, {usage[1]:.2f} %", "under 0.2 % each", max(usage[:2]) < 0.2,
                   f"the same with 48 sleeping clients: {usage[2]:.2f} %, {usage[3]:.2f} %"),
            Figure("lines caused in control.log per idle minute", f"{caused:.1f}", "5 or fewer", caused <= 5,
                   "a query each second: 300 and more"),
            *_status(full),
        ]  # fmt: skip


def _lines(node: Stage) -> int:
    return (node.logs / "control.log").read_bytes().count(b"\n")


def _status(node: Stage) -> list[Figure]:
    """`mpsagent-cli status` and a bare interpreter, by turns."""
    program = Path(sys.executable).parent / "mpsagent-cli"
    ours, bare = [], []
    for _ in range(20):
        ours.append(timed([str(program), "--socket", node.socket, "status"]))
        bare.append(timed([sys.executable, "-c", "pass"]))
    ratio = statistics.median(ours) / statistics.median(bare)
    return [
        Figure("mpsagent-cli status, median of 20", f"{statistics.median(ours) * 1000:.0f} ms",
               "under 5 times python3 -c pass", ratio < 5,
               f"python3 -c pass: {statistics.median(bare) * 1000:.0f} ms, {ratio:.1f} times")
    ]  # fmt: skip
