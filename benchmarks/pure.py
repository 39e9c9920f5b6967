"""Floors 0 and 1 alone: reading logs and deciding. Times are CPU times of this process: lines per second per core."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from benchmarks.figure import Figure
from mpsagent.core.decide import Memory, decide
from mpsagent.policy.files import load
from mpsagent.core.world import Process, World
from mpsagent.policy.identity import Identity
from mpsagent.mps.loglines import LogParser, Source
from mpsagent.core.model import Client, Control, Server, State, Status, Waiting
from mpsagent.mps.limits import Device
from mpsagent.core.reduce import apply_all
from tests import recordings

H200 = Device(0, "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8", "NVIDIA H200", 143155 << 20, 132)


def _cpu(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _read(source: Source, data: bytes, times: int) -> float:
    parser, state = LogParser(source), State()

    def work() -> None:
        nonlocal state
        for _ in range(times):
            state = apply_all(state, parser.feed(data))

    return _cpu(work)


def log_lines(quick: bool) -> list[Figure]:
    """The recordings' own lines over and over: parsed, and reduced to a state."""
    logs = [recordings.logs(name) for name in recordings.names()]
    both: dict[Source, bytes] = {
        "control": b"".join(one.control for one in logs),
        "server": b"".join(one.server for one in logs),
    }
    found, total, spent, split_total = [], 0, 0.0, 0.0
    for source, data in both.items():
        times = max(1, (4_000_000 if quick else 24_000_000) // len(data))
        lines = data.count(b"\n") * times
        seconds = _read(source, data, times)
        split = _cpu(lambda data=data, times=times: [data.split(b"\n") for _ in range(times)])  # type: ignore[misc]
        total, spent, split_total = total + data.count(b"\n"), spent + seconds / times, split_total + split / times
        found.append(
            Figure(f"{source}.log lines per second per core", f"{lines / seconds:,.0f}", "", None,
                   f"bytes.split of the same bytes: {seconds / split:.0f} times as long")
        )  # fmt: skip
    rate = total / spent
    against = f"bytes.split of the same bytes: {spent / split_total:.0f} times as long"
    what = "log lines per second per core, both logs as recorded"
    first = Figure(what, f"{rate:,.0f}", "300,000 or more", rate >= 300_000, against)
    return [first, *found]


def crowded() -> World:
    """One server with 48 clients of one user; 200 clients of 40 other users wait."""
    policy, mistakes = load([("policy.toml", '[limits]\nthreads = 50\nmemory = "10G"\n')])
    assert policy is not None, mistakes
    now = 1_000_000.0
    clients = {p: Client(p, 1000, 50, now + p, contexts=frozenset({0, 1})) for p in range(1000, 1048)}
    waiting = tuple(Waiting(p, 2000 + p % 40, now + p / 1000) for p in range(2000, 2200))
    server = Server(50, 1000, Status.ACTIVE, now, ready=now + 0.2, limits=policy.strictest((H200,)), reported=True)
    state = State(Control(49, now, "s"), {50: server}, clients, waiting)
    live = {p: Process(1000) for p in clients} | {w.pid: Process(w.uid) for w in waiting}
    users = {1000} | {w.uid for w in waiting}
    return World(state, policy, (H200,), {uid: Identity(uid, f"user{uid}") for uid in users},
                 {**live, 50: Process(1000), 49: Process(0)})  # fmt: skip


def decisions(quick: bool) -> list[Figure]:
    world, now = crowded(), 1_000_010.0
    memory = decide(world, Memory(), now).memory
    cache = world.rules_cache
    times = 500 if quick else 3000

    def work() -> None:
        nonlocal memory
        for number in range(times):
            memory = decide(replace(world, rules_cache=cache), memory, now + number * 0.001).memory

    seconds = _cpu(work) / times
    copied = _cpu(lambda: [_walk(world.state) for _ in range(times)]) / times
    return [
        Figure("decisions per second, 48 clients and 200 waiting", f"{1 / seconds:,.0f}", "", None,
               f"one walk over the same clients and waiters: {seconds / copied:.0f} times as long")
    ]  # fmt: skip


def _walk(state: State) -> tuple[list[int], list[int]]:
    return [c.pid for c in state.clients.values()], [w.uid for w in state.waiting]
