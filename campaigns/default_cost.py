#!/usr/bin/env python3
"""What the default costs beside the same programs without mpsagent: `default_cost.py [--sim] [--out DIR]`.

    throughput       1, 4, 8 and 16 ResNet-50 of up to four users: pictures a second of all together
    latency          a small program beside a heavy one of another user: p50 and p99 of a request
    start            a whole client, from its start to its end
    memory           device memory of a control daemon's server, for each user

Without a policy each user has a control daemon of the user's own. "Without mpsagent" is the same program with a pipe
directory that does not exist. Each figure is the median of five runs that alternate, in one call on one GPU.

As root, with PyTorch in this Python and mpsagent importable: at most five minutes. default-cost.md and .json go to DIR
($OUT) after each part. No setting of a GPU is touched. Exit status: 0 all good, 1 a part failed or throughput is worse
by more than 3 percent, 2 it could not begin.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import facts, parser, place, uuids
from campaigns.gate_place import Out, played
from campaigns.modes_place import Lane
from campaigns.workers import OUTSIDE, Crew, rate, windows
from tests.scenes.stage import Stage

RUNS = 5
COUNTS = (1, 4, 8, 16)
USERS = (20001, 20002, 20003, 20004)
WAYS = ("without mpsagent", "by default")
WORSE = 0.97
"""Throughput by default, as a part of that without mpsagent."""
NODE = 64, 8
"""Users and GPUs for which the memory is stated, too."""


def stages(here: Lane) -> tuple[Stage, Stage]:
    """A stage without mpsagent, and one with the default policy."""
    bare, default = here.stage(), here.stage()
    default.policy("", extra='sharing = "per-user"\n')
    agent = default.start_agent()
    default.answering(agent)
    default.until(lambda: agent.api.status()["gate"]["in_force"], "the gate is open")
    return bare, default


def alternating(measure: Callable[[int], float]) -> tuple[list[float], list[float]]:
    """Five figures of each way, by turns; `measure(0)` is without mpsagent."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(RUNS):
        for way in (0, 1) if number % 2 == 0 else (1, 0):
            found[way].append(measure(way))
    return found


def row(name: object, found: tuple[list[float], list[float]], digits: int) -> tuple[list[object], float]:
    """A row of medians and of all runs, and the ratio of the medians."""
    middle = [statistics.median(each) for each in found]
    every = ["; ".join(f"{one:.{digits}f}" for one in each) for each in found]
    ratio = middle[1] / middle[0]
    return [name, *(f"{one:.{digits}f}" for one in middle), f"{ratio:.3f}", *every], ratio


HEAD = (*WAYS, "ratio", *(f"{way}, each run" for way in WAYS))


def throughput(here: Lane, out: Out) -> None:
    rows = out.table("ResNet-50 in half precision, one picture at a time: pictures a second, all together",
                     "programs (users)", *HEAD)  # fmt: skip
    seconds = 0.3 if here.sim else 2.0
    places, crew = stages(here), Crew(here, here.cores, here.gpus[0])
    uids = [USERS[number % len(USERS)] for number in range(max(COUNTS))]
    arms = [
        crew.start(place, "resnet50", uids, [100.0] * len(uids), outside=not number)
        for number, place in enumerate(places)
    ]
    try:
        crew.loaded()
        crew.ready([one for arm in arms for one in arm], out)
        for count in COUNTS:
            found = alternating(lambda way, count=count: rate(windows(seconds, [arms[way][:count]])[0]))  # type: ignore[misc]
            line, ratio = row(f"{count} ({min(count, len(USERS))})", found, 0)
            rows.append(line)
            out.say(f"{count} programs: {ratio:.3f} of the throughput without mpsagent")
            out.check(here.sim or ratio >= WORSE, f"{count} programs have {ratio:.3f} of the throughput")
    finally:
        crew.end()


