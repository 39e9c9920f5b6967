"""What it costs to kill a server before it is Ready: who waits for it is served by the next one, or fails.

``python3 tests/gpu/kill_starting.py --out DIR [--rounds 15] [--backend sim]`` plays one change of user after the other;
each time so many milliseconds after the new server's ``Starting new server`` line something is done, and prints how the
waiting client fared. Manners: ``alone``: the server is killed; ``asked``: and then a front-end sets the defaults;
``late``: it sets them without a kill; ``plain``: nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance.rig import Rig, real_backend, sim_backend
from tests.conformance.script import A, B

DELAYS = (0.0, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.05)
ASKED = "set_default_active_thread_percentage 10\nset_default_device_pinned_mem_limit 0 2G"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--backend", choices=("real", "sim"), default="real")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--delays", type=float, nargs="*", default=DELAYS, help="seconds")
    parser.add_argument("--cycles", nargs="*", default=["alone", "asked"], help="manners, one for each round in turn")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="mps"))
    base.chmod(0o755)
    backend = real_backend(base) if chosen.backend == "real" else sim_backend(base)
    rig = Rig(backend, base / "starts")
    rig.start("-d")
    try:
        for cycle in chosen.cycles:
            manners = cycle.split(",")
            for delay in chosen.delays:
                found: Counter[str] = Counter()
                for number in range(chosen.rounds):
                    for step, manner in enumerate(manners):
                        outcome = one_round(rig, number * len(manners) + step, delay, manner)
                        found[f"{manner}: {outcome}"] += 1
                print(
                    f"{cycle} {delay * 1000:5.1f} ms: {dict(found)}; daemon's descriptors {descriptors(rig)}",
                    flush=True,
                )
    finally:
        left = rig.end()
        (chosen.out / "transcript.txt").write_text("\n".join(rig.transcript))
    print("left behind:", left or "nothing")
    return 0


def descriptors(rig: Rig) -> str:
    """Which the control daemon has, and what they are."""
    found = []
    for path in sorted(Path(f"/proc/{rig.daemon()}/fd").iterdir(), key=lambda path: int(path.name)):
        with suppress(OSError):
            found.append(f"{path.name}={os.readlink(path).split('/')[-1]}")
    return " ".join(found)


def one_round(rig: Rig, number: int, delay: float, manner: str) -> str:
    user = (A, B)[number % 2]
    rig.note(f"==== {manner} {delay} {number}")
    rig.skip_log()
    client = rig.spawn(user, "query")
    found = rig.wait_log(rf"Starting new server (\d+) for user {user}$", 3)
    if found is None:
        rig.wait(client, 5)
        return "no new server"
    if delay:
        time.sleep(delay)
    began = time.monotonic()
    if manner in ("alone", "asked"):
        rig.signal(int(found[1]), SIGKILL, "server")
    if manner in ("asked", "late"):
        rig.finish(rig.begin(ASKED), 5)
    code = rig.wait(client, 5)
    rig.delay("served", time.monotonic() - began)
    outcome = "served" if code == 0 else f"exit status {code}"
    words = [line for line in rig.clients[client].read().splitlines() if "MPS" in line]
    rig.note(f"descriptors {descriptors(rig)}")
    rig.drain()
    if code != 0:  # its server hangs on it (X15) until it is killed too
        outcome += f" {re.sub('.*CUDA_ERROR_', '', words[0]) if words else ''}"
        rig.signal(client, SIGKILL)
        again = rig.server(1)
        if again:
            rig.signal(again, SIGKILL, "its server")
    return outcome


if __name__ == "__main__":
    raise SystemExit(main())
