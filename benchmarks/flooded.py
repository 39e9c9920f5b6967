"""Hand-overs and changes of turn while 20 users flood the api, under the bounds of the units, in a booted systemd.

The same flood of another server under the same bounds tells what such a load does to the machine itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.figure import Figure, p50_p99, percentile
from benchmarks.system import possible, service
from tests.booted.machine import Machine
from tests.booted.service import ALICE, BOB, CLIENT, until, until_it_computes

FLOODERS = range(3001, 3021)
HERE, INSIDE = Path(__file__).parent, "/opt/bench"
API, OTHER = "/run/mpsagent/mpsagent.sock", "/run/other/socket"
MOST = 0.001
"""Seconds that a flood may add to a hand-over."""
POLICY = '[instance.default]\nserver_scope = "all"\n[turn]\ntime_limit = "1s"\ngrace = "0s"\n'
KNOCKS = """
import json, subprocess, sys, time
library, control, count, *users = sys.argv[1:]
knock = [sys.executable, "-IS", "/opt/bench/knock.py", library, control, "0"]
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, extra_groups=[])
them, took = [subprocess.Popen(knock, user=int(one), group=int(one), **pipes) for one in users], []
for number in range(int(count)):
    one = them[number % len(them)]
    one.stdin.write("\\n")
    took.append(float(one.stdout.readline()) / 1000)
    time.sleep(0.05)
print(json.dumps(took))
"""
"""Processes of users, by turns: seconds from the credentials of each to its descriptor."""
V1 = Path("/sys/fs/cgroup/cpu")
"""Where the kernel's CPU controller is in the old tree, systemd weighs nothing; here it is done as systemd would."""


def flooded(quick: bool) -> list[Figure]:
    if not possible():
        return []
    with service(POLICY) as node:
        return _measured(node, *((40, 1) if quick else (100, 3)))


def _measured(node: Machine, count: int, rounds: int) -> list[Figure]:
    library = _prepared(node)
    kinds = ("a hand-over", "a change of user", "a wait for a turn that ends after 1 s")
    took: dict[str, dict[str, list[float]]] = {what: {"": [], API: [], OTHER: []} for what in kinds}
    used = {API: 0.0, OTHER: 0.0}
    for _ in range(rounds):
        for socket in ("", API, OTHER):
            with _flood(node, socket):
                began, before = time.monotonic(), _cpu(node, socket)
                found = _three(node, library, count)
                used[socket] = (_cpu(node, socket) - before) / (time.monotonic() - began)
            for what, values in zip(kinds, found, strict=True):
                took[what][socket] += values
    return [
        Figure(f"{what}, beside 20 users who flood the api in 160 loops: p50, p99 of {len(times[API])}",
               p50_p99(times[API]), "p50 within 1 ms of no flood" if what in kinds[:2] else "",
               percentile(times[API], 0.5) - percentile(times[""], 0.5) <= MOST if what in kinds[:2] else None,
               f"no flood: {p50_p99(times[''])}; the same flood of a bare aiohttp with the same bounds: "
               f"{p50_p99(times[OTHER])}; of a core the api took {used[API]:.2f}, the other {used[OTHER]:.2f}")
        for what, times in took.items()
    ]  # fmt: skip


def _three(node: Machine, library: str, count: int) -> tuple[list[float], list[float], list[float]]:
    """Hand-overs to the user who has the turn, hand-overs with a change of user, one at the end of a turn's time."""
    stay = node.start(CLIENT, "sleep", "600", user=ALICE)
    until_it_computes(stay)
    same = _knocks(node, library, count, ALICE)
    last = _knocks(node, library, 1, BOB)
    stay.wait(60)
    return same[1:], _knocks(node, library, count, ALICE, BOB)[2:], last


def _prepared(node: Machine) -> str:
    """Users, programs, and the other server; where the package's libraries are."""
    for uid in FLOODERS:
        node.run("useradd", "--uid", str(uid), "--no-create-home", f"flood{uid}")
    for name in ("flood.py", "knock.py", "load.py"):
        node.write(f"{INSIDE}/{name}", (HERE / name).read_text())
    node.write(f"{INSIDE}/knocks.py", KNOCKS)
    library = node.run("sh", "-c", "echo /usr/lib/mpsagent/lib/python*").stdout.strip()
    bounds = ["Nice=5", "CPUWeight=20", "CPUQuota=100%", "RuntimeDirectory=other", f"Environment=PYTHONPATH={library}"]
    _unit(node, "other", "system.slice", "nobody", bounds, "python3", f"{INSIDE}/load.py", "hello", OTHER)
    until("the other server", node.path(OTHER).is_socket)
    node.path(OTHER).chmod(0o666)
    return library


def _unit(node: Machine, name: str, group: str, uid: str, properties: list[str], *command: str) -> None:
    words = ["--quiet", f"--unit={name}", f"--slice={group}", f"--uid={uid}", "--service-type=exec"]
    node.run("systemd-run", *words, *(f"--property={one}" for one in properties), *command)


def _cpu(node: Machine, socket: str) -> float:
    """Seconds that the process behind this socket has used."""
    unit = "other.service" if socket == OTHER else "mpsagent-api.service"
    return int(node.show(unit, "CPUUsageNSec")["CPUUsageNSec"]) / 1e9


def _knocks(node: Machine, library: str, count: int, *users: str) -> list[float]:
    words = ("python3", f"{INSIDE}/knocks.py", library, "/tmp/nvidia-mps/control", str(count), *users)
    knocks: list[float] = json.loads(node.run(*words).stdout)
    return knocks


@contextmanager
def _flood(node: Machine, socket: str) -> Iterator[None]:
    """Each user in a slice of its own, as logins are."""
    names = [f"flood-{uid}" for uid in FLOODERS] if socket else []
    for name in names:
        uid = name.removeprefix("flood-")
        command = f"sleep infinity | python3 -IS {INSIDE}/flood.py {socket}"
        _unit(node, name, f"user-{uid}.slice", uid, [], "sh", "-c", command)
    with _weighed(node):
        try:
            time.sleep(1 if socket else 0)
            yield
        finally:
            if names:
                node.systemctl("stop", *(f"{name}.service" for name in names))


@contextmanager
def _weighed(node: Machine) -> Iterator[None]:
    tree = node.group
    if not V1.is_dir() or "cpu" in (tree / "cgroup.controllers").read_text().split():
        yield
        return
    made = []
    for group in sorted(tree.rglob("*/")):
        copy = V1 / tree.name / group.relative_to(tree)
        copy.mkdir(parents=True, exist_ok=True)
        made.append(copy)
        if group.name in ("mpsagent-api.service", "other.service"):
            (copy / "cpu.shares").write_text(str(1024 * 20 // 100))
            (copy / "cpu.cfs_quota_us").write_text((copy / "cpu.cfs_period_us").read_text())
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (copy / "cgroup.procs").write_text(pid)
    try:
        yield
    finally:
        for copy in reversed([V1 / tree.name, *made]):
            with suppress(OSError):
                for pid in (copy / "cgroup.procs").read_text().split():
                    (V1 / "cgroup.procs").write_text(pid)
                copy.rmdir()
