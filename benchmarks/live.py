"""The agent beside the simulator: arming, memory, CPU time, its own noise in the log, gaps, start."""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, percentile
from demo.stage import Client, Stage, until

ALICE, BOB, CAROL = 20001, 20002, 20003
POLICY = """\
[limits]
threads = 10
memory = "1G"
[user.20001]
threads = 60
memory = "20G"
[user.20002]
threads = 30
memory = "10G"
[user.20003]
threads = 20
memory = "2G"
[agent]
on_stop = "{on_stop}"
"""
BATCH = "set_default_active_thread_percentage 60\nset_default_device_pinned_mem_limit 0 20480M\n" \
        "get_default_active_thread_percentage\nget_default_device_pinned_mem_limit 0"  # fmt: skip


def stage(on_stop: str = "quit") -> Stage:
    return Stage(POLICY.format(on_stop=on_stop))


@contextmanager
def busy_cores() -> Iterator[None]:
    """As many endless loops as there are cores."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["at"]).timestamp()


# --- arming -----------------------------------------------------------------------------------------------------------


def arming(quick: bool) -> list[Figure]:
    """From the time that MPS wrote beside ``push client to pending list`` to the limits set and read back."""
    found = []
    for name, load in (("idle", None), ("all cores busy", busy_cores)):
        with stage() as node:
            node.start_agent()
            node.open_door()
            if load is None:
                reactions, bare = _switches(node, 10 if quick else 60)
            else:
                with load():
                    reactions, bare = _switches(node, 10 if quick else 60)
        alone = statistics.median(bare) * 1000
        found += [
            Figure(f"pending line to limits set, {name}: p50, p99 of {len(reactions)}", _two([r for r, _ in reactions]),
                   "", None, f"the simulator's front-end alone, same batch: {alone:.1f} ms (NVIDIA's: 1.5 ms)"),
            Figure(f"… without the front-end's run, {name}", _two([r - run for r, run in reactions]),
                   "p99 under 8.5 ms (10 with NVIDIA's)", percentile([r - run for r, run in reactions], 0.99) < 0.0085,
                   "the log's own times have a resolution of 1 ms"),
        ]  # fmt: skip
    return found


def _two(seconds: Sequence[float]) -> str:
    return f"{percentile(seconds, 0.5) * 1000:.1f} ms, {percentile(seconds, 0.99) * 1000:.1f} ms"


def _switches(node: Stage, count: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Changes of user one after the other: (from pending line to limits set, of that the front-end's run); between them
    bare runs of the front-end with the same batch."""
    reactions: list[tuple[float, float]] = []
    bare, cursor = [], node.ask("/v1/status")["history"]["newest"]
    for number in range(count):
        uid = (ALICE, BOB, CAROL)[number % 3]
        client = node.client(uid, "query")
        client.saw("^ctx")
        client.wait()
        events = node.events(cursor)
        cursor = events[-1]["cursor"]
        waited = next(_at(e) for e in events if e["kind"] == "client.waiting" and e["uid"] == uid)
        armed = next(e for e in events if e["kind"] == "action.done" and e["action"] == "SetDefaults"
                     and e.get("uid") == uid and e["ok"])  # fmt: skip
        run = re.search(r"in ([\d.]+) ms", armed["text"])
        reactions.append((_at(armed) - waited, float(run[1]) / 1000 if run else 0.0))
        time.sleep(0.1)
        began = time.perf_counter()
        node.command(BATCH.replace("60", "10").replace("20480M", "2048M"))
        bare.append(time.perf_counter() - began)
    return reactions, bare


# --- memory, CPU time, noise ------------------------------------------------------------------------------------------


