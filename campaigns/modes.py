#!/usr/bin/env python3
"""What the ways of sharing give on a GPU: `modes.py [--only NAMES] [--gpu 0 | --gpu 1,0] [--sim] [--out DIR]`.

    throughput       four ResNet-50 of two and of four users: together, apart, turns, without MPS, MPS as it is
    latency          three small users beside a heavy one, in every way of sharing
    placement        two GPUs (--gpu 0,1): 40 clients of 8 users by load; a fault on one; one instance for both

On the first GPU named, `placement` on two. Exact limits, totals and leases are scenes (run.py), faults fault_trial.py.

As root, with PyTorch in this Python and mpsagent importable. modes.md and modes.json go to DIR ($OUT) after each part,
and each part says one line that begins with VERDICT. Each has its own time; one that fails or is too slow keeps what it
had, and the next begins. No setting of a GPU is touched, and nothing that was started here is left. Exit status: 0 all
good, 1 not, 2 it could not begin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import modes_gpus, modes_work
from campaigns.begin import facts, parser, place, uuids
from campaigns.gate_place import Out, cell, played
from campaigns.modes_place import Lane

PARTS: dict[str, tuple[Callable[[Lane, Out], None], float]] = {
    "throughput": (modes_work.throughput, 260.0),
    "latency": (modes_work.latency, 170.0),
    "placement": (modes_gpus.placement, 120.0),
}
"""What each may take at most, in seconds."""


def verdict(out: Out) -> list[str]:
    word = "good" if not out.problems else f"NOT GOOD ({len(out.problems)} problems)"
    first = f"VERDICT {out.name}: {word}, {out.seconds} s: {'; '.join(out.said) or 'nothing came out'}"
    return [first, *(f"  problem: {cell(text)[:400]}" for text in out.problems[:8])]


def main() -> int:
    arguments = parser(__doc__, 500.0)
    arguments.add_argument("--gpu", default="0", help="its number, or two of them for placement")
    arguments.add_argument("--quick", action="store_true", help="small counts")
    options = arguments.parse_args()
    names = options.only or list(PARTS)
    if unknown := set(names) - set(PARTS):
        arguments.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    with place(options.sim, 2) as (backend, machine, base):
        there = uuids(options.sim)
        if wrong := [one for one in options.gpu.split(",") if int(one) >= len(there)]:
            arguments.error(f"no GPU {', '.join(wrong)}; there are {len(there)}")
        gpus = tuple(there[int(one)] for one in options.gpu.split(","))
        cores = sorted(os.sched_getaffinity(0))  # what runs beside this on the other GPU has the other half
        cores = cores[len(cores) // 2 :] if there.index(gpus[0]) % 2 else cores[: len(cores) // 2]
        cores = cores[::2] + cores[1::2]  # neighbours may be one core with two threads

        def here(number: int) -> Lane:
            echo = print if options.verbose else None
            return Lane(backend, machine, base / f"p{number}", options.quick or options.sim, echo, gpus, cores)

        about = facts(backend, machine) | {
            "GPUs of this run": f"{', '.join(gpus)} of {len(there)}",
            "parts": ", ".join(names),
        }
        parts = {name: PARTS[name] for name in names}
        return played(options, "modes", "Ways of sharing on a GPU", about, parts, here, verdict)


if __name__ == "__main__":
    sys.exit(main())
