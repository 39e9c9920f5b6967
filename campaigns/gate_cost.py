"""A part of gate.py, only where it is named: what agent and gate cost beside MPS."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncinotify import Inotify, Mask

from campaigns.gate_place import Here, Out, listed, processor_of
from campaigns.workers import Crew, rate, windows
from mpsagent_bench.inside import Makers, measure
from mpsagent_bench.plan import Run
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Agent, Stage

AIM = 0.99
PAIRS = 3
WORK = 30.0
"""Seconds in which eight clients work and the processor time of agent and gate is counted."""
ALONE = 100.0
"""The same, where nothing else opens a GPU: long, as the kernel tells each process's time in steps of 10 ms."""
MOST = 0.005
"""Of a core, of all of mpsagent's processes together."""
BLOCK = SLOT = 1.0
BATCH = 16  # with single pictures the processors of the machine are measured: pairs from 0.93 to 1.16


def cost(here: Here, out: Out) -> None:
    """Throughput behind the gate over that of a bare daemon, and what agent and gate use while eight clients work."""
    gated, bare = here.stage(), here.stage()
    agent = gated.with_agent("[limits]\nactive_threads = '100%'\n")
    bare.without_agent()
    cores = sorted(os.sched_getaffinity(0))
    crew = Crew(here, cores[::2] + cores[1::2])  # neighbours may be one core with two threads
    rows = out.table("Work a second", "what", "processes", "pair", "behind the gate", "bare daemon", "ratio")
    try:
        for count in (1, 2) if here.sim else (1, 4):
            _pairs(here, out, rows, "one block", count, lambda stage, n: _blocks(here, out, stage, n), (gated, bare))
        arms = {id(stage): crew.start(stage, "resnet50", (A,) * 8, (100.0,) * 8) for stage in (gated, bare)}
        crew.loaded()

        def pictures(stage: Stage, count: int, seconds: float = SLOT) -> float:
            return rate(windows(seconds, [arms[id(stage)][:count]], BATCH)[0])

        for stage in (gated, bare):
            crew.ready(arms[id(stage)], out)
            pictures(stage, 8)  # clocks and caches
        for count in (2,) if here.sim else (4, 8):
            _pairs(here, out, rows, "ResNet-50", count, pictures, (gated, bare))
        for one in arms[id(bare)]:  # its clients are outside MPS for the agent, which would look at them
            one.end()
        _used(here, out, gated, agent, lambda: pictures(gated, 8, 3.0 if here.quick else WORK))
    finally:
        crew.end()


def processor(here: Here, out: Out) -> None:
    """What agent and gate use while eight clients work and nothing else opens a GPU: each open is a look at who is
    outside MPS, so nothing else may run on the machine."""
    stage = here.stage()
    agent = stage.with_agent("[limits]\nactive_threads = '100%'\n")
    seconds = 3.0 if here.quick or here.sim else ALONE
    clients = [stage.client(A, "work", int((seconds + 60) * 100)) for _ in range(8)]
    for client in clients:
        stage.until(lambda client=client: "] sms " in client.text(), "all have begun")  # type: ignore[misc]
    time.sleep(2.0)  # the looks that their opens are a reason for
    inside = [one for one in listed(agent) if one["state"] == "running"]
    out.check(len(inside) == 8, f"{len(inside)} of 8 workers are listed as running behind the gate")
    took, shares = shares_of(stage, lambda: time.sleep(seconds))
    out.say(f"while 8 clients work for {took:.0f} s mpsagent uses {in_words(shares)}, aim {100 * MOST:g} %")
    out.raw["processor"] = shares
    out.check(here.sim or sum(shares.values()) <= MOST, f"agent and gate use {in_words(shares)}")


