#!/usr/bin/env python3
"""What `mpsagent-cli run` costs a program at its start: `run_cost.py [--sim] [--seconds 25] [--out DIR]`, as root.

`run -- python3 -c pass` against `python3 -c pass`, by turns, beside an agent: the processor's time of all that was
started, and the time until the end. One that does not wait for the GPU: what `run` does while it waits is no cost of
the program. In DIR: run-cost.txt. Exit status: 0 below the aim, 1 not, 2 it cannot begin.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import facts, parser, place
from tests.scenes.stage import Stage

AIM = 0.060
"""Seconds of processor time."""
ONE = [sys.executable, "-c", "pass"]


def took(words: list[str]) -> tuple[float, float]:
    """Processor time, and time."""
    since = time.monotonic()
    pid = os.posix_spawn(words[0], words, os.environ)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{words} ended with {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime, time.monotonic() - since


def main() -> int:
    options = parser(__doc__, 25.0).parse_args()
    with place(options.sim) as (backend, machine, base), Stage(backend, base / "stage", machine) as stage:
        about = facts(backend, machine)
        agent = stage.with_agent("", extra='sharing = "one-server"')
        os.environ |= {"MPSAGENT_SOCKET": str(agent.api.path), "PYTHONPATH": stage.python_environment()["PYTHONPATH"]}
        run = [sys.executable, "-c", "from mpsagent.cli.main import main; main()", "run", "--", *ONE]
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(3):  # files come into the page cache
            took(run)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            found[True].append(took(run))
            found[False].append(took(ONE))
        middle = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in found.items()}
    cost = middle[True][0] - middle[False][0]
    text = "\n".join([
        *(f"# {key}: {value}" for key, value in about.items()),
        f"# load: {os.getloadavg()[0]:.1f}",
        *(f"{'with run' if way else 'alone   '}: {len(found[way])} times, {1e3 * middle[way][0]:.1f} ms of the "
          f"processor, {1e3 * middle[way][1]:.1f} ms in all (medians)" for way in (False, True)),
        f"mpsagent-cli run costs {1e3 * cost:.1f} ms of the processor, aim below {1e3 * AIM:.0f}",
        "",
    ])  # fmt: skip
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "run-cost.txt").write_text(text)
    print(text)
    return int(cost >= AIM)


if __name__ == "__main__":
    sys.exit(main())
