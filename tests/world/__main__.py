"""Plays worlds: `python -m tests.world --seconds 60`, or one again: `python -m tests.world --kind hour --seed 7`.
With `--jobs 10 --seconds 520 --out DIR` those of all kinds, ten at a time; `--kind pairs=6 --kind hour` gives pairs of
deaths six parts of the time and hours their two.

Exit status 1 when a promise was broken: the seed, the commit, the plan cut down to what is needed, and its story.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.world import many
from tests.world.plans import WAYS, draw, fails, shrunk
from tests.world.plans import played as lasted
from tests.world.world import World


def main() -> int:
    words = argparse.ArgumentParser("tests.world", description=__doc__)
    words.add_argument("--seed", type=int, help="play this one, and tell its story")
    words.add_argument("--first", type=int, help="begin with this seed (drawn by chance otherwise)")
    words.add_argument("--seeds", type=int, default=0, help="so many seeds (0: as many as there is time)")
    words.add_argument("--seconds", type=float, default=60.0, help="for so long at most")
    words.add_argument("--way", choices=WAYS, action="append", help="these ways of sharing only")
    words.add_argument("--faults", type=int, default=3, help="so many faults in a world at most")
    words.add_argument("--go-on", action="store_true", help="after a failure too; each is told in a line")
    words.add_argument("--no-shrink", action="store_true")
    words.add_argument("--kind", type=share, action="append", metavar="KIND[=SHARE]",
                       help="for --seed and --jobs: minute, hour, trouble, orders, habits, pairs, turns")  # fmt: skip
    words.add_argument("--jobs", type=int, help="so many processes, with worlds of all kinds; needs --out")
    words.add_argument("--out", type=Path, help="for --jobs: failures, and which pairs were played")
    words.add_argument("--before", type=Path, action="append", default=[], help="which pairs were played before")
    asked = words.parse_args()
    ways = tuple(asked.way or WAYS)
    if asked.seed is not None:
        return one(asked.seed, ways, asked.faults, asked.kind[0][0] if asked.kind else "minute")
    first = random.SystemRandom().randrange(1_000_000_000) if asked.first is None else asked.first
    if asked.jobs is not None:
        return many.run(
            asked.jobs, first, asked.seconds, dict(asked.kind or many.SHARES), ways, asked.out, asked.before
        )
    begun, played, virtual, failed = time.monotonic(), 0, 0.0, 0
    while (not asked.seeds or played < asked.seeds) and time.monotonic() < begun + asked.seconds:
        seed = first + played
        plan = draw(seed, ways, asked.faults)
        found = fails(plan)
        played += 1
        virtual += lasted[-1]
        if found is not None:
            failed += 1
            if not asked.go_on:
                return tell(seed, plan, found, shrink=not asked.no_shrink)
            print(f"seed {seed} ({plan.way}): {found[0].splitlines()[0][:160]}", flush=True)
    seconds = time.monotonic() - begun
    print(f"{played} worlds from seed {first}, {virtual / 3600:.2f} node-hours in {seconds:.0f} s, {failed} failed")
    return int(failed > 0)


def share(text: str) -> tuple[str, float]:
    kind, _, parts = text.partition("=")
    if kind not in (*many.KINDS, *many.PAIRS):
        raise ValueError(text)
    return kind, float(parts or many.SHARES.get(kind, 1.0))


def one(seed: int, ways: tuple[str, ...], faults: int, kind: str) -> int:
    draws, make = many.KINDS[kind]
    plan = draw(seed, ways, faults) if kind == "minute" else draws(seed, ways)
    print(plan)
    found = fails(plan, make)
    if found is not None:
        print("\n".join(found[1].story))
        print(f"seed {seed}: {found[0]}")
    return int(found is not None)


def tell(seed: int, plan, found: tuple[str, World], *, shrink: bool) -> int:  # type: ignore[no-untyped-def]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(f"seed {seed} at commit {commit}: {found[0]}")
    if shrink:
        plan = shrunk(plan, found[0], print)
        found = fails(plan) or found
    print(plan)
    print("\n".join(found[1].story[-60:]))
    print(f"seed {seed}: {found[0]}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
