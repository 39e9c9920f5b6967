"""Worlds of all kinds, many at a time, each process with its own seeds; a failure is a file, and it goes on."""

from __future__ import annotations

import signal
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.world import trouble
from tests.world.kernel import BOOT
from tests.world.plans import draw, fails, hour, shrunk
from tests.world.plans import played as lasted
from tests.world.world import World

KINDS: dict[str, tuple[Callable[[int, tuple[str, ...]], Any], Callable[[Any], World], float]] = {
    "minute": (draw, World, 1.0),
    "hour": (hour, World, 2.0),
    "trouble": (lambda seed, _: trouble.draw(seed), trouble.Troubled, 1.0),
}
"""How a plan is drawn, in which world it is played, and its share of the time."""
STUCK = 60.0
"""Processor seconds after which a world is given up."""
SHRINKING = 60.0


class Stuck(KeyboardInterrupt):
    """No task keeps it to itself."""


def run(jobs: int, first: int, seconds: float, kinds: tuple[str, ...], ways: tuple[str, ...], out: Path) -> int:
    """Exit status 1 when a world failed."""
    out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    count, hours, failed = Counter[str](), Counter[str](), list[str]()
    with ProcessPoolExecutor(jobs) as pool:
        for done in [pool.submit(work, first + job, jobs, seconds, kinds, ways, out) for job in range(jobs)]:
            found = done.result()
            count, hours, failed = count + found[0], hours + found[1], failed + found[2]
    each = "; ".join(f"{name}: {count[name]}, {hours[name]:.1f} node-hours" for name in kinds)
    lines = [*sorted(failed), f"{count.total()} worlds from seed {first} at {commit()} ({each}), {hours.total():.1f} "
             f"node-hours in {time.monotonic() - begun:.0f} s, {len(failed)} failed"]  # fmt: skip
    (out / f"summary-{first}.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return int(bool(failed))


def work(
    seed: int, step: int, seconds: float, kinds: tuple[str, ...], ways: tuple[str, ...], out: Path
) -> tuple[Counter[str], Counter[str], list[str]]:
    """Every ``step``-th seed: how many worlds of each kind, their hours, and a line for each that failed."""
    signal.signal(signal.SIGPROF, give_up)
    count, hours, failed = Counter[str](), Counter[str](), list[str]()
    spent = dict.fromkeys(kinds, 0.0)
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        kind = min(kinds, key=lambda name: spent[name] / KINDS[name][2])
        draws, make, _ = KINDS[kind]
        plan = draws(seed, ways)
        found = played(plan, make)
        count[kind] += 1
        hours[kind] += lasted[-1] / 3600
        spent[kind] += time.monotonic() - begun
        if found is not None:
            text = told(kind, seed, plan, found, min(end, time.monotonic() + SHRINKING))
            failed.append(text.splitlines()[0][:300])
            print(failed[-1], flush=True)
            (out / f"{kind}-{seed}.txt").write_text(text)
        seed += step
    return count, hours, failed


def give_up(*_: object) -> None:
    raise Stuck


def played(plan: Any, make: Callable[[Any], World]) -> tuple[str, World] | None:
    made: list[World] = []

    def making(plan: Any) -> World:
        made[:] = [make(plan)]
        return made[0]

    signal.setitimer(signal.ITIMER_PROF, STUCK)
    try:
        return fails(plan, making)
    except Exception as error:  # of the models: a failure of this seed, too
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}", made[0]
    except Stuck:
        return f"it is at {made[0].kernel.now - BOOT:.3f} s after {STUCK:.0f} s of a processor", made[0]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def commit() -> str:
    """With a + where the files are not those of it."""
    asked = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "an unknown commit"


def told(kind: str, seed: int, plan: Any, found: tuple[str, World], until: float) -> str:
    make = KINDS[kind][1]
    head = f"{kind} {seed} ({plan.way}) at {commit()}: {found[0]}"
    again = f"python -m tests.world --kind {kind} --seed {seed}"
    story = ["as it was:", *found[1].story[-200:]]
    if "s of a processor" not in found[0]:
        plan = shrunk(plan, found[0], make=make, until=until)
        found = fails(plan, make) or found
        story = ["cut down:", str(plan), *found[1].story[-200:], "", *story]
    return "\n".join([head, again, "", *story, ""])
