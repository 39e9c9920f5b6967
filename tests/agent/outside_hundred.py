"""Programs outside MPS in a rush: `python -m tests.agent.outside_hundred`, as root, on the simulator.

A hundred of them, each of 3 s, come beside as many that pass the gate. Prints who was found, who wrongly, how long that
took from a program's start to its record, and the agent's CPU time while nothing happened.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from mpsagent.system.processes import Process
from tests.agent.stage import A, B, C, Stage
from tests.scenes.stage import backend_of

MANY = 100
WAVE = 5
IDLE = 60.0


def main() -> int:
    place = Path(tempfile.mkdtemp(prefix="mpsh", dir="/tmp"))
    place.chmod(0o755)
    try:
        with backend_of("sim", place) as (backend, machine), Stage(backend, place / "s", machine, quick=True) as stage:
            return hundred(stage)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def hundred(stage: Stage) -> int:
    agent = stage.with_agent('[limits]\nthreads = 5\n[switch]\nafter = "never"\n')
    process = Process.open(agent.pid)
    assert process is not None
    stage.until(lambda: agent.api.status()["devices"][0]["seen"], "the first look is over")
    time.sleep(5)
    before = process.cpu_seconds() or 0.0
    time.sleep(IDLE)
    idle = ((process.cpu_seconds() or 0.0) - before) / IDLE
    inside, outside = [], []
    for number in range(MANY):
        inside.append(stage.client(A if number < MANY / 2 else C, "sleep", 3))
        outside.append(stage.client(B, "sleep", 3, CUDA_MPS_PIPE_DIRECTORY="/nonexistent"))
        if number % WAVE == WAVE - 1:  # more at a time than two cores can start would only wait for each other
            for client in outside[-WAVE:]:
                client.ended()
    for client in inside:
        client.ended()
    time.sleep(5)
    found = {one["pid"]: one for one in stage.records("bypass")}
    wrong = [pid for pid in found if pid not in {client.pid for client in outside}]
    late = sorted(one["at"] - one["began"] for one in found.values() if one["began"])
    print(f"outside: {MANY}, found {len(found) - len(wrong)}, wrongly {len(wrong)}, beside {MANY} inside")
    print(f"seconds from a program's start to its record: median {late[len(late) // 2]:.2f}, most {late[-1]:.2f}")
    print(f"the whole agent while nothing happens: {100 * idle:.3f} % of a core in {IDLE:g} s")
    print(f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    return int(len(found) - len(wrong) != MANY or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
