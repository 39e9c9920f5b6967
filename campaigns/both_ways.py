#!/usr/bin/env python3
"""The same questions to one control daemon, by NVIDIA's front-end and by mpsagent's own: are the answers equal, to the
byte, and the lines that the daemon writes about them; and what does one cost.

    campaigns/both_ways.py [--out DIR] [--times 100]

Root, a GPU; NVIDIA's programs on PATH. Starts a control daemon of its own, with a server, and ends both. Prints a line
for each question and writes it to DIR/both-ways.txt ($OUT). Exit status: how many differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpsagent.system.frontend import AnswerStatus, FrontEndQueue

PROGRAM = "nvidia-cuda-mps-control"


def by_program(environment: Mapping[str, str], commands: Sequence[str]) -> tuple[int, str]:
    """Exit status and what it printed; 1 and nothing where another front-end is just leaving."""
    text = "".join(f"{command}\n" for command in commands)
    done = subprocess.run([PROGRAM], env=environment, input=text, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def by_ours(
    environment: Mapping[str, str], commands: Sequence[str], deadline: float = 60.0
) -> tuple[AnswerStatus, str]:
    async def ask() -> tuple[AnswerStatus, str]:
        front = FrontEndQueue(PROGRAM, environment)
        reply = await front.run(commands, deadline=deadline)
        while reply.status is AnswerStatus.BUSY:
            reply = await front.run(commands, deadline=deadline)
        front.close()
        return reply.status, reply.out

    return asyncio.run(ask())


def questions(server: int = 99999) -> list[list[str]]:
    """What the agent asks, what it never would, and refusals. Asked twice, each is answered the same."""
    s = str(server)
    limits = ["set_default_active_thread_percentage 12.75", "set_default_device_pinned_mem_limit 0 20389M"]
    back = ["get_default_active_thread_percentage", "get_default_device_pinned_mem_limit 0"]
    ours = [f"get_active_thread_percentage {s}", f"get_device_pinned_mem_limit {s} 0"]
    return [
        ["get_server_list"],
        [f"get_server_status {s}", f"get_client_list {s}"],
        ["get_server_status 99998", "get_client_list 99998"],
        [*limits, *back],
        [f"set_active_thread_percentage {s} 20", f"set_device_pinned_mem_limit {s} 0 2G", *ours],
        ["set_default_active_thread_percentage 101", "set_default_device_pinned_mem_limit 0 1X", *back],
        ["set_default_device_pinned_mem_limit 0 0G", "set_default_active_thread_percentage 100", *back],
        [f"terminate_client {s} 1"],
        ["terminate_client 99998 1"],
        ["shutdown_server 99998"],
        ["start_server"],
        ["ps"],
        ["get_device_client_list"],
        ["no_such_command", "get_default_active_thread_percentage x"],
        ["  get_server_list  ", "get_default_active_thread_percentage"],
    ]  # fmt: skip


def said(log: Path, begin: int) -> list[str]:
    """What the daemon has written since, without heads."""
    lines = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    return [re.sub(r"^\[[^]]*\] ", "", line) for line in lines]


def settled(log: Path) -> int:
    """Its size, when nothing has come for a moment: the daemon writes of a session's end after it."""
    size = -1
    while size != (size := log.stat().st_size):
        time.sleep(0.05)
    return size


def compare(environment: Mapping[str, str], commands: Sequence[str]) -> tuple[bool, str]:
    log = Path(environment["CUDA_MPS_LOG_DIRECTORY"], "control.log")
    by_program(environment, commands)  # what it sets is so before both
    before = settled(log)
    code, printed = by_program(environment, commands)
    between = settled(log)
    status, answered = by_ours(environment, commands)
    settled(log)
    theirs, ours = said(log, before)[: len(said(log, before)) - len(said(log, between))], said(log, between)
    equal = (code, printed, theirs) == (0, answered, ours) and status is AnswerStatus.ANSWERED
    return equal, f"{'equal' if equal else 'DIFFERENT'}  {'; '.join(commands)}  {answered!r}" + (
        "" if equal else f" not {printed!r} ({code}, {status}); log {ours} not {theirs}"
    )


def cost(environment: Mapping[str, str], times: int) -> str:
    """Seconds for one question, by turns in one run; the program as the agent started it, with posix_spawn."""
    from mpsagent.system.spawn import find_program, run_program

    commands, path = ["get_server_list", "get_default_active_thread_percentage"], find_program(PROGRAM, environment)
    assert path is not None
    took: dict[str, list[float]] = {"program": [], "own": []}
    cpu = {"program": 0.0, "own": 0.0}

    def spent() -> float:
        t = os.times()
        return t.user + t.system + t.children_user + t.children_system

    async def run() -> None:
        front = FrontEndQueue(PROGRAM, environment)
        feed = "".join(f"{command}\n" for command in commands).encode()
        for _ in range(times):
            for way in took:
                used, began = spent(), time.perf_counter()
                if way == "own":
                    while not (await front.run(commands)).ok:
                        began = time.perf_counter()
                else:
                    while (await run_program([path], environment, feed=feed, deadline=60)).out == "":
                        began = time.perf_counter()
                took[way].append(time.perf_counter() - began)
                await asyncio.sleep(0.005)
                cpu[way] += spent() - used
        front.close()

    asyncio.run(run())
    p50 = {way: sorted(one)[len(one) // 2] * 1000 for way, one in took.items()}
    each = "; ".join(
        f"{way}: p50 {p50[way]:.2f} ms, p99 {sorted(one)[len(one) * 99 // 100] * 1000:.2f} ms, "
        f"processor {cpu[way] / times * 1000:.2f} ms"
        for way, one in took.items()
    )
    return f"one question, {times} times by turns: {each}; p50 {p50['program'] / p50['own']:.1f} times"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--times", type=int, default=100)
    asked = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory(prefix="mps") as place:
        environment = {**os.environ, "TZ": "UTC", "CUDA_MPS_PIPE_DIRECTORY": place, "CUDA_MPS_LOG_DIRECTORY": place}
        subprocess.run([PROGRAM, "-d"], env=environment, check=True, timeout=60)
        try:
            say(f"start_server: {by_ours(environment, ['start_server -uid 0'])}")
            server, end = "", time.monotonic() + 30
            while not server.strip() and time.monotonic() < end:
                server = by_ours(environment, ["get_server_list"])[1]
                time.sleep(0.2)
            different = 0
            for commands in questions(int(server.split()[0]) if server.strip() else 99999):
                equal, line = compare(environment, commands)
                different += not equal
                say(line)
            say(cost(environment, asked.times))
            say(f"shutdown_server: {by_ours(environment, [f'shutdown_server {server.strip()}'])}")
        finally:
            say(f"quit: {by_ours(environment, ['quit -t 5'])}, then {by_ours(environment, ['ps'])}")
            Path(asked.out, "both-ways.txt").write_text("\n".join(lines) + "\n")
    return different


if __name__ == "__main__":
    sys.exit(main())
