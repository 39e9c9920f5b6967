"""The API under load: the status page of a busy node, asked for by processes of their own. See also flooded.py."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure
from benchmarks.place import ALICE, BOB, stage, timed
from demo.stage import until

CLIENTS, WAITING = 48, 20
CONNECTIONS = 8
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
        with serving(hello):
            for _ in range(rounds):
                bare.append(load(hello, "/", CONNECTIONS, seconds))
                ours.append(load(node.socket, "/v1/status", CONNECTIONS, seconds))
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


@contextmanager
def serving(socket: str) -> Iterator[None]:
    """The server of load.py."""
    process = subprocess.Popen([sys.executable, LOAD, "hello", socket], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server did not start")
        yield
    finally:
        process.kill()
        process.communicate()


def load(*words: object) -> Any:
    done = subprocess.run(
        [sys.executable, LOAD, "requests", *map(str, words)], stdout=subprocess.PIPE, check=True, timeout=300
    )
    return json.loads(done.stdout)
