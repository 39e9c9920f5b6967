"""Parts of modes.py: what the ways of sharing are worth: throughput, and latency beside a heavy neighbour."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

from campaigns.gate_place import Out
from campaigns.modes_place import Lane, rows_of
from campaigns.workers import Crew, Worker, rate, windows
from tests.scenes.stage import Agent, Json, Stage, StageError

NO_TURN_ENDS = '[turn]\ntime_limit = "never"\n'
T2 = (20001, 20002)
T4 = (20003, 20004, 20005, 20006)
FREE = (20007, 20008)


# --- throughput -------------------------------------------------------------------------------------------------------

BEFORE = {"together 2": 849, "apart 2": 712, "outside": 718, "bare 2": 327}
"""Measured by hand, with a prototype of the gate on an H100 (recording 08, G11)."""


def throughput(here: Lane, out: Out) -> None:
    rows = out.table(
        "Four ResNet-50 in half precision, eager PyTorch, pictures a second of all four together",
        *("way of sharing", "users", "threads of each program", "one picture at a time", "windows", "batches of 16"),
        *("seconds from one user's last picture to the next one's first", "one at a time with these changes"),
        "measured before, one at a time",
    )  # fmt: skip
    long, short = (0.5, 0.5) if here.sim else (4.0, 3.0)
    policy = f"[user.{T2[0]}]\nactive_threads = '60%'\n[user.{T2[1]}]\nactive_threads = '20%'\n"
    policy += "".join(f"[user.{uid}]\nactive_threads = '25%'\n" for uid in T4)
    crew = Crew(here, here.cores, here.gpus[0])
    stages = {name: here.stage() for name in ("together", "apart", "turns", "bare", "outside")}
    here.agent(stages["together"], policy, 'sharing = "one-server"\n')
    here.agent(stages["apart"], policy, 'sharing = "per-user"\n')
    here.agent(stages["turns"], NO_TURN_ENDS)
    plain_daemon(here, stages["bare"])
    two, four = (60.0, 60.0, 20.0, 20.0), (25.0,) * 4
    pairs = (T2[0], T2[0], T2[1], T2[1])
    whole = (100.0,) * 4
    arms = {
        "together 2": crew.start(stages["together"], "resnet50", pairs, two),
        "together 4": crew.start(stages["together"], "resnet50", T4, four),
        "no limits 2": crew.start(stages["together"], "resnet50", (*FREE, *FREE), whole),
        "apart 2": crew.start(stages["apart"], "resnet50", pairs, two),
        "apart 4": crew.start(stages["apart"], "resnet50", T4, four),
        "outside": crew.start(stages["outside"], "resnet50", pairs, whole, outside=True),
    }
    later = {
        f"{name} {len(set(uids))}": crew.start(stages[name], "resnet50", uids, whole)
        for name in ("turns", "bare")
        for uids in (pairs, T4)
    }
    try:
        crew.loaded()
        crew.ready([one for arm in arms.values() for one in arm], out)
        found: dict[str, list[float]] = {name: [] for name in arms}
        for arm in arms.values():
            windows(long / 4, [arm])
        for turn in range(2):
            for name in list(arms) if turn == 0 else list(arms)[::-1]:
                found[name].append(rate(windows(long, [arms[name]])[0]))
        large = {name: rate(windows(short, [arm], 16)[0]) for name, arm in arms.items()}
        for arm in arms.values():
            for one in arm:
                one.end()
        for name, values in found.items():
            middle = statistics.mean(values)
            texts = [f"{value:.0f}" for value in values]
            rows.append([*_row(name), f"{middle:.0f}", ", ".join(texts), f"{large[name]:.0f}", "-", "-",
                         BEFORE.get(name, "-")])  # fmt: skip
            found[name] = [middle]
        out.raw["windows"] = {"one": found, "sixteen": large}
        for name, arm in later.items():
            one_after_the_other(crew, out, rows, name, arm, long)
        out.say(", ".join(f"{row[0]} ({row[1]}) {row[3]}" for row in rows) + " pictures a second, one at a time")
    finally:
        crew.end()


def plain_daemon(here: Lane, stage: Stage) -> None:
    """MPS as people run it."""
    reply = stage.rig.start("-d", env={"CUDA_VISIBLE_DEVICES": here.gpus[0]})
    if reply.rc != 0:
        raise StageError(f"the control daemon does not start: {reply}")


def _row(name: str) -> list[object]:
    ways = {"together": "together", "no limits": "together, no limits", "apart": "apart",
            "outside": "without MPS", "turns": "turns, a server for each", "bare": "MPS as it is"}  # fmt: skip
    way, _, users = name.rpartition(" ")
    limits = {"together 2": "60 %, 20 %", "apart 2": "60 %, 20 %", "together 4": "25 %", "apart 4": "25 %"}
    return [ways[way or name], f"{users} users" if way else "any", limits.get(name, "100 %")]


def one_after_the_other(
    crew: Crew, out: Out, rows: list[list[object]], name: str, arm: list[Worker], seconds: float
) -> None:
    """All come at once, and have the GPU one user after the other; each is told beforehand what to do with its turn."""
    seconds *= 0.75
    for number, one in enumerate(arm):
        one.tell("load")
        one.go(seconds)
        one.go(seconds * 2 / 3, 16)
        one.end()
        time.sleep(0.5 if number == 0 else 0.05)  # so that the first user's program is the first
    users: dict[int, list[tuple[Json, Json]]] = {}
    for one in arm:
        done = one.done(1, 60), one.done(2, 60)
        users.setdefault(one.uid, []).append(done)
        crew.judge(one, out)
    order = sorted(users.values(), key=lambda dones: min(one["begin"] for one, _ in dones))
    small = [rate([one for one, _ in dones]) for dones in order]
    large = [rate([one for _, one in dones]) for dones in order]
    gaps = [
        min(one["begin"] for one, _ in after) - max(one["end"] for _, one in before)
        for before, after in itertools.pairwise(order)
    ]
    count = sum(one["count"] for dones in order for one, _ in dones)
    busy = sum(max(one["end"] for one, _ in dones) - min(one["begin"] for one, _ in dones) for dones in order)
    rows.append([*_row(name), f"{statistics.mean(small):.0f}", ", ".join(f"{one:.0f}" for one in small),
                 f"{statistics.mean(large):.0f}", ", ".join(f"{one:.2f}" for one in gaps),
                 f"{count / (busy + sum(gaps)):.0f} (turns of {seconds:g} s)", BEFORE.get(name, "-")])  # fmt: skip
    out.check(all(one > -0.05 for one in gaps), f"{name}: two users were at work at once: {gaps}")
    out.raw[name] = {"gaps": gaps, "small": small, "large": large, "count": count, "busy": busy}


# --- latency ----------------------------------------------------------------------------------------------------------

HEAVY, SMALL = 0, (1, 2, 3)
SETS = {  # first uid of four users: heavy, small, small, small; and the percents
    "60, 20": (20101, 60.0, 20.0), "40, 20": (20111, 40.0, 20.0), "100, 100": (20121, 100.0, 100.0),
}  # fmt: skip
RECORDED = {
    "together 60, 20": "2.8, 3.6", "together 100, 100": "14.1, 15.9", "outside": "3.4, 5.2", "apart 60, 20": "4.8, 5.7",
    "alone": "2.9, 3.7",
}  # fmt: skip


def latency(here: Lane, out: Out) -> None:
    rows = out.table(
        "A request each 5 ms to ResNet-18, one picture (small users), beside matrix products of 8192 in bfloat16 "
        "(heavy user): ms to the answer, p50 and p99 over all requests of all small users",
        *("way of sharing", "threads: heavy, small", "one small user", "requests", "three small users", "requests"),
        *("heavy: products a second beside one, three", "of what it does alone without MPS"),
        "measured before, one small user",
    )  # fmt: skip
    seconds = 0.5 if here.sim else 4.0
    policy = ""
    for uid, much, little in SETS.values():
        for number in (HEAVY, *SMALL):
            policy += f"[user.{uid + number}]\nactive_threads = '{much if number == HEAVY else little:g}%'\n"
    stages = {name: here.stage() for name in ("together", "apart", "turns", "outside")}
    here.agent(stages["together"], policy, 'sharing = "one-server"\n')
    here.agent(stages["apart"], policy, 'sharing = "per-user"\n')
    turns = here.agent(stages["turns"], NO_TURN_ENDS)
    crew = Crew(here, here.cores, here.gpus[0])

    def four(stage: str, name: str, **more: bool) -> list[Worker]:
        uid, heavy, small = SETS[name]
        percents = (small,) * 3
        return [
            *crew.start(stages[stage], "heavy", (uid,), (heavy,), **more),
            *crew.start(stages[stage], "small", [uid + number for number in SMALL], percents, core=1, **more),
        ]

    arms = {f"together {name}": four("together", name) for name in SETS}
    arms["apart 60, 20"] = four("apart", "60, 20")
    arms["outside"] = four("outside", "100, 100", outside=True)
    queue = four("turns", "100, 100")
    try:
        crew.loaded()
        crew.ready([one for arm in arms.values() for one in arm], out)
        for arm in arms.values():
            windows(seconds / 4, [arm])
        heavy_alone = rate(windows(seconds * 0.75, [arms["outside"][:1]])[0])
        quiet = arms["together 60, 20"][1:]
        alone = [windows(seconds, [some])[0] for some in (quiet[:1], quiet)]
        rows.append(["nobody heavy", "-, 20", *_of(alone[0]), *_of(alone[1]), "-", "-", RECORDED["alone"]])
        for name, (heavy, *smalls) in arms.items():
            beside = [windows(seconds, [[heavy], some]) for some in (smalls[:1], smalls)]
            rates = [rate(done[0]) for done in beside]
            figures = [value for done in beside for value in _of(done[1])]
            rows.append([*_way(name), *figures, ", ".join(f"{per:.0f}" for per in rates),
                         ", ".join(f"{per / heavy_alone:.0%}" for per in rates), RECORDED.get(name, "-")])  # fmt: skip
            out.raw[name] = [[_p(some["took"]) for some in done[1]] for done in beside]
        for arm in arms.values():
            for worker in arm:
                worker.end()
        in_turns(here, out, rows, turns, queue, seconds, heavy_alone)
        said = ", ".join(f"{row[0]} ({row[1]}) {row[2]} and {row[4]}" for row in rows)
        out.say(f"p50 and p99 in ms of one and of three small users: {said}; heavy alone {heavy_alone:.0f}/s")
    finally:
        crew.end()


def _way(name: str) -> list[object]:
    if name == "outside":
        return ["without MPS", "100, 100"]
    way, _, limits = name.partition(" ")
    return [way, "no limits" if limits.startswith("100") else limits]


def _p(took: Sequence[float]) -> tuple[float, float]:
    found = sorted(took)
    return found[len(found) // 2], found[min(len(found) - 1, int(len(found) * 0.99))]


def _of(done: Sequence[Json]) -> list[object]:
    took = [value for one in done for value in one["took"]]
    if not took:
        return ["none", 0]
    half, most = _p(took)
    return [f"{half:.1f}, {most:.1f}", len(took)]


def in_turns(
    here: Lane,
    out: Out,
    rows: list[list[object]],
    agent: Agent,
    queue: list[Worker],
    seconds: float,
    heavy_alone: float,
) -> None:
    """The small users come while the heavy one works: they wait, and then have the GPU one after the other."""
    heavy, *smalls = queue
    heavy.tell("load")
    heavy.wait("READY")
    heavy.go(seconds + 1)
    heavy.end()
    since = time.monotonic()
    for one in smalls:
        one.tell("load")
        one.go(seconds / 2)
        one.end()
    waiting: set[int] = set()
    while time.monotonic() < since + seconds:
        waiting |= {row["uid"] for row in rows_of(agent) if row["state"] == "waiting"}
        time.sleep(0.1)
    worked: dict[str, Any] = heavy.done(1)
    dones = [one.done(1) for one in smalls]
    waits = [max(0.0, one["begin"] - worked["end"]) for one in dones]
    per = rate([worked])
    text = f"{', '.join(f'{wait:.1f}' for wait in sorted(waits))} s after the heavy user's end, then {_of(dones)[0]}"
    requests = sum(len(one["took"]) for one in dones)
    rows.append(["turns, a server for each", "no limits", "waits", 0, f"wait: {text}", requests, f"{per:.0f}",
                 f"{per / heavy_alone:.0%}", "-"])  # fmt: skip
    out.check(len(waiting) == len(smalls), f"turns: {len(waiting)} of {len(smalls)} were seen waiting")
    out.check(all(one["begin"] >= worked["end"] for one in dones), "turns: a small user worked beside the heavy one")
