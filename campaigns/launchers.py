#!/usr/bin/env python3
"""Programs that start others, and debuggers, behind the gate: `launchers.py [--only PART,…] [--out DIR]`.

    torchrun          two ranks with max_clients = 2 and totals of two clients
    share             one rank with a total of exactly its own limits, as a Slurm share gives it
    multiprocessing   a parent that asks for the GPU and starts two processes, max_clients = 2
    debuggers         cuda-gdb, compute-sanitizer, ncu; a client of the same user and one of another user come meanwhile

Each part has an agent of its own. As root, with PyTorch, CUDA's compiler and tools and mpsagent importable, on the
first GPU that is visible: three minutes. With --sim the simulator's client stands for each program. launchers.txt
goes to DIR ($OUT). No setting of a GPU is touched. Exit status: how many programs did not do their work. A debugger
that is held or refused with a reason is as it should be.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import facts, parser, place, say_facts, uuids
from campaigns.busy_place import compiled
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Agent, B, Machine, Stage

RANK = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1024, 1024, device="cuda:0") * (dist.get_rank() + 1)
y = (x @ x).sum().cpu()
dist.all_reduce(y)
print("rank", dist.get_rank(), "of", dist.get_world_size(), float(y), flush=True)
time.sleep(3)
dist.barrier()
"""
PARENT = """
import ctypes, time, torch
import torch.multiprocessing as mp
def work(rank):
    x = torch.ones(1024, 1024, device="cuda:0")
    print("child", rank, float((x @ x).sum()), flush=True)
    time.sleep(2)
if __name__ == "__main__":
    print("devices", torch.cuda.device_count(), flush=True)
    print("cuInit", ctypes.CDLL("libcuda.so.1").cuInit(0), flush=True)
    mp.spawn(work, nprocs=2)
    print("parent done", flush=True)
"""
TWO = """
[limits]
active_threads = "50%"
total_active_threads = "100%"
memory_limit = "20G"
total_memory_limit = "40G"
max_clients = 2
"""
SHARE = """
[limits]
active_threads = "30%"
total_active_threads = "30%"
memory_limit = "20G"
total_memory_limit = "20G"
"""
LIMITS = '[limits]\nactive_threads = "50%"\nmemory_limit = "20G"\n'


class Trial:
    """An agent with one server for all users, and what its programs say."""

    def __init__(self, backend: rigs.Backend, base: Path, out: Path, sim: bool) -> None:
        self.backend, self.base, self.sim = backend, base, sim
        self.begun, self.failed = time.monotonic(), 0
        self.file = (out / "launchers.txt").open("w")
        self.devices = "" if sim else f'devices = ["{uuids(False)[0]}"]\n'

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.begun:7.2f}] {text}"
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()

    def stage(self, number: int, policy: str) -> tuple[Stage, Agent]:
        stage = Stage(self.backend, self.base / f"s{number}", Machine(132, 81559))
        stage.policy(policy, extra=f'{self.devices}sharing = "one-server"\n')
        agent = stage.start_agent()
        stage.answering(agent)
        stage.open(agent)
        return stage, agent

    def start(self, stage: Stage, words: Sequence[str], uid: int = A) -> rigs.Started:
        environment = {**stage.rig.environment(self.backend.environment), "CUDA_VISIBLE_DEVICES": "0"}
        environment |= {"HOME": str(self.base), "OMP_NUM_THREADS": "4"}
        if self.sim:
            words = [*self.backend.client, "spin", "3"]
        return stage.rig.run(words, uid=uid, env=environment)

    def follow(self, name: str, started: rigs.Started, agent: Agent, seconds: float, *, must: bool = True) -> None:
        """Wait for a program. Write down what the agent shows meanwhile, and how the program ended."""
        since, seen = time.monotonic(), ""
        while started.process.poll() is None and time.monotonic() < since + seconds:
            shown = json.dumps([agent.api.get("/v1/queue"), agent.api.get("/v1/clients")])
            text = self._short(shown)
            if text != seen:
                seen = text
                self.say(f"   {text[:600]}")
            time.sleep(0.5)
        status = started.process.poll()
        self.say(f"{name}: exit status {status} after {time.monotonic() - since:.1f} s")
        for line in [*started.read().splitlines(), *started.err.read_text(errors="replace").splitlines()][-12:]:
            self.say(f"    {line[:200]}")
        if status is None:
            started.process.kill()
            started.process.wait()
        self.failed += must and status != 0

    def _short(self, shown: str) -> str:
        """What the agent shows of waiting processes and clients, without what changes with each look."""
        queue, clients = json.loads(shown)
        waiting = [[one.get(key) for key in ("user", "reason", "why")] for one in _list(queue)]
        served = [[one.get(key) for key in ("pid", "state", "limits")] for one in _list(clients)]
        return f"waiting {waiting} clients {served}"