def latency(here: Lane, out: Out) -> None:
    rows = out.table("A request each 5 ms to ResNet-18 beside matrix products of 8192 of another user: ms", "", *HEAD)
    seconds = 0.3 if here.sim else 3.0
    places, crew = stages(here), Crew(here, here.cores, here.gpus[0])
    arms = [
        [crew.start(place, what, (uid,), (100.0,), core=core, outside=not number)
         for core, (what, uid) in enumerate((("heavy", USERS[0]), ("small", USERS[1])))]
        for number, place in enumerate(places)
    ]  # fmt: skip
    try:
        crew.loaded()
        crew.ready([one for arm in arms for group in arm for one in group], out)
        taken: list[list[list[float]]] = [[], []]

        def p99(way: int) -> float:
            done = windows(seconds, arms[way])[1]
            taken[way].append(sorted(one for each in done for one in each["took"]))
            return taken[way][-1][int(len(taken[way][-1]) * 0.99)]

        line, ratio = row("p99", alternating(p99), 2)
        rows.append(line)
        middles = ([statistics.median(one) for one in taken[0]], [statistics.median(one) for one in taken[1]])
        rows.append(row("p50", middles, 2)[0])
        out.say(f"p99 of a small program beside a heavy one: {line[2]} ms, without mpsagent {line[1]} ms ({ratio:.2f})")
    finally:
        crew.end()


def start(here: Lane, out: Out) -> None:
    rows = out.table("A whole client, from its start to its end: s", "user", *HEAD)
    places = stages(here)

    def once(way: int, uid: int) -> float:
        client = places[way].client(uid, "query", **({} if way else OUTSIDE))
        out.check(client.ended() == 0, f"a client of {uid}: {client.text()}")
        return time.monotonic() - client.started.since

    first = [once(way, USERS[0]) for way in (0, 1)]
    rows.append(["first of its user", f"{first[0]:.3f}", f"{first[1]:.3f}", f"{first[1] / first[0]:.3f}", "", ""])
    line, ratio = row("further ones", alternating(lambda way: once(way, USERS[0])), 3)
    rows.append(line)
    out.say(f"start of a client: {line[2]} s, the first of its user {first[1]:.2f} s, without mpsagent {line[1]} s")
    out.raw["start"] = ratio


def memory(here: Lane, out: Out) -> None:
    rows = out.table("Device memory in use with one sleeping client of each user, MiB", "users", *WAYS, "for each user")
    if here.sim:
        out.say("not on the simulator")
        return
    places, used = stages(here), [[_used(here)], [_used(here)]]
    for way in (0, 1):
        clients = []
        used[way][0] = _used(here)
        for uid in USERS:
            clients.append(places[way].client(uid, "sleep", 600, **({} if way else OUTSIDE)))
            out.check(clients[-1].working(), f"a client of {uid}")
            time.sleep(0.5)
            used[way].append(_used(here))
        for one in clients:
            one.kill()
            one.ended()
        time.sleep(2)
    more = [[each - way[0] for each in way] for way in used]
    for number in range(1, len(USERS) + 1):
        each = (more[1][number] - more[0][number]) / number
        rows.append([number, f"{more[0][number]:.0f}", f"{more[1][number]:.0f}", f"{each:.0f}"])
    users, gpus = NODE
    whole = users * each / 1024
    out.say(f"{each:.0f} MiB more for each user and GPU; {users} users on {gpus} GPUs: {whole:.1f} GiB of each")


def _used(here: Lane) -> float:
    """MiB in use on the GPU."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(here.gpus[0])
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle).used) / (1 << 20)


PARTS: dict[str, tuple[Callable[[Lane, Out], None], float]] = {
    "throughput": (throughput, 170.0),
    "latency": (latency, 80.0),
    "start": (start, 30.0),
    "memory": (memory, 40.0),
}
"""What each may take at most, in seconds."""


def main() -> int:
    options = parser(__doc__, 290.0).parse_args()
    names = options.only or list(PARTS)
    with place(options.sim) as (backend, machine, base):
        cores = sorted(os.sched_getaffinity(0))

        def here(number: int) -> Lane:
            echo = print if options.verbose else None
            return Lane(backend, machine, base / f"p{number}", options.sim, echo, tuple(uuids(options.sim)), cores)

        parts = {name: PARTS[name] for name in names}
        return played(options, "default-cost", "The default beside no mpsagent", facts(backend, machine), parts, here)


if __name__ == "__main__":
    sys.exit(main())
