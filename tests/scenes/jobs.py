"""Jobs and containers: processes of one user with limits of their cgroup, read from the kernel at the gate."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.scenes.stage import USERS, Client, Result, Scene, Stage

POLICY = (
    f'[limits]\nactive_threads = "20%"\nmemory_limit = "4G"\n[user.{USERS[0]}]\nactive_threads = "20%"\n'
    'total_active_threads = "60%"\n'
    '[cgroup."/mpsagent-test-*/small"]\nactive_threads = "10%"\n[cgroup."/mpsagent-test-*"]\nactive_threads = "40%"\n'
)
PLACES = {"": 20, "small": 10, "large": 40}
"""Percent of a client of the first user by the cgroup in which it is."""


@contextlib.contextmanager
def cgroups(*names: str) -> Iterator[Path | None]:
    """A cgroup of ours with these below it; None where none can be made."""
    home = Path("/sys/fs/cgroup")
    home = home if (home / "cgroup.procs").exists() else home / "pids"  # version 1: one hierarchy is as good as another
    top = home / f"mpsagent-test-{os.getpid()}"
    made = []
    try:
        for path in (top, *(top / name for name in names)):
            path.mkdir()
            made.append(path)
    except OSError:
        pass
    try:
        yield top if len(made) == 1 + len(names) else None
    finally:
        for path in reversed(made):
            path.rmdir()


@contextlib.contextmanager
def inside(path: Path) -> Iterator[None]:
    """This process, and so what it starts, is in that cgroup."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    root = next(parent for parent in path.parents if not parent.name.startswith("mpsagent-test-"))
    mark = ":pids:" if root.name == "pids" else "0::"
    before = next(line.split(":", 2)[2] for line in lines if mark in line)
    (path / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        (root / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))


def jobs(stage: Stage, count: int) -> Result:
    """Clients of one user inside and outside of jobs, at once and one by one: each has its job's limits, and the user's
    total holds."""
    agent = stage.with_agent(POLICY, extra='sharing = "one-server"\n')
    exact = 0
    problems: list[str] = []
    with cgroups("small", "large") as top:
        if top is None:
            return Result({"cgroups": "none can be made here"}, True, "not shown: no cgroup can be made here")
        for _ in range(count):
            crowd: list[tuple[Client, int]] = []
            for name, percent in PLACES.items():
                with inside(top / name) if name else contextlib.nullcontext():
                    crowd += [(stage.client(USERS[0], "sleep", 0.4), percent) for _ in range(2)]
            with inside(top / "large"):
                crowd.append((stage.client(USERS[1]), 20))  # no total: not more than this user's own
            for client, percent in crowd:
                client.ended()
                exact += client.inside(percent)
                if not client.inside(percent):
                    problems.append(f"{percent} %: {client.text()}")
    figures = {"exact": exact, "problems": problems, "health": agent.api.problems()}
    good = exact == 7 * count and not problems
    return Result(figures, good, f"{exact} of {7 * count} clients exact", problems)


def leases(stage: Stage, count: int) -> Result:
    """A prolog gives a job, by its process, 10 of its user's 20 %; what the process starts has that, others have not.
    Another agent goes on with it; the epilog ends it."""
    agent = stage.with_agent(POLICY, extra='sharing = "one-server"\n')
    exact = total = 0
    problems: list[str] = []

    def serve(uid: int, percent: float) -> None:
        nonlocal exact, total
        client = stage.client(uid)
        client.ended()
        total += 1
        exact += client.inside(percent)
        if not client.inside(percent):
            problems.append(f"{percent} %: {client.text()}")

    for number in range(count):
        target = ["--pid", str(os.getpid())] if number % 2 else ["--uid", str(USERS[1])]
        status, said = stage.cli(agent, "lease", "add", *target, "--active-threads", "10%", "--until", "10m")
        serve(USERS[1], 10)
        serve(USERS[0], 10 if number % 2 else 20)
        stage.stop_agent(agent, signal.SIGKILL)
        agent = stage.again()
        serve(USERS[1], 10)
        status += stage.cli(agent, "lease", "delete", said.strip())[0]
        serve(USERS[1], 20)
        mark = agent.mark()
        status += stage.cli(
            agent, "lease", "add", "--uid", str(USERS[2]), "--active-threads", "10%", "--until", "500ms"
        )[0]
        agent.wait("lease.ended", since=mark)
        serve(USERS[2], 20)
        if status:
            problems.append(f"mpsagent-cli lease: {said}")
    figures = {"exact": exact, "of": total, "problems": problems, "health": agent.api.problems()}
    return Result(figures, exact == total and not problems, f"{exact} of {total} clients exact", problems)


SCENES = (
    Scene("leases", "A share for a job, until its time", leases, 10, 2, 40),
    Scene("jobs", "Limits of cgroups under a user's", jobs, 20, 2, 60),
)
