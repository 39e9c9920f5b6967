#!/usr/bin/env python3
"""How many steps three things take through the code: `walks.py [--out DIR]`, as root, on the simulator.

    client   a client's connection to its context, in its user's turn
    turn     a turn that ends by time, from the next user's wait to the end of a client
    status   mpsagent-cli status, and what api and agent do for it

A step is a call from a function of one file of mpsagent into one of another file, counted once; what lies between them
in libraries is left out, and so is what goes on without the walk. Prints steps and files of each walk, and writes the
steps to DIR/walks.txt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import parser, place
from tests.scenes.stage import A, B, Stage

Step = tuple[str, ...]

WATCH = """
import json, os, signal, sys, threading
place, steps, on = os.environ["WALKS"], {}, os.environ.get("WALKS_FROM_THE_START") == "1"
def call(frame, event, _):
    code = frame.f_code
    if not on or event != "call" or "/mpsagent/" not in code.co_filename or code.co_name[0] == "<":
        return
    above = frame.f_back
    while above is not None and "/mpsagent/" not in above.f_code.co_filename:
        above = above.f_back
    if above is not None and above.f_code.co_filename != code.co_filename:
        names = [f"{one.co_filename.rpartition('/mpsagent/')[2]}::{one.co_name}" for one in (above.f_code, code)]
        steps.setdefault(tuple(names))
def write():
    with open(f"{place}/{os.getpid()}.json", "w") as file:
        json.dump(list(steps), file)
def toggle(*_):
    global on
    on = not on
    steps.clear() if on else write()
if on:
    import atexit
    atexit.register(write)
signal.signal(signal.SIGUSR2, toggle)
threading.setprofile(call)
sys.setprofile(call)
"""
POLICY = '[limits]\nactive_threads = "40%"\n[turn]\ntime_limit = "5s"\ngrace = "1s"\n'


class Watched(Stage):
    """Gate, agent and api tell of calls from one file into another while they are asked to (SIGUSR2)."""

    @property
    def told(self) -> Path:
        """Where they write, the api as a user of its own."""
        return self.place / "walks"

    def python_environment(self) -> dict[str, str]:
        found = super().python_environment()
        found["PYTHONPATH"] = f"{self.told}:{found['PYTHONPATH']}"
        return {**found, "WALKS": str(self.told)}

    def walk(self, does: Callable[[], object]) -> list[Step]:
        """The steps of all processes while this is done, each process's in their order."""
        pids = [one.pid for one in self.rig.ours() if b"WALKS=" in Path(f"/proc/{one.pid}/environ").read_bytes()
                and "mpsagent" in one.arguments and " keep" not in one.arguments]  # fmt: skip
        self._tell(pids)
        does()
        self._tell(pids)
        paths = sorted(self.told.glob("[0-9]*.json"))
        steps = [tuple(step) for path in paths for step in json.loads(path.read_text())]
        for path in paths:
            path.unlink()
        return list(dict.fromkeys(steps))

    def _tell(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        time.sleep(0.3)


def main() -> int:
    options = parser(__doc__, 120.0).parse_args()
    with place(True) as (backend, machine, base), Watched(backend, base / "s", machine) as stage:
        stage.told.mkdir(parents=True)
        stage.told.chmod(0o777)
        (stage.told / "sitecustomize.py").write_text(WATCH)
        agent = stage.with_agent(POLICY, server="shared")
        first = stage.client(A, "sleep", 600)
        first.known()
        time.sleep(3.0)
        idle = set(stage.walk(lambda: time.sleep(20.0)))  # with each look that comes by itself, of 15 s at most
        walks = {"client": stage.walk(lambda: stage.client(A, "sleep", 600).working())}
        waiting = stage.client(B, "sleep", 600)
        waiting.queued()
        walks["turn"] = stage.walk(first.ended)
        os.environ["WALKS_FROM_THE_START"] = "1"
        walks["status"] = stage.walk(lambda: stage.cli(agent, "status"))
        lines = []
        for name, seen in walks.items():
            steps = [step for step in seen if step not in idle]
            files = {end.split("::")[0] for step in steps for end in step}
            print(f"{name}: {len(steps)} steps in {len(files)} files", flush=True)
            lines += [
                f"== {name}",
                *(f"{number} {before} -> {after}" for number, (before, after) in enumerate(steps, 1)),
            ]
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "walks.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
