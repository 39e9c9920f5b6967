"""Many changes of user while every core is kept busy: `python -m tests.scenes.thousand [COUNT]`, on the simulator.

Nobody may be over their policy, and 99.9 % have to be exactly on it. Prints how long the agent took from a client's
line in control.log to the limits being set and read back; a waiting client's window is 55 ms at the least.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpsagent.mps.units import multiprocessors_for_percent
from tests.scenes.limits import OVERHEAD, POLICY, SHARES
from tests.scenes.stage import USERS, Agent, Result, Scene, Stage, backend_of, seconds_of

WINDOW = 0.055
"""Seconds that an idle server takes to exit, at the least (recording 04, T1)."""


@contextmanager
def busy() -> Iterator[int]:
    """One process for each core that does nothing but use it."""
    burners = [
        subprocess.Popen([sys.executable, "-S", "-E", "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield len(burners)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def reactions(agent: Agent) -> list[float]:
    """For each client that waited with nobody armed for its user: seconds until the limits were confirmed."""
    waiting: dict[int, float] = {}
    took: list[float] = []
    for event in sorted(agent.news(), key=lambda event: str(event["at"])):
        if event["kind"] == "client.waiting":
            waiting.setdefault(int(event["uid"]), seconds_of(event))
        elif event["kind"] == "action.done" and event["action"] == "SetDefaults" and event["ok"]:
            since = waiting.pop(event.get("uid"), None)  # type: ignore[arg-type]
            if since is not None:
                took.append(seconds_of(event) - since)
    return sorted(took)


def percentile(values: list[float], percent: float) -> float:
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def thousand(stage: Stage, count: int) -> Result:
    """One user after the other, the next one arriving as soon as the last one's query has ended."""
    agent = stage.with_agent(POLICY)
    exact = over = 0
    odd: list[str] = []
    since = time.monotonic()
    with busy() as burners:
        for number in range(count):
            uid = USERS[(number * 7 + number // 5) % 5] if number % 5 else USERS[(number // 5 + 3) % 5]
            client = stage.client(uid)
            client.ended(120)
            percent, gib = SHARES[uid]
            right = multiprocessors_for_percent(percent, stage.machine.multiprocessors)
            got = client.seen()
            if got is not None and got[0] == right and gib * 1024 - OVERHEAD <= got[1] < gib * 1024:
                exact += 1
            else:
                over += got is not None and (got[0] > right or got[1] >= gib * 1024)
                odd.append(f"{client.name} of {uid}: rc {client.rc} {client.text()!r}")
                stage.say(odd[-1])
            if number % 50 == 49:
                agent.news()
                print(f"{number + 1:5} changes, {exact} exact, {over} over", flush=True) if count > 100 else None
    took = reactions(agent)
    figures = {
        "clients": count, "exact": exact, "over": over, "not served or under": count - exact - over,
        "processes keeping the cores busy": burners,
        "from the client's line to the limits confirmed (ms)": ", ".join(
            f"p{p:g} {percentile(took, p) * 1000:.1f}" for p in (50, 90, 99, 99.9)
        ) + f", most {took[-1] * 1000:.1f} ({len(took)} times)" if took else "none",
        "later than the 55 ms of an idle server": sum(one > WINDOW for one in took),
        "seconds": round(time.monotonic() - since),
    }  # fmt: skip
    good = over == 0 and exact >= count * 0.999 - stage.quick
    return Result(figures, good, f"{exact} of {count} exact, {over} over, all cores busy", odd)


SCENES = (Scene("thousand", "Changes of user with every core busy", thousand, 1000, 40, 1500, only="sim"),)


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    place = Path(tempfile.mkdtemp(prefix="mpss", dir="/tmp"))
    with backend_of("sim", place) as (backend, machine), Stage(backend, place / "s", machine) as stage:
        result = thousand(stage, count)
    print(result.verdict)
    for key, value in result.figures.items():
        print(f"  {key}: {value}")
    for line in result.raw[:20]:
        print(f"  {line}")
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
