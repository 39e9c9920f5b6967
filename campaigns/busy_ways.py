#!/usr/bin/env python3
"""Ends of single clients on busy GPUs through mpsagent, in each way that ends one client: is a neighbour lost?

    busy_ways.py --seconds 270 [--gpus 4] [--first 0] [--ways order,run-term] [--turns] [--out DIR]
    busy_ways.py --sim --seconds 60

Each GPU has an agent of its own with all users on one server, the fourteen neighbours of busy_ends.py, and victims that
end every `--gap` seconds by

    order       `terminate`                     run-term, run-int   SIGTERM, Ctrl-C to `mpsagent-cli run`
    runtime     `kill` of mpsagent-runtime             max-runtime         max_runtime, 8 s
    over        on_limit_exceeded, partitioning by context   relayed   `terminate` of a client behind a relay

`--ways plain-int,plain-term,plain-kill`: Ctrl-C, SIGTERM and SIGKILL of programs that are not started by `mpsagent-cli
run`, as a control: mpsagent cannot protect the neighbours then. `--crowd light`: three neighbours of the same user.

At the end a drain ends all clients at once, and a new client must be served. `--turns`: users have turns on one server
instead. Each turn's end ends six clients at work, and idle_timeout ends six idle clients of a third user before that.

Played with another checkout (its campaigns directory needs the files busy_*), it shows what that edition does:
edition 170b9b80 must lose neighbours. Needs root, PyTorch, nvcc and mpsagent's dependencies. DIR gets ways.jsonl,
busy-ways.md and agents.tgz. Exit status: 0 no neighbour was lost, 1 one was, 2 it could not begin.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import uuids
from campaigns.busy_place import ALICE, BOB, CROWDS, FAULT, Program, Programs, add_options, end_all, facts, lanes
from tests.conformance import rig as rigs
from tests.scenes.stage import AS_USER, REPOSITORY, Agent, Machine, Stage

ERIN, FRANK, GRACE, HEIDI = 20005, 20006, 20007, 20008
"""Users with max_runtime, with on_limit_exceeded, with a relay, and with idle_timeout."""
USER_OF = {"max-runtime": ERIN, "over": FRANK, "relayed": GRACE}
WAYS = ["order", "run-term", "run-int", "runtime", *USER_OF]
BY_ITSELF = ("max-runtime", "over")
"""Ways in which the agent ends a victim by itself."""
PARTITIONING = {"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING": "1"}
IN_CGROUP = """
import os, sys
place, uid, *words = sys.argv[1:]
open(place, "w").write(str(os.getpid()))
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
os.execv(words[0], words)
"""
POLICY = f"""
[limits]
active_threads = '50%'
memory_limit = "6G"
[user.{ERIN}]
max_runtime = "8s"
[user.{FRANK}]
on_limit_exceeded = "terminate"
[timeouts]
sigkill_delay = "5s"
"""
TURNS = f"""
[turn]
time_limit = "5s"
grace = "1s"
[limits]
memory_limit = "6G"
[user.{HEIDI}]
idle_timeout = "2s"
[timeouts]
sigkill_delay = "5s"
"""
WORKS = [
    ("graph", "exit"), ("torch", "exit"), ("queue", "exit"), ("graph", "stay"), ("small", "exit"), ("torch", "exit"),
    ("copy", "exit"), ("graph", "exit"), ("endless", "exit"),
]  # fmt: skip
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "kill": signal.SIGKILL}
TOO_LONG = 40.0
"""Seconds after which a victim counts as not ended."""


class Lane:
    """One agent on one GPU, its neighbours and victims."""

    def __init__(self, options: argparse.Namespace, uuid: str) -> None:
        self.options, self.number, self.uuid = options, options.first + options.lane, uuid
        self.base = options.base / f"w{self.number}"
        self.base.mkdir(mode=0o755)
        self.backend = rigs.sim_backend(self.base) if options.sim else rigs.real_backend(self.base)
        self.stage = Stage(self.backend, self.base / "s0", Machine(132, 81559))
        self.agent: Agent | None = None
        self.programs: Programs | None = None
        self.neighbours: list[Program] = []
        self.pool: list[tuple[str, Program]] = []
        self.ending: list[tuple[str, Program, float]] = []
        works = [(kind, "exit") for kind in options.works] or WORKS
        self.works = itertools.islice(itertools.cycle(works), self.number, None)
        self.file = (options.out / f"ways-{self.number}.jsonl").open("a")
        self.stages, self.stopped, self.logged = itertools.count(1), itertools.count(), 0
        top = Path("/sys/fs/cgroup")
        self.cgroups = top if (top / "cgroup.controllers").exists() else top / "pids"
        self.containers: dict[int, Path] = {}
        """Cgroups of those that are ended by the container's runtime."""

    def say(self, text: str) -> None:
        print(f"[{time.time() % 1000:7.2f} gpu {self.number}] {text}", flush=True)

    def write(self, **fields: Any) -> None:
        self.file.write(json.dumps({"gpu": self.number, "at": round(time.time(), 3), "lost": 0, **fields}) + "\n")
        self.file.flush()

    # what runs there

    def open(self, policy: str, extra: str) -> tuple[Agent, Programs]:
        since, number = time.time(), next(self.stages)
        self.stage = Stage(self.backend, self.base / f"s{number}", Machine(132, 81559))
        devices = "" if self.options.sim else f'devices = ["{self.uuid}"]\n'
        self.stage.policy(policy, extra=f"{devices}{extra}")
        self.agent = agent = self.stage.start_agent()
        self.stage.answering(agent)
        self.stage.open(agent)
        sim = self.backend.client if self.options.sim else ()
        environment = self.stage.rig.environment(self.backend.environment)
        self.programs = programs = Programs(self.base / f"p{number}", self.options.client, environment, sim)
        programs.loaded()
        self.say(f"the agent is at work after {time.time() - since:.1f} s")
        self.logged = 0
        return agent, programs

    def relay(self) -> None:
        """A process of GRACE through which others of hers come."""
        place = self.stage.place / "relay"
        place.mkdir()
        os.chown(place, GRACE, GRACE)
        program = place / "user_relay.py"
        shutil.copy(REPOSITORY / "tests/conformance" / program.name, program)
        program.chmod(0o644)
        python = rigs.other_users_python(GRACE)
        command = [python, "-S", "-E", str(program), "relay", str(place), str(self.stage.rig.pipe / "control")]
        self.stage.rig.run(command, uid=GRACE)

    def close(self) -> None:
        everything = [*self.neighbours, *(one for _, one in self.pool), *(one for _, one, _ in self.ending)]
        self.neighbours, self.pool, self.ending = [], [], []
        end_all(everything)
        if self.programs is not None:
            self.programs.end()
            kept = self.options.base / "agents"
            kept.mkdir(exist_ok=True)
            name = f"{self.number}-{self.stage.place.name}"
            for agent in self.stage.agents:
                (kept / f"agent-{name}.log").write_text(agent.log()[-4_000_000:])
            for log in ("server", "control"):
                with contextlib.suppress(OSError):
                    shutil.copy(self.stage.rig.log / f"{log}.log", kept / f"{log}-{name}.log")
        self.stage.end()
        if self.stage.left:
            self.say(f"left behind: {self.stage.left}")
        self.programs, self.agent = None, None

    # victims

    def victim(self, way: str, agent: Agent, programs: Programs) -> Program:
        kind, on_error = next(self.works)
        uid = USER_OF.get(way, ALICE)
        if way.startswith("run-"):
            words = ["run", "--", *programs.command(kind, on_error)]
            command = [sys.executable, "-c", AS_USER, str(uid), str(agent.api.path), *words]
            environment = {**programs.environment, "PYTHONPATH": self.stage.python_environment()["PYTHONPATH"]}
            child = self.stage.rig.run(command, env=environment)
            pid = child.process.pid
            return Program(pid, os.pidfd_open(pid), kind, on_error, child.out, child=child.process)
        if way == "over":
            return programs.start(uid, "graph" if kind == "torch" else kind, on_error, more=PARTITIONING)
        if way == "relayed":
            more = {"CUDA_MPS_PIPE_DIRECTORY": str(self.stage.place / "relay")}
            return programs.start(uid, "graph" if kind == "torch" else kind, on_error, more=more)
        if way == "runtime":
            return self.contained(programs.command(kind, on_error), uid, kind, on_error, programs)
        return programs.start(uid, kind, on_error)

    def contained(self, command: Sequence[str], uid: int, kind: str, on_error: str, programs: Programs) -> Program:
        """A program in a cgroup of its own from its first instruction, as a container's process is."""
        cgroup = self.cgroups / f"{self.options.base.name}-{self.number}-{next(self.stopped)}"
        cgroup.mkdir()
        words = [sys.executable, "-c", IN_CGROUP, str(cgroup / "cgroup.procs"), str(uid), *command]
        child = self.stage.rig.run(words, env=programs.environment)
        pid = child.process.pid
        self.containers[pid] = cgroup
        return Program(pid, os.pidfd_open(pid), kind, on_error, child.out, child=child.process)

    def begin(self, way: str, one: Program, agent: Agent) -> None:
        """Do what ends this victim."""
        if way in ("order", "relayed"):
            status, answer = agent.api.order("terminate", pid=one.pid)
            if status != 200:
                self.say(f"the order for {one.pid} is refused: {answer}")
        elif way == "runtime":
            self.kill_container(one, agent)
        else:
            one.send(SIGNALS[way.rpartition("-")[2]])
        self.ending.append((way, one, time.time()))

    def kill_container(self, one: Program, agent: Agent) -> None:
        """`kill` of mpsagent-runtime in front of a runtime that only sends the signal."""
        place = self.base / "containers"
        runtime, settings, name = place / "runtime", place / "settings", self.containers[one.pid].name
        place.mkdir(exist_ok=True)
        runtime.write_text('#!/bin/sh\nkill -"$3" $(cat "$(dirname "$0")/$2")\n')
        runtime.chmod(0o755)
        (place / "logger").write_text('#!/bin/sh\necho "$*" >>"$(dirname "$0")/said"\n')
        (place / "logger").chmod(0o755)
        (place / name).write_text(str(one.pid))
        client = f"{sys.executable} -m mpsagent.cli.main --socket {agent.api.path}"
        settings.write_text(f"runtime={runtime}\nclient='{client}'\n")
        word = ("TERM", "KILL")[one.pid % 2]
        environment = {**self.stage.python_environment(), "MPSAGENT_CONTAINERS_SETTINGS": str(settings)}
        environment["PATH"] = f"{place}:{environment['PATH']}"
        wrapper = str(REPOSITORY / "packaging/containers/mpsagent-runtime")
        self.stage.rig.run([wrapper, "kill", name, word], env=environment)

    # the course

    def look(self) -> bool:
        """Write down which victims have gone; return whether neighbours were lost."""
        for way, one in [(way, one) for way, one in self.pool if one.gone()]:
            self.pool.remove((way, one))
            if way in BY_ITSELF:
                self.ending.append((way, one, time.time()))
            else:
                self.say(f"a victim of {way} went before its time: {one.kind} {one.text()[-300:]!r}")
                one.close()
        for way, one, begun in list(self.ending):
            if not one.gone() and time.time() < begun + TOO_LONG:
                continue
            self.ending.remove((way, one, begun))
            error = one.error()
            self.write(way=way, kind=one.kind, on_error=one.on_error, pid=one.pid, begun=round(begun, 3),
                       at_work=one.ready() or one.ready_at is not None,
                       took=round(time.time() - begun, 3), ended=one.gone(), error=error and error[1][:80])  # fmt: skip
            end_all([one])
            if one.pid in self.containers:
                with contextlib.suppress(OSError):
                    self.containers.pop(one.pid).rmdir()
        faulty = self.faults()
        if not faulty and not any(one.gone() for one in self.neighbours):
            return False
        time.sleep(3.0)
        for way, one, _ in self.ending:
            self.write(way=f"{way}, not over", kind=one.kind, pid=one.pid)
        lost = [one for one in self.neighbours if one.gone()]
        self.write(way="LOST", lost=len(lost), of=len(self.neighbours), log=faulty[:6],
                   text=[one.text()[-200:] for one in lost[:2]])  # fmt: skip
        self.say(f"LOST {len(lost)} of {len(self.neighbours)}: {faulty[:1]}")
        return True

    def faults(self) -> list[str]:
        """Return the new lines of server.log that tell of a fault."""
        log = self.stage.rig.logs["server"]
        log.refresh()
        new, self.logged = log.lines[self.logged :], len(log.lines)
        return [line for line in new if FAULT.search(line)]

    def play(self, until: float) -> None:
        failures, due = 0, 0.0
        ways = itertools.cycle(self.options.ways)
        while time.time() < until - 12 and failures < 3:
            try:
                if self.agent is None or self.programs is None:
                    agent, programs = self.open(POLICY, 'sharing = "one-server"\n')
                    self.relay()
                    self.neighbours = programs.crowd(self.options.crowd)
                    self.say(f"{len(self.neighbours)} neighbours are at work")
                while len(self.pool) < self.options.pool:
                    way = next(ways)
                    self.pool.append((way, self.victim(way, agent, programs)))
                if self.look():
                    self.close()
                    continue
                found = next(((way, one) for way, one in self.pool if way not in BY_ITSELF and one.ready()), None)
                if found is not None and time.time() >= due:
                    due = time.time() + self.options.gap
                    self.pool.remove(found)
                    self.begin(*found, agent)
                time.sleep(0.05)
            except Exception as error:
                failures += 1
                self.say(f"{error}\n{traceback.format_exc()[-1500:]}")
                self.close()
        if self.agent is not None and self.programs is not None:
            try:
                self.drain(self.agent, self.programs)
            except Exception as error:
                self.say(f"drain: {error}")
        self.close()

    def drain(self, agent: Agent, programs: Programs) -> None:
        """All clients are ended at once; a fault meanwhile harms nobody. A new client must be served after it."""
        while self.ending:
            if self.look():
                return
            time.sleep(0.05)
        since = time.time()
        agent.api.order("drain", timeout=0.5)
        while not all(one.gone() for one in self.neighbours) and time.time() < since + 20:
            time.sleep(0.05)
        ended, took, faulty = sum(one.gone() for one in self.neighbours), time.time() - since, self.faults()
        agent.api.order("resume")
        one, since = programs.start(BOB, "step", "exit"), time.time()
        while not one.ready() and not one.gone() and time.time() < since + 30:
            time.sleep(0.05)
        served = f"at work after {time.time() - since:.1f} s" if one.ready() else f"not served: {one.text()[-200:]}"
        self.write(
            way="drain", ended=ended, of=len(self.neighbours), took=round(took, 2), fault=len(faulty), next=served
        )
        end_all([one])

    def turns(self, until: float) -> None:
        """Users have turns on one server; those whose turn it is are at work until its end."""
        _, programs = self.open(TURNS, 'sharing = "turns"\nserver_scope = "all"\n')
        while time.time() < until:
            for uid in (ALICE, HEIDI, BOB):
                mine = [one for way, one in self.pool if way == str(uid)]
                works = itertools.repeat(("idle", "exit")) if uid == HEIDI else self.works
                self.pool += [(str(uid), programs.start(uid, *next(works))) for _ in range(6 - len(mine))]
            for way, one in list(self.pool):
                one.ready()
                if not one.gone():
                    continue
                self.pool.remove((way, one))
                error = one.error()
                harmed = error is not None and not re.search(r"client.*terminated", error[1], re.I)
                if one.ready_at is not None or one.kind == "idle":  # the simulator's idle client says nothing
                    way = "idle_timeout" if one.kind == "idle" else "turn"
                    self.write(way=way, kind=one.kind, on_error=one.on_error, took=0.0, lost=int(harmed), ended=True,
                               error=error and error[1][:80])  # fmt: skip
                one.close()
            if faulty := self.faults():
                self.write(way="a fault in turns", log=faulty[:6])
            time.sleep(0.05)
        self.close()


