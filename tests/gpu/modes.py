#!/usr/bin/env python3
"""What the ways of sharing give on a GPU: `modes.py [--only NAMES] [--gpu 0 | --gpu 1,0] [--sim] [--out DIR]`.

    throughput       four ResNet-50 of two and of four users: together, apart, turns, without MPS, MPS as it is
    latency          three small users beside a heavy one, in every way of sharing
    together         200 clients of three users at once, each exactly its own limits
    apart            the same
    apart-faults     100 illegal accesses of one user, two others compute all the while
    together-faults  the same faults: who is hit, who is held, how long
    totals           500 clients of users with totals: the sum is never over
    leases           jobs with 30 % of users with 60 %
    placement        two GPUs (--gpu 0,1): 40 clients of 8 users by load; a fault on one; one instance for both

On the first GPU named, `placement` on two. For a machine with two GPUs in about seven minutes, beside each other:

    modes.py --gpu 0 --only throughput,together,together-faults,totals --out A
    modes.py --gpu 1,0 --only latency,apart,apart-faults,leases,placement --out B

As root, with PyTorch in this Python and mpsagent importable. modes.md and modes.json go to DIR ($OUT) after each part,
and each part says one line that begins with VERDICT. Each has its own time; one that fails or is too slow keeps what it
had, and the next begins. No setting of a GPU is touched, and nothing that was started here is left. Exit status: 0 all
good, 1 not, 2 it could not begin.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpsagent.sim import gpu
from tests.conformance import rig as rigs
from tests.gpu import modes_gpus, modes_limits, modes_work
from tests.gpu.gate import play, write
from tests.gpu.gate_place import Out
from tests.gpu.modes_place import Lane
from tests.gpu.run import Broken, break_off, facts
from tests.scenes.stage import look_at

PARTS: dict[str, tuple[Callable[[Lane, Out], None], float]] = {
    "throughput": (modes_work.throughput, 260.0),
    "latency": (modes_work.latency, 170.0),
    "together": (modes_limits.rushes("together"), 90.0),
    "apart": (modes_limits.rushes("apart"), 90.0),
    "apart-faults": (modes_limits.apart_faults, 190.0),
    "together-faults": (modes_limits.together_faults, 120.0),
    "totals": (modes_limits.totals, 170.0),
    "leases": (modes_limits.leases, 75.0),
    "placement": (modes_gpus.placement, 120.0),
}
"""What each may take at most, in seconds."""


def uuids(simulated: bool) -> list[str]:
    if simulated:
        return [device.uuid for device in gpu.machine(2)]
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def verdict(out: Out) -> str:
    word = "good" if not out.problems else f"NOT GOOD ({len(out.problems)} problems)"
    return f"VERDICT {out.name}: {word}, {out.seconds} s: {'; '.join(out.said) or 'nothing came out'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"with commas, of {', '.join(PARTS)}")
    parser.add_argument("--gpu", default="0", help="its number, or two of them for placement")
    parser.add_argument("--sim", action="store_true", help="on the simulator, small counts; PyTorch has stand-ins")
    parser.add_argument("--quick", action="store_true", help="small counts")
    parser.add_argument("--seconds", type=float, default=500.0, help="for everything together")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    names = list(filter(None, options.only.split(","))) or list(PARTS)
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}")
    if os.getuid() != 0:
        print("clients of several users are started here: run this as root", file=sys.stderr)
        return 2
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, break_off)
    end = time.monotonic() + options.seconds
    base = Path(tempfile.mkdtemp(prefix="mpsm", dir="/tmp"))  # short: a socket's path has 108 bytes
    base.chmod(0o755)
    outs: list[Out] = []
    try:
        there = uuids(options.sim)
        gpus = tuple(there[int(one)] for one in options.gpu.split(","))
        backend = rigs.sim_backend(base, 2) if options.sim else rigs.real_backend(base)
        machine, _ = look_at(backend, base / "look")
        cores = sorted(os.sched_getaffinity(0))  # what runs beside this on the other GPU has the other half
        cores = cores[len(cores) // 2 :] if there.index(gpus[0]) % 2 else cores[: len(cores) // 2]
        cores = cores[::2] + cores[1::2]  # neighbours may be one core with two threads
        about = facts(backend, machine) | {
            "GPUs of this run": f"{', '.join(gpus)} of {len(there)}",
            "parts": ", ".join(names),
        }
        print("\n".join(f"# {key}: {value}" for key, value in about.items()), flush=True)
        for place, name in enumerate(names):
            left = end - time.monotonic() - 8
            if Broken.all or left < 10:
                print(f"VERDICT {name}: not begun, {left:.0f} s left", flush=True)
                continue
            echo = print if options.verbose else None
            here = Lane(backend, machine, base / f"p{place}", options.quick or options.sim, echo, gpus, cores)
            part, most = PARTS[name]
            out = play(name, part, here, min(most, left))  # type: ignore[arg-type]
            outs.append(out)
            print(verdict(out), flush=True)
            print(
                "".join(f"  problem: {' '.join(text.split())[:400]}\n" for text in out.problems[:8]), end="", flush=True
            )
            write(options.out, "modes", "Ways of sharing on a GPU", about, outs)
    except (rigs.RigError, IndexError, ValueError, OSError) as error:
        print(f"it could not begin: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(base, ignore_errors=True)
    return 0 if len(outs) == len(names) and not any(out.problems for out in outs) else 1


if __name__ == "__main__":
    sys.exit(main())
