"""The three processes while nothing happens: memory, CPU time, lines they cause in the log."""

from __future__ import annotations

import time

from benchmarks.figure import Figure
from benchmarks.place import ALICE, agent_and_gate, api_pid, bare_rss, rss, shares, stage
from demo.stage import Stage, until

SOME, CLIENTS = 8, 48


def at_rest(quick: bool) -> list[Figure]:
    """Three agents in the same minute: without clients, with 8 and with 48 clients that sleep."""
    seconds = 10 if quick else 60
    with stage() as empty, stage() as some, stage() as full:
        for node, count in ((empty, 0), (some, SOME), (full, CLIENTS)):
            node.start_agent()
            node.open()
            for client in [node.client(ALICE, "sleep", "600") for _ in range(count)]:
                client.saw("^sms")
            until("the clients", lambda node=node, count=count: node.ask("/v1/status")["clients"] == count)  # type: ignore[misc]
        time.sleep(3)
        pids = [pid for node in (empty, some, full) for pid in (*agent_and_gate(node), api_pid(node))]
        lines, began = _lines(empty), time.monotonic()
        usage = shares(pids, seconds)
        caused = (_lines(empty) - lines) / (time.monotonic() - began) * 60
        memory, bare = [rss(pid) / 1024 for pid in pids], bare_rss() / 1024
        return [
            Figure("resident memory of agent, gate and api while idle; together", _together(memory[:3], "MiB", 1),
                   "agent under 60 MB", memory[6] * 1.048576 < 60,
                   f"with {SOME} clients: {_together(memory[3:6], 'MiB', 1)}; with {CLIENTS}: "
                   f"{_together(memory[6:], 'MiB', 1)}; python with aiohttp: {bare:.1f} MiB, the three with {SOME} "
                   f"clients are {sum(memory[3:6]) / bare:.1f} times that"),
            Figure(f"CPU of agent, gate and api while idle, of a core, over {seconds} s; together",
                   _together(usage[:3], "%", 2), "under 0.2 % each", max(usage[:3]) < 0.2,
                   f"with {SOME} sleeping clients: {_together(usage[3:6], '%', 2)}, with {CLIENTS}: "
                   f"{_together(usage[6:], '%', 2)}"),
            Figure("lines caused in control.log per idle minute", f"{caused:.1f}", "5 or fewer", caused <= 5,
                   "a query each second: 300 and more"),
        ]  # fmt: skip


def _together(values: list[float], unit: str, digits: int) -> str:
    return f"{', '.join(f'{value:.{digits}f}' for value in values)} {unit}; {sum(values):.{digits}f} {unit}"


def _lines(node: Stage) -> int:
    return (node.logs / "control.log").read_bytes().count(b"\n")
