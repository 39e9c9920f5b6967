"""``make bench``: the figures of this machine, each with its aim and beside something measured in the same run.

It says what it measures and fails on nothing: how long things take is no test. MPS and the GPU are simulated here;
docs/measured.md has the figures of real ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import api, change, crowd, flooded, handover, history, pure, rest, several, start, system, users
from benchmarks.figure import Figure, markdown, text_table

MEASURES = {
    "lines": pure.log_lines,
    "decisions": pure.decisions,
    "history": history.a_year,
    "handover": handover.hand_over,
    "silent": handover.silent,
    "crowd": crowd.crowd,
    "rest": rest.at_rest,
    "several": several.several,
    "users": users.many_users,
    "gaps": change.gaps,
    "start": start.starting,
    "requests": api.requests,
    "flooded": flooded.flooded,
    "service": system.as_a_service,
}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "measured" / "bench.md"
BEGIN, END = "<!-- bench: written by benchmarks/bench.py --record -->", "<!-- end of bench -->"
PURE = ("lines", "decisions", "history")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure, and print figures beside their aims.")
    parser.add_argument("--quick", action="store_true", help="shorter and coarser, about a minute")
    parser.add_argument("--only", choices=sorted(MEASURES), action="append", help="only these (may be repeated)")
    parser.add_argument("--out", type=Path, help="write the table as Markdown, too")
    parser.add_argument("--record", action="store_true", help="put the table into docs/measured/bench.md")
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        print("Clients of several users need root: only what needs no clients is measured.")
    began, figures = time.monotonic(), list[Figure]()
    for name, measure in MEASURES.items():
        if chosen.only and name not in chosen.only:
            continue
        if os.geteuid() != 0 and name not in PURE:
            continue
        print(f"measuring: {name} …", file=sys.stderr, flush=True)
        figures += measure(chosen.quick)
    about = (
        f"Measured {time.strftime('%Y-%m-%d')} in {time.monotonic() - began:.0f} s on {os.cpu_count()} cores "
        f"({platform.machine()}), Python {platform.python_version()}, load {os.getloadavg()[0]:.1f} at the end; MPS "
        "and the GPU simulated."
    )
    print(about, text_table(figures), sep="\n\n")
    if chosen.out is not None:
        chosen.out.write_text(markdown(figures, about))
    if chosen.record:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{markdown(figures, about)}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
