"""Where it is measured: a stage with a policy of five users, scripts at its socket, and what the kernel counts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from demo.stage import Stage, StageError
from mpsagent.gate.pacing import NEW_CLIENTS

ALICE, BOB, CAROL, DAVE, ERIN = USERS = (20001, 20002, 20003, 20004, 20005)
POLICY = """\
[limits]
active_threads = '10%'
memory_limit = "1G"
[user.20001]
active_threads = '60%'
memory_limit = "25%"
[user.20002]
active_threads = '30%'
memory_limit = "10G"
[user.20003]
active_threads = '20%'
memory_limit = "2G"
[agent]
on_stop = "{on_stop}"
placement = "least-loaded"
"""
ROOT = Path(__file__).resolve().parent.parent


def stage(*, server: str = "own", on_stop: str = "leave", instances: int = 0, extra: str = "") -> Stage:
    """``instances``: so many GPUs with one each; 0: one for the GPU that there is. ``extra``: lines of the instance."""
    each = instances > 0
    return Stage(POLICY.format(on_stop=on_stop), server=server, gpus=instances or 1, each=each, extra=extra)


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


class Knocker:
    """Processes of one user that knock one after the other, no faster than the gate lets them in; see knock.py."""

    def __init__(self, node: Stage, uid: int) -> None:
        self._process = knocking(node, uid, 0)
        self._next = 0.0

    def knock(self) -> float:
        """Seconds from a new process's credentials to its descriptor."""
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = time.monotonic() + 1 / NEW_CLIENTS.rate
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line or line == b"refused\n":
            raise StageError(f"a knock was not served: {line!r}")
        return float(line) / 1000


def knocking(node: Stage, uid: int, count: int) -> subprocess.Popen[bytes]:
    library = node.sim / "lib"  # a copy, where other users cannot read ours
    arguments = [str(library if library.exists() else ROOT), str(node.pipe / "control"), str(count)]
    return node.script(uid, ROOT / "benchmarks" / "knock.py", arguments)


def rss(pid: int) -> int:
    """Resident memory in KiB."""
    return int(psutil.Process(pid).memory_info().rss) // 1024


def cpu(pid: int) -> float:
    """Seconds of CPU time, children that have ended included."""
    return sum(psutil.Process(pid).cpu_times()[:4])


def shares(pids: list[int], seconds: float) -> list[float]:
    """Percent of a core that each of these processes uses in that time."""
    before, began = [cpu(pid) for pid in pids], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return [(cpu(pid) - was) / took * 100 for pid, was in zip(pids, before, strict=True)]


def agent_and_gate(node: Stage) -> list[int]:
    assert node.agent is not None
    return [node.agent.pid, node.gate_pid()]


def api_pid(node: Stage) -> int:
    """Without systemd the api is a child of the agent."""
    assert node.agent is not None
    children = psutil.Process(node.agent.pid).children()
    return next(one.pid for one in children if "mpsagent.api.main" in one.cmdline())


def bare_rss() -> int:
    """What Python with the agent's largest library takes, in KiB."""
    code = "import asyncio, aiohttp\nprint(next(l.split()[1] for l in open('/proc/self/status') if 'VmRSS' in l))"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def timed(command: list[str], environment: dict[str, str] | None = None) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - began
