"""Many users at once, each with a control daemon of the user's own: what the three processes need for them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.figure import Figure
from benchmarks.place import agent_and_gate, api_pid, rss, shares
from demo.stage import Stage, until

USERS, FIRST = 64, 20001
WORDS = "agent, gate and api"


def many_users(quick: bool) -> list[Figure]:
    """The default policy: one user, and as many as may have a control daemon at a time (``max_users``)."""
    seconds, most = (5, 8) if quick else (30, USERS)
    seen = []
    for count in (1, most):
        with Stage("", sharing="per-user") as node:
            node.start_agent()
            until("the gate", lambda node=node: node.ask("/v1/status")["gate"]["in_force"])  # type: ignore[misc]
            began = time.time()
            clients = [node.client(FIRST + number, "sleep", "600") for number in range(count)]
            pids = [*agent_and_gate(node), api_pid(node)]
            peak = 0
            while any(one.served() is None for one in clients) and time.time() < began + 300:
                peak = max(peak, _tasks(pids[0]))
                time.sleep(0.02)
            took = max((one.served() or float("inf")) for one in clients) - began
            time.sleep(15)  # what follows a start is over
            usage = shares(pids, seconds)
            seen.append((took, peak, usage, [rss(pid) / 1024 for pid in pids], [_files(pid) for pid in pids[:2]]))
    (alone, _, little, small, few), (took, peak, usage, memory, files) = seen
    return [
        Figure(f"resident memory of {WORDS} with {most} users at work", _row(memory, "MiB", 1), "agent under 128 MiB",
               memory[0] < 128, f"with one: {_row(small, 'MiB', 1)}"),
        Figure(f"CPU of {WORDS} with {most} users at work, of a core, over {seconds} s", _row(usage, "%", 2),
               "agent under 5 %", usage[0] < 5, f"with one: {_row(little, '%', 2)}"),
        Figure(f"open files of agent and gate with {most} users", _row(files, "", 0), "under 4096 each",
               max(files) < 4096, f"with one: {_row(few, '', 0)}"),
        Figure(f"from the start of {most} users' clients at once until all work", f"{took:.1f} s", "all",
               took < float("inf"), f"one alone: {alone:.2f} s; threads and children of the agent at most: {peak}"),
    ]  # fmt: skip


def _row(values: list[float] | list[int], unit: str, digits: int) -> str:
    return f"{', '.join(f'{value:.{digits}f}' for value in values)} {unit}".strip()


def _files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _tasks(pid: int) -> int:
    """Threads of a process and of its children, without keeper and daemons, which have units of their own."""
    found = len(os.listdir(f"/proc/{pid}/task"))
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"gate" not in command and b"-d\0" not in command:
                found += len(os.listdir(f"/proc/{child}/task"))
        except OSError:
            continue
    return found
