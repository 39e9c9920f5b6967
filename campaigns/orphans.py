#!/usr/bin/env python3
"""A server that is stopped when its control daemon is killed: what the kernel shows of it, and is it found and ended by
what the agent does at its start, and no other server.

    campaigns/orphans.py [--out DIR] [--sim]

Root, a GPU. MPS alone, without mpsagent. Prints `ANSWER` lines and writes everything to DIR/orphans.txt ($OUT).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import rendezvous_bench
from campaigns.rendezvous_bench import Bench, Daemon
from mpsagent.system.control_search import end_orphans
from mpsagent.system.processes import parent

A, B = 20001, 20002


def facts(pid: int) -> str:
    place = Path(f"/proc/{pid}")
    status = place.joinpath("status").read_text().splitlines()
    shown = [" ".join(line.split()) for line in status if line.startswith(("State", "PPid", "Uid", "Gid", "Groups"))]
    environ = [
        one for one in place.joinpath("environ").read_bytes().decode(errors="replace").split("\0") if "MPS" in one
    ]
    words = place.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
    return f"{shown} {environ} {words[:2]} {os.readlink(place / 'exe')}"


def memory() -> str:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.replace("\n", "; ")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def orphans(bench: Bench) -> None:
    for options in ((), ("--multiuser-server",)):
        one, other = Daemon(bench, *options), Daemon(bench)
        servers = []
        for daemon, uid in ((one, A), (other, B)):
            bench.relay(daemon)
            client = bench.client(daemon, uid, "sleep", 200)
            client.said(r"\] sms ")
            servers.append(daemon.servers()[0])
        stopped = servers[0]
        bench.say(f"ANSWER {options} server {stopped}: {facts(stopped)}")
        control = parent(stopped)
        assert control is not None
        bench.say(f"ANSWER while its daemon lives: {asyncio.run(end_orphans(str(one.pipe)))} (is to be [])")
        os.kill(stopped, signal.SIGSTOP)
        os.kill(control, signal.SIGKILL)
        time.sleep(3)
        bench.say(f"ANSWER 3 s after its daemon's end: {facts(stopped)}; {memory()}")
        ended = asyncio.run(end_orphans(str(one.pipe)))
        time.sleep(2)
        both = [alive(pid) for pid in servers]
        bench.say(f"ANSWER ended: {ended} (is to be [{stopped}]); it and its neighbour alive: {both}")
        bench.say(f"ANSWER memory then: {memory()}")
        bench.between()


if __name__ == "__main__":
    sys.exit(rendezvous_bench.main(__doc__, "orphans", {"orphans": (orphans, 80.0)}))