def lane(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    one = Lane(options, "" if options.sim else uuids(False)[options.first + options.lane])
    try:
        (one.turns if options.turns else one.play)(options.until)
    finally:
        one.close()
    return 0


def report(ends: Sequence[dict[str, Any]], about: dict[str, str]) -> str:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in ends:
        if "kind" in one and one.get("at_work", True):
            found[one["way"]].append(one)
    lost = [one for one in ends if one["lost"]]
    count = sum(map(len, found.values()))
    lines = ["# Ends of single clients on busy GPUs, through mpsagent", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += [f"- {count} ends, {len(lost)} with lost neighbours", ""]
    lines += ["| way | ends | not ended | by kind | seconds to the end: median, most |", "|---|---|---|---|---|"]
    for way, mine in sorted(found.items()):
        kinds = Counter(f"{one['kind']} {one['on_error']}" for one in mine)
        by = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        took = sorted(one["took"] for one in mine)
        never = sum(not one["ended"] for one in mine)
        lines.append(f"| {way} | {len(mine)} | {never} | {by} | {took[len(took) // 2]:.2f}, {took[-1]:.2f} |")
    for one in ends:
        if one["way"] == "drain":
            ended = f"{one['ended']} of {one['of']} neighbours ended in {one['took']} s"
            lines.append(
                f"\nGPU {one['gpu']}, drain: {ended}, lines of a fault: {one['fault']}, a new client: {one['next']}"
            )
        elif one["way"] in ("LOST", "a fault in turns"):
            lines.append(f"\nGPU {one['gpu']}, {one['way']}: {one['lost']} of {one.get('of')}, {one['log'][:1]}")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda given: [one.strip() for one in given.split(",") if one.strip()]  # noqa: E731
    parser.add_argument("--ways", type=words, default=WAYS)
    parser.add_argument("--works", type=words, default=[], help="programs of the victims, such as torch,jax")
    parser.add_argument("--turns", action="store_true", help="turns instead of all users together")
    parser.add_argument("--crowd", choices=CROWDS, default="busy", help="neighbours")
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--pool", type=int, default=10, help="victims that are being prepared or wait for their end")
    parser.add_argument("--gap", type=float, default=1.5, help="seconds between two ends on one GPU")
    add_options(parser)
    options = parser.parse_args()
    if options.lane is not None:
        return lane(options)
    begun = time.time()
    with lanes(options, "ways", 40) as (base, ends):
        (options.out / "ways.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ends))
        if (base / "agents").exists():
            with tarfile.open(options.out / "agents.tgz", "w:gz") as packed:
                packed.add(base / "agents", "agents")
        text = report(ends, facts(begun))
        (options.out / "busy-ways.md").write_text(text)
        print(text)
        return int(any(one["lost"] for one in ends))


if __name__ == "__main__":
    sys.exit(main())
