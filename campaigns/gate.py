#!/usr/bin/env python3
"""What the gate must show on a GPU: `gate.py [--only NAMES] [--quick] [--sim] [--seconds 470] [--out DIR]`.

    frameworks  PyTorch, JAX and CuPy of three users: multiprocessors, and out of memory at the limit
    namespaces  clients in namespaces of their own
    cost        one block and ResNet-50 behind the gate against a bare daemon; processor time of agent and gate
    processor   that time while eight clients work, on a machine that does nothing else; only where it is named
    pause       two users train in slices; only where it is named: PAUSE_SECONDS and PAUSE_SLICE say how long
    outside     100 programs of 3 s outside MPS beside 100 inside, memory beside nvidia-smi; only where it is named
    use         what two users make of the GPU, in each way, beside NVML's own figures; only where it is named

What else is to be shown is a scene (run.py) or an attack (hostile.py).

As root, with PyTorch, JAX and CuPy in this Python and mpsagent importable. gate.md and gate.json go to DIR ($OUT) after
each part. Each part has its own time; one that fails or is too slow keeps what it had, and the next begins. No setting
of the GPU is touched, and nothing that was started here is left. Exit status: 0 all as it should be, 1 not, 2 it could
not begin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import gate_cost, gate_outside, gate_pause, gate_use, gate_work
from campaigns.begin import facts, parser, place
from campaigns.gate_place import Here, Out, played

PARTS: dict[str, tuple[Callable[[Here, Out], None], float]] = {
    "namespaces": (gate_work.namespaces, 40.0),
    "frameworks": (gate_work.frameworks, 130.0),
    "cost": (gate_cost.cost, 150.0),
    "pause": (gate_pause.pause, 900.0),
    "processor": (gate_cost.processor, 150.0),
    "outside": (gate_outside.outside, 150.0),
    "use": (gate_use.use, 240.0),
}
"""What each may take at most, in seconds."""
USUAL = ("namespaces", "frameworks", "cost")


def main() -> int:
    arguments = parser(__doc__, 470.0)
    arguments.add_argument("--quick", action="store_true", help="small counts")
    options = arguments.parse_args()
    if unknown := set(options.only) - set(PARTS):
        arguments.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    names = [name for name in PARTS if name in (options.only or USUAL)]
    with place(options.sim) as (backend, machine, base):

        def here(number: int) -> Here:
            return Here(backend, machine, base / f"p{number}", options.quick, print if options.verbose else None)

        about = facts(backend, machine)
        return played(options, "gate", "The gate on a GPU", about, {name: PARTS[name] for name in names}, here)


if __name__ == "__main__":
    sys.exit(main())