def _rss(pid: int) -> int:
    """KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))


def _cpu(pid: int) -> float:
    """Seconds of CPU time, children that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _bare_rss() -> int:
    code = "import asyncio, aiohttp\nprint(next(l.split()[1] for l in open('/proc/self/status') if 'VmRSS' in l))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def at_rest(quick: bool) -> list[Figure]:
    """One agent with nobody there and one with 48 clients that sleep, in the same minute."""
    seconds = 15 if quick else 125  # longer than between two comparisons with MPS's own answers
    with stage() as empty, stage() as full:
        for node in (empty, full):
            node.start_agent()
            node.open_door()
        pids = [node.agent.pid for node in (empty, full) if node.agent is not None]
        clients = [full.client(ALICE, "sleep", "600") for _ in range(48)]
        for client in clients:
            client.saw("^sms")
        until("48 clients", lambda: full.ask("/v1/status")["clients"] == 48)
        time.sleep(3)
        lines, cpu, began = _lines(empty), [_cpu(pid) for pid in pids], time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        shares = [(_cpu(pid) - before) / took * 100 for pid, before in zip(pids, cpu, strict=True)]
        caused = (_lines(empty) - lines) / took * 60
        rss, bare = _rss(pids[1]), _bare_rss()
        return [
            Figure("resident memory of the agent with 48 clients", f"{rss / 1024:.1f} MiB", "under 60 MB",
                   rss * 1024 < 60e6, f"python, asyncio and aiohttp: {bare / 1024:.1f} MiB, {rss / bare:.2f} times"),
            Figure(f"CPU while idle, of a core, over {took:.0f} s", f"{shares[0]:.2f} %", "under 0.2 %",
                   shares[0] < 0.2, f"the same with 48 sleeping clients: {shares[1]:.2f} %"),
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
        ours.append(_timed([str(program), "--socket", node.socket, "status"]))
        bare.append(_timed([sys.executable, "-c", "pass"]))
    ratio = statistics.median(ours) / statistics.median(bare)
    return [
        Figure("mpsagent-cli status, median of 20", f"{statistics.median(ours) * 1000:.0f} ms",
               "under 5 times python3 -c pass", ratio < 5,
               f"python3 -c pass: {statistics.median(bare) * 1000:.0f} ms, {ratio:.1f} times")
    ]  # fmt: skip


def _timed(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - began


# --- the gap between two users ----------------------------------------------------------------------------------------


def gaps(quick: bool) -> list[Figure]:
    """From the last exit of A, who has worked so long, to B's first finished query; B came half a second after A."""
    held, rounds = ((1, 3), 1) if quick else ((3, 6, 10), 3)
    found = []
    with stage() as on, stage() as off:
        on.start_agent()
        on.open_door()
        off.start_control()
        nodes = {"agent on": on, "agent off": off}
        immediate = [_at_once(on) for _ in range(3)]
        for seconds in held:
            measured: dict[str, list[float]] = {name: [] for name in nodes}
            for _ in range(rounds):
                pairs = {name: _contest(node, seconds) for name, node in nodes.items()}
                for name, (first, second) in pairs.items():
                    second.wait(120)
                    measured[name].append((second.ended or 0) - (first.ended or 0))
            with_it, without = (statistics.median(measured[name]) for name in ("agent on", "agent off"))
            now = statistics.median(immediate)
            found.append(
                Figure(f"gap after A worked {seconds} s, median of {rounds}", f"{with_it:.2f} s",
                       "within 0.15 s of an immediate change", with_it - now < 0.15,
                       f"agent off: {without:.2f} s, {without / with_it:.1f} times; an immediate change: {now:.2f} s")
            )  # fmt: skip
    return found


def _contest(node: Stage, seconds: int) -> tuple[Client, Client]:
    first = node.client(ALICE, "sleep", str(seconds))
    first.saw("^ctx")
    time.sleep(0.5)
    return first, node.client(BOB, "query")


def _at_once(node: Stage) -> float:
    """A has a server and no client when B comes."""
    first = node.client(ALICE, "sleep", "1")
    first.wait()
    time.sleep(0.5)
    second = node.client(BOB, "query")
    second.wait()
    return (second.ended or 0) - second.began


# --- starting ---------------------------------------------------------------------------------------------------------


def starting(quick: bool) -> list[Figure]:
    """A control daemon that runs already, 48 clients, and since they came a long control.log: as polling leaves it, and
    as polling and short clients do."""
    size, found = 20_000_000 if quick else 100_000_000, []
    for name, short in (("polled", False), ("polled, and short clients", True)):
        with stage(on_stop="leave") as node:
            node.start_control()
            small = min(_ready(node) for _ in range(3))
            clients = [node.client(ALICE, "sleep", "600") for _ in range(48)]
            for client in clients:
                client.saw("^sms")
            _fill(node, size, short)
            big = min(_ready(node, keep=attempt == 2) for attempt in range(3))
            seen = node.ask("/v1/status")["clients"]
            copied = min(_timed(["cp", str(node.logs / "control.log"), "/dev/null"]) for _ in range(3))
        found.append(
            Figure(f"start to READY, 48 clients, {size // 1_000_000} MB of control.log ({name}), best of 3",
                   f"{big:.2f} s", "under 1 s", big < 1, f"without them: {small:.2f} s, {big / small:.1f} times; "
                   f"reading the log: {copied:.2f} s; clients found: {seen}")
        )  # fmt: skip
    return found


def _ready(node: Stage, *, keep: bool = False) -> float:
    """Seconds from starting the agent to its READY=1. It is stopped again unless it is to be kept."""
    path = str(node.directory / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(path)
        notify.settimeout(60)
        began = time.perf_counter()
        node.start_agent(notify=path, wait=False)
        while b"READY=1" not in notify.recv(4096):
            pass
        took = time.perf_counter() - began
    Path(path).unlink()
    if not keep:
        node.stop_agent()
    return took


def _fill(node: Stage, size: int, short: bool) -> None:
    """Append what a day of polling (five lines a time) and of short clients writes."""
    pid = node.control_pid()
    head = f"[{datetime.now():%Y-%m-%d %H:%M:%S}.000 Control {pid:5}] "
    poll = ["Accepting connection...", "NEW UI", "Cmd:get_server_list", "4242", "UI closed"]
    written, first = 0, 100_000
    with (node.logs / "control.log").open("ab") as log:
        while written < size:
            block = []
            for client in range(first, first + 1000):  # each has a pid of its own
                admitted = ["Accepting connection...", f"NEW CLIENT {client} from user {ALICE}: Server already exists"]
                block += [*poll, *(["User did not send valid credentials", *admitted, *admitted] if short else [])]
            first += 1000
            written += log.write("".join(head + line + "\n" for line in block).encode())


MEASURES: Sequence[Any] = (arming, at_rest, gaps, starting)
