#!/usr/bin/env python3
"""How long many CUDA contexts take that are made at once under one server of a real MPS, and does that end in a fault?

    contexts_at_once.py [--out DIR] [--seconds 150] [--rounds 8]

Root, a GPU, a driver that knows --multiuser-server. MPS alone, without mpsagent. Prints `ANSWER` lines and writes
everything to DIR/contexts-at-once.txt ($OUT if that is set). Nothing that it started is left behind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance.backends import real_backend
from tests.gpu.rendezvous_bench import Bench, Daemon, Output

UID = 20001
CONTEXT = re.compile(r"^\[ *([\d.]+) pid \d+ uid \d+\] ctx (\w+)", re.MULTILINE)
INIT = re.compile(r"^\[ *([\d.]+) pid \d+ uid \d+\] cuInit (\w+)", re.MULTILINE)
FATAL = "encountered a fatal GPU error"


def crowd(bench: Bench, daemon: Daemon, count: int, gap: float, name: str) -> int:
    """`count` clients, `gap` seconds between their starts; returns how many faults there were."""
    began = time.monotonic()
    clients: list[tuple[float, Output]] = []
    for number in range(count):
        while time.monotonic() < began + number * gap:
            time.sleep(0.001)
        clients.append((time.monotonic() - began, bench.client(daemon, UID, "work", 1)))
    rcs = Counter(client.ended(60) for _, client in clients)
    seconds = time.monotonic() - began
    made, own, errors = [], [], Counter[str]()
    for started, client in clients:
        text = client.text()
        init, context = INIT.search(text), CONTEXT.search(text)
        if context and context[2] == "CUDA_SUCCESS" and init:
            made.append(started + float(context[1]))
            own.append(float(context[1]) - float(init[1]))
        else:
            errors[context[2] if context else init[2] if init else "silent"] += 1
    lines = daemon.news("server")
    faults = [line for line in lines if FATAL in line]
    if made:
        made.sort()
        own.sort()
        figures = (
            f"contexts made: first after {made[0]:.2f} s, median {made[len(made) // 2]:.2f}, last {made[-1]:.2f}; "
            f"one takes {own[0]:.2f} to {own[-1]:.2f} s, median {own[len(own) // 2]:.2f}"
        )
    else:
        figures = "no context was made"
    bench.say(
        f"ANSWER {name}: {count} clients, gap {gap:g} s: {figures}; all ended after {seconds:.2f} s; rc {dict(rcs)}, "
        f"errors {dict(errors)}, faults {len(faults)}"
    )
    for line in faults:
        bench.say(f"   {line}")
    if faults:
        for _, client in clients[:50]:
            bench.say(f"   pid {client.pid}: {client.short()[-200:]}")
        first = next(n for n, line in enumerate(lines) if FATAL in line)
        for line in lines[max(0, first - 60) : first + 10]:
            bench.say(f"      server.log| {line}")
    return len(faults)


def cut_short(bench: Bench, daemon: Daemon, way: str, name: str) -> int:
    """46 clients at once that are ended while they make their contexts, as the end of a turn does, and then 46 that are
    left alone; returns how many faults there were. `way`: kill, or terminate (`terminate_client`)."""
    first = [bench.client(daemon, UID, "sleep", 60) for _ in range(46)]
    time.sleep(3.0)
    servers = daemon.servers()
    for client in first:
        if way == "kill":
            client.kill()
            time.sleep(0.025)
        else:
            daemon.ctl(f"terminate_client {servers[-1]} {client.pid}", timeout=2.0)
    for client in first:
        client.kill()
        client.ended(5)
    before = sum(FATAL in line for line in daemon.news("server"))
    if before:
        bench.say(f"   {name}: {before} faults while they were ended")
    return before + crowd(bench, daemon, 46, 0, f"{name}, the next ones")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.environ.get("OUT", ""))
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--endings", action="store_true", help="only: clients are ended while they make contexts")
    options = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="mpsp", dir="/tmp"))
    place.chmod(0o755)
    backend = real_backend(place)
    bench = Bench(backend.control, backend.client, {**backend.environment, "SAY_MPS": "1"}, None, options.seconds)
    if options.out:
        bench.transcript = (Path(options.out) / "contexts-at-once.txt").open("w")
    try:
        daemon = Daemon(bench, "--multiuser-server")
        daemon.public = daemon.pipe
        crowd(bench, daemon, 1, 0, "first, starts the server")
        keeper = bench.client(daemon, UID, "sleep", 600)
        keeper.said(r"\] sms ", 20)
        if options.endings:
            faults = rounds = 0
            while rounds < options.rounds and time.monotonic() < bench.deadline:
                rounds += 1
                faults += cut_short(bench, daemon, ("kill", "terminate")[rounds % 2], f"round {rounds}")
                if keeper.process.poll() is not None or "CUDA_ERROR" in keeper.text():
                    keeper.kill()
                    keeper = bench.client(daemon, UID, "sleep", 600)
                    keeper.said(r"\] sms ", 20)
            bench.say(f"ANSWER all: {faults} faults in {rounds} rounds of 46 ended clients and 46 others")
            return 0
        for name, percent, size in (("no limits", "100", "0"), ("9 %, 964M", "9", "964M"), ("45 %, 14 G", "45", "14G")):
            if size != "0":
                daemon.limits(percent, size)
            for count in (1, 2, 4, 8, 16, 32, 46):
                if time.monotonic() < bench.deadline:
                    crowd(bench, daemon, count, 0, name)
            for gap in (0.05, 0.1, 0.2):
                if time.monotonic() < bench.deadline:
                    crowd(bench, daemon, 46, gap, name)
        faults = rounds = 0
        while rounds < options.rounds and time.monotonic() < bench.deadline:
            rounds += 1
            percent, size = (("9", "964M"), ("45", "14G"))[rounds % 2]
            daemon.limits(percent, size)
            faults += crowd(bench, daemon, 46, 0, f"round {rounds}, {percent} %")
            if keeper.process.poll() is not None or "CUDA_ERROR" in keeper.text():
                keeper.kill()
                keeper = bench.client(daemon, UID, "sleep", 600)
                keeper.said(r"\] sms ", 20)
        bench.say(f"ANSWER all: {faults} faults in {rounds} rounds")
    finally:
        bench.end()
        shutil.rmtree(place, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
