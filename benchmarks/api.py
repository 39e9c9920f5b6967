"""The API under load: the status page of a busy node, and streams of events, from processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure
from benchmarks.place import ALICE, BOB, CAROL, DAVE, ERIN, stage, timed
from demo.stage import until
from mpsagent.sim.cli import interpreter

CLIENTS, WAITING = 48, 20
CONNECTIONS = 8
STREAMS, RATE = 200, 100
FLOODERS = (BOB, CAROL, DAVE, ERIN)
LOAD = str(Path(__file__).with_name("load.py"))


def requests(quick: bool) -> list[Figure]:
    """/v1/status with 48 clients and 20 waiting, by turns with a bare aiohttp; and what programs for people take."""
    seconds, rounds = (1, 2) if quick else (3, 4)
    with stage() as node, tempfile.TemporaryDirectory(prefix="mpsagent-bench-") as name:
        node.start_agent()
        node.open()
        working = [node.client(ALICE, "sleep", "600") for _ in range(CLIENTS)]
        for client in working:
            client.saw("^sms")
        for _ in range(WAITING):
            node.client(BOB, "query")
        until("20 clients wait", lambda: node.ask("/v1/status")["waiting_processes"] == WAITING)
        hello, ours, bare = f"{name}/hello", [], []
        with serving("hello", hello):
            for _ in range(rounds):
                bare.append(load("requests", hello, "/", CONNECTIONS, seconds))
                ours.append(load("requests", node.socket, "/v1/status", CONNECTIONS, seconds))
        rate, plain = (statistics.median(one["rate"] for one in them) for them in (ours, bare))
        late, plain_late = (max(one["p99"] for one in them) * 1000 for them in (ours, bare))
        page = len(json.dumps(node.ask("/v1/status")))
        return [
            Figure(f"/v1/status with {CLIENTS} clients and {WAITING} waiting, {CONNECTIONS} connections",
                   f"{rate:,.0f} a second, p99 {late:.1f} ms", "half of a bare aiohttp", rate >= plain / 2,
                   f'a bare aiohttp that says "hello": {plain:,.0f} a second, p99 {plain_late:.1f} ms; '
                   f"{rate / plain:.2f} of it, with {page:,} bytes a page"),
            *_programs(node.socket, 5 if quick else 20),
        ]  # fmt: skip


def _programs(socket: str, rounds: int) -> list[Figure]:
    """`mpsagent-cli status` and `top` (one page, into a pipe), by turns with a bare interpreter. All with bytecode on
    disk, as the packages have it."""
    program = str(Path(sys.executable).parent / "mpsagent-cli")
    commands = {
        "pass": [sys.executable, "-c", "pass"],
        "status": [program, "status"],  # as people type it: with options it loads click, too
        "top": [program, "top"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="mpsagent-bench-") as bytecode:
        environment = {**os.environ, "MPSAGENT_SOCKET": socket}
        environment |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": bytecode}
        for again in range(rounds + 1):
            for name, command in commands.items():
                seconds = timed(command, environment)
                if again:  # the first has written it
                    times[name].append(seconds)
    took = {name: statistics.median(found) for name, found in times.items()}
    return [
        Figure(f"mpsagent-cli {name} with {CLIENTS} clients and {WAITING} waiting, median of {rounds}",
               f"{took[name] * 1000:.0f} ms", "3 times python3 -c pass", took[name] <= 3 * took["pass"],
               f"python3 -c pass: {took['pass'] * 1000:.0f} ms, {took[name] / took['pass']:.1f} times")
        for name in ("status", "top")
    ]  # fmt: skip


def streams(quick: bool) -> list[Figure]:
    """200 readers of 100 events a second: one user's, which the usual bounds would not let in, as root."""
    seconds = 3 if quick else 15
    target, found = "/v1/events?follow=1", []
    for count in (STREAMS, 1):
        with tempfile.TemporaryDirectory(prefix="mpsagent-bench-") as name:
            socket = f"{name}/socket"
            with serving("events", socket, RATE):
                found.append(load("streams", socket, target, count, seconds))
    many, one = found
    missing = 1 - many["count"] / (STREAMS * RATE * seconds)
    return [
        Figure(f"{STREAMS} streams of {RATE} events a second: from an event to its line, p50, p99",
               f"{many['p50'] * 1000:.1f} ms, {many['p99'] * 1000:.1f} ms", "p99 under 50 ms", many["p99"] < 0.05,
               f"one stream: {one['p50'] * 1000:.1f} ms, {one['p99'] * 1000:.1f} ms; {many['rate']:,.0f} lines a "
               f"second, {max(0.0, missing) * 100:.1f} % not there in time; as root; events of a timer, no agent")
    ]  # fmt: skip


def floods(quick: bool) -> list[Figure]:
    """Root's questions while four users ask for all that they can get, under the bounds as they are. No aim: whoever
    floods the api slows its readers, and nobody else (see flooded)."""
    seconds, beside, alone = (2 if quick else 8), [], []
    with tempfile.TemporaryDirectory(prefix="mpsagent-bench-") as name:
        Path(name).chmod(0o755)
        socket = f"{name}/api"
        with serving("events", socket, 20, "bounded"):
            for _ in range(1 if quick else 3):
                alone.append(load("requests", socket, "/v1/status", 1, seconds))
                with flooding(Path(name), socket) as came:
                    beside.append(load("requests", socket, "/v1/status", 1, seconds))
    late, quiet = (statistics.median(one["p99"] for one in them) for them in (beside, alone))
    return [
        Figure(f"root's /v1/status beside {len(FLOODERS)} users who ask for 1,000 events in 32 loops, p50, p99",
               f"{statistics.median(one['p50'] for one in beside) * 1000:.1f} ms, {late * 1000:.1f} ms",
               "", None,
               f"without them: p99 {quiet * 1000:.1f} ms; {sum(came) / 1e6:,.0f} MB to them the last time; no agent")
    ]  # fmt: skip


@contextmanager
def flooding(place: Path, socket: str) -> Iterator[list[int]]:
    """Users at full speed; the list has at the end how many bytes came to each."""
    script, came = place / "flood.py", list[int]()
    shutil.copyfile(Path(__file__).with_name("flood.py"), script)
    users = [
        subprocess.Popen([interpreter(), "-IS", str(script), socket], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True, user=uid, group=uid, extra_groups=[], cwd="/", env={})
        for uid in FLOODERS
    ]  # fmt: skip
    try:
        for one in users:
            assert one.stdout is not None
            if one.stdout.readline() != "on\n":
                raise RuntimeError("a user did not start")
        yield came
        came += [int(one.communicate(timeout=60)[0]) for one in users]
    finally:
        for one in users:
            one.kill()
            one.wait()


@contextmanager
def serving(*words: object) -> Iterator[None]:
    """A server of load.py."""
    process = subprocess.Popen([sys.executable, LOAD, *map(str, words)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"{words} did not start")
        yield
    finally:
        process.kill()
        process.communicate()


def load(*words: object) -> Any:
    done = subprocess.run([sys.executable, LOAD, *map(str, words)], stdout=subprocess.PIPE, check=True, timeout=300)
    return json.loads(done.stdout)