def _list(page: dict[str, Any]) -> list[dict[str, Any]]:
    """The first list of objects in a page."""
    for value in page.values():
        if isinstance(value, list) and all(isinstance(one, dict) for one in value):
            return value
    return []


def torchrun(trial: Trial) -> None:
    stage, agent = trial.stage(1, TWO)
    with stage:
        trial.follow("torchrun, two ranks", trial.start(stage, _torchrun(trial, 2)), agent, 45)


def share(trial: Trial) -> None:
    stage, agent = trial.stage(2, SHARE)
    with stage:
        trial.follow("torchrun, one rank, a share of its size", trial.start(stage, _torchrun(trial, 1)), agent, 45)


def _torchrun(trial: Trial, ranks: int) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*words, str(trial.base / "rank.py")]


def multiprocessing(trial: Trial) -> None:
    stage, agent = trial.stage(3, TWO)
    with stage:
        trial.follow("multiprocessing", trial.start(stage, [sys.executable, str(trial.base / "parent.py")]), agent, 45)


def debuggers(trial: Trial) -> None:
    stage, agent = trial.stage(4, LIMITS)
    with stage:
        client = [str(trial.base / "busy_client"), "step", "exit"]
        neighbour = trial.start(stage, client, B)
        debugger = ["cuda-gdb", "-nx", "-batch", "-ex", "set confirm off", "-ex", "run", "--args"]
        programs = {
            "cuda-gdb": debugger,
            "compute-sanitizer": [_tool("compute-sanitizer")],
            "ncu": [_tool("ncu")],
            "ncu --mps client": [_tool("ncu"), "--mps", "client"],
        }
        for name, words in programs.items():
            started = trial.start(stage, ["timeout", "8", *words, *client])
            time.sleep(3)
            other = trial.start(stage, ["timeout", "3", *client])
            trial.follow(name, started, agent, 15, must=False)
            trial.follow("   a client that came meanwhile", other, agent, 10, must=False)
            working = trial.sim or "ready" in other.read()
            trial.say(f"   it worked: {working}; the other user's client goes on: {neighbour.process.poll() is None}")
            trial.failed += not working or (not trial.sim and neighbour.process.poll() is not None)
        for event in agent.news():
            if any(word in json.dumps(event) for word in ("debug", "held", "outside", "refused")):
                trial.say(f"   event {json.dumps(event)[:300]}")


def _tool(name: str) -> str:
    return shutil.which(name) or f"/usr/local/cuda/bin/{name}"


PARTS: dict[str, Callable[[Trial], None]] = {
    "torchrun": torchrun, "share": share, "multiprocessing": multiprocessing, "debuggers": debuggers,
}  # fmt: skip


def main() -> int:
    options = parser(__doc__, 200.0).parse_args()
    with place(options.sim) as (backend, machine, base):
        base.chmod(0o755)
        for name, text in (("rank.py", RANK), ("parent.py", PARENT)):
            (base / name).write_text(text)
            (base / name).chmod(0o644)
        compiled("", base, options.sim)
        trial = Trial(backend, base, options.out or Path(), options.sim)
        say_facts(facts(backend, machine))
        for name in options.only or PARTS:
            try:
                PARTS[name](trial)
            except Exception as error:
                trial.failed += 1
                trial.say(f"{name}: {type(error).__name__}: {error}")
        return trial.failed


if __name__ == "__main__":
    sys.exit(main())