def _pairs(
    here: Here, out: Out, rows: list[list[object]], what: str, count: int, work: Callable[[Stage, int], float],
    arms: tuple[Stage, Stage],
) -> None:  # fmt: skip
    """Each pair is gate, bare, bare, gate or the other way round, so that a drift of the clocks hits both."""
    ratios = []
    for pair in range(PAIRS):
        gated, bare = arms
        order = (gated, bare, bare, gated) if pair % 2 == 0 else (bare, gated, gated, bare)
        got = {id(arm): 0.0 for arm in arms}
        for arm in order:
            got[id(arm)] += work(arm, count) / 2
        ratios.append(got[id(gated)] / got[id(bare)] if got[id(bare)] else 0.0)
        rows.append([what, count, pair + 1, round(got[id(gated)], 1), round(got[id(bare)], 1), ratios[-1]])
    middle = statistics.median(ratios)
    out.say(f"{what}, {count} processes: ratio {middle:.4f} ({', '.join(f'{one:.4f}' for one in ratios)}), aim {AIM}")
    out.raw[f"{what} {count}"] = ratios
    if not here.sim:
        out.check(middle >= AIM, f"{what}, {count} processes: ratio {middle:.4f} is below {AIM}")


def _blocks(here: Here, out: Out, stage: Stage, count: int) -> float:
    """Kernels of one block that so many processes finish in a second."""
    programs = Path(stage.backend.control).parent if here.sim else None
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(stage.rig.pipe)}
    seconds = 0.5 if here.sim else BLOCK
    found = measure(Run("together", "block", count, 1, seconds), environment, Makers(programs))
    out.check(not found.problem, f"one block, {count} processes: {found.problem}")
    return sum(found.each)


def product(stage: Stage) -> dict[int, str]:
    """All of mpsagent's processes of this stage: agent, gate, keeper, helpers."""
    return {
        one.pid: _what(one.arguments) for one in stage.rig.ours()
        if "mpsagent" in one.arguments and rigs.CONTROL not in one.arguments and "cuda" not in one.arguments
    }  # fmt: skip


def _what(arguments: str) -> str:
    found = re.search(r"mpsagent[.-](gate\S*|system\S*|api\S*|agent\S*)", arguments)
    return found[1] if found else "agent"


def used_by(processes: dict[int, str]) -> dict[str, float]:
    """Seconds of processor time so far."""
    found: dict[str, float] = {}
    for pid, what in processes.items():
        found[what] = found.get(what, 0.0) + processor_of(pid)
    return found


def shares_of(stage: Stage, work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """While `work` goes on: for how long it did, and each process's share of a core."""
    processes = product(stage)
    before, since = used_by(processes), time.monotonic()
    work()
    took = time.monotonic() - since
    return took, {what: (value - before[what]) / took for what, value in used_by(processes).items()}


def in_words(shares: dict[str, float]) -> str:
    parts = ", ".join(f"{what} {100 * value:.2f} %" for what, value in sorted(shares.items()))
    return f"{100 * sum(shares.values()):.2f} % of a core ({parts})"


def _used(here: Here, out: Out, stage: Stage, agent: Agent, work: Callable[[], object]) -> None:
    inside = [one for one in listed(agent) if one["state"] == "running"]
    out.check(len(inside) >= 8, f"{len(inside)} of 8 workers are listed as running behind the gate")
    with opens() as count:
        took, shares = shares_of(stage, work)
        opened = count()
    out.say(
        f"while 8 clients work for {took:.0f} s mpsagent uses {in_words(shares)}, aim {100 * MOST:g} %; a program "
        f"opened a GPU's device file in {opened} half-seconds of these, and in each it is looked who that was"
    )
    out.raw["processor"] = {**shares, "opened": opened}
    if not here.sim and not opened:  # others on this machine start programs: that is another figure
        out.check(sum(shares.values()) <= MOST, f"agent and gate use {in_words(shares)}")


@contextlib.contextmanager
def opens() -> Iterator[Callable[[], int]]:
    """In how many half-seconds a program opened device files of GPUs: so often the agent looks who it was."""
    with Inotify() as inotify:
        os.set_blocking(inotify.fd, False)
        for path in Path("/dev").glob("nvidia*"):
            if re.fullmatch(r"nvidia(-uvm|\d+)", path.name):
                inotify.add_watch(path, Mask.OPEN)
        over, found = threading.Event(), 0

        def watch() -> None:
            nonlocal found
            while not over.wait(0.5):
                with contextlib.suppress(BlockingIOError):
                    found += bool(os.read(inotify.fd, 1 << 20))

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield lambda: found
        finally:
            over.set()
            thread.join()
