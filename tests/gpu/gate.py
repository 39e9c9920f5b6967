#!/usr/bin/env python3
"""What the gate must show on a GPU: `gate.py [--only NAMES] [--quick] [--sim] [--seconds 470] [--out DIR]`.

    frameworks  PyTorch, JAX and CuPy of three users: multiprocessors, and out of memory at the limit
    throughput  ResNet-50 behind the gate against a bare daemon
    gaps        a change of user after 3, 6, 10 and 20 s
    namespaces  clients in namespaces of their own
    hostile     500 connections that mean no good; 2,000 clients that wait
    forged      10,000 forged lines in each log
    pause       two users train in slices; only where it is named: PAUSE_SECONDS and PAUSE_SLICE say how long
    processor   processor time of agent and gate while eight clients work, on a machine that does nothing else; the same
    cost        one block and ResNet-50 behind the gate against a bare daemon; processor time; only where it is named
    outside     100 programs of 3 s outside MPS beside 100 inside, memory beside nvidia-smi; only where it is named
    ladder      ending one of two clients that compute, and a fault, on a shared server

As root, with PyTorch, JAX and CuPy in this Python and mpsagent importable. gate.md and gate.json go to DIR ($OUT) after
each part. Each part has its own time; one that fails or is too slow keeps what it had, and the next begins. No setting
of the GPU is touched, and nothing that was started here is left. Exit status: 0 all as it should be, 1 not, 2 it could
not begin.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance import rig as rigs
from tests.gpu import gate_cost, gate_outside, gate_pause
from tests.gpu import gate_trouble as trouble
from tests.gpu import gate_work as work
from tests.gpu.gate_place import Here, Out
from tests.gpu.run import Broken, break_off, facts
from tests.scenes.stage import backend_of

PARTS: dict[str, tuple[Callable[[Here, Out], None], float]] = {
    "frameworks": (work.frameworks, 130.0),
    "throughput": (work.throughput, 150.0),
    "gaps": (work.gaps, 150.0),
    "namespaces": (trouble.namespaces, 40.0),
    "hostile": (trouble.hostile, 90.0),
    "forged": (trouble.forged, 70.0),
    "ladder": (trouble.ladder, 50.0),
    "pause": (gate_pause.pause, 900.0),
    "cost": (gate_cost.cost, 150.0),
    "processor": (gate_cost.processor, 60.0),
    "outside": (gate_outside.outside, 150.0),
}
"""What each may take at most, in seconds."""
ORDER = ("ladder", "namespaces", "frameworks", "forged", "gaps", "throughput", "hostile")
NAMED = ("pause", "cost", "processor", "outside")


def play(name: str, part: Callable[[Here, Out], None], here: Here, limit: float) -> Out:
    out = Out(name)
    since = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        with here:
            part(here, out)
    except Broken as error:
        out.wrong(f"broken off: {error}")
    except BaseException as error:
        out.wrong(f"broken off: {type(error).__name__}: {str(error)[:400]}")
        out.raw["traceback"] = traceback.format_exc()[-6000:]
        if isinstance(error, SystemExit):
            Broken.all = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if here.left:
        out.wrong(f"left behind: {here.left}")
    if out.problems:
        out.raw["logs"] = here.last_words[-30000:]
    out.seconds = round(time.monotonic() - since, 1)
    return out


def write(directory: Path | None, name: str, title: str, about: dict[str, str], outs: list[Out]) -> None:
    """``name``.md and ``name``.json."""
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"# {title}", "", *(f"- {key}: {value}" for key, value in about.items())]
    for out in outs:
        lines += ["", *out.markdown()]
    (directory / f"{name}.md").write_text("\n".join(lines) + "\n")
    parts = [out.json() for out in outs]
    (directory / f"{name}.json").write_text(json.dumps({"about": about, "parts": parts}, indent=1, default=str))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"with commas, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small counts")
    parser.add_argument("--sim", action="store_true", help="on the simulator; frameworks are stand-ins")
    parser.add_argument("--seconds", type=float, default=470.0, help="for everything together")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    asked = list(filter(None, options.only.split(",")))
    names = [name for name in (*ORDER, *NAMED) if name in (asked or ORDER)]
    if unknown := set(asked) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if os.getuid() != 0:
        print("clients of several users are started here: run this as root", file=sys.stderr)
        return 2
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, break_off)
    end = time.monotonic() + options.seconds
    base = Path(tempfile.mkdtemp(prefix="mpsg", dir="/tmp"))  # short: a socket's path has 108 bytes
    outs: list[Out] = []
    kind = "sim" if options.sim else "real"
    try:
        with backend_of(kind, base) as (backend, machine):
            about = facts(backend, machine)
            print("\n".join(f"# {key}: {value}" for key, value in about.items()), flush=True)
            for name in names:
                left = end - time.monotonic() - 8
                if Broken.all or left < 10:
                    print(f"ANSWER {name}: not begun, {left:.0f} s left", flush=True)
                    continue
                here = Here(backend, machine, base / name[:2], options.quick, print if options.verbose else None)
                out = play(name, PARTS[name][0], here, min(PARTS[name][1], left))
                outs.append(out)
                print("\n".join(out.answers()), flush=True)
                write(options.out, "gate", "The gate on a GPU", about, outs)
    except rigs.RigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if len(outs) == len(names) and not any(out.problems for out in outs) else 1


if __name__ == "__main__":
    sys.exit(main())
