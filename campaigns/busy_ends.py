#!/usr/bin/env python3
"""Ends of single clients on busy GPUs without mpsagent: which rule for the end of a client loses no neighbour?

    busy_ends.py --seconds 240 [--gpus 4] [--only rules,people] [--rules NAME,…] [--victims WORK:ON_ERROR,…] [--out DIR]
    busy_ends.py --sim --seconds 60

Each GPU has a control daemon of its own with one server for all users (`--multiuser-server`). Eleven PyTorch trainings
of one user and three small programs of three other users always run there. Victims run in addition. They differ in
their work and in what they do at a CUDA error. A victim that is at work is ended by one of the rules
below, and the neighbours are watched for WATCH seconds after its death and after the close of what was kept of it. A
rule is rejected at its first lost neighbour, or after `control` ends with lost neighbours. A CUDA graph is the victim
that tells the rules apart; PyTorch is lost now and then by all of them.

`people`: the same without `terminate_client`: Ctrl-C, SIGTERM and SIGKILL of PyTorch, JAX and C programs with two
trainings and one small program of the same user as neighbours; with `--crowd busy` with the fourteen neighbours above.

Needs root, PyTorch and nvcc. DIR gets ends.jsonl (one line for each end: times in ms since the request, lines of
server.log, what NVML listed), written as it happens, and busy-ends.md. No setting of a GPU is changed. All processes
that were started are ended. Exit status: 0 no rule without `control` lost a neighbour, 1 one did, 2 it could not begin.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import uuids
from campaigns.busy_place import ALICE, CROWDS, FAULT, Program, Programs, add_options, end_all, facts, lanes
from mpsagent.mps.session import FrontEndSession
from tests.conformance import rig as rigs
from tests.conformance.processes import Log

WATCH = 0.45
"""Seconds after a death, or after the close of kept descriptors, in which a fault shows: 0.18 to 0.4 s."""
NO_ANSWER = 10.0
OWN = 5.0
"""Seconds in which a process may exit by itself."""
TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
PIDFD_GETFD = 438
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Rule:
    """A way to end one client. ``signal`` is sent ``after`` seconds after the answer to ``terminate_client``, or after
    the beginning if nothing is asked (``asks``). ``stop``: SIGSTOP "answer" at the answer, "before" ``drain`` seconds
    before the request. ``keep``: duplicates of the process's descriptors of the GPU are kept for ``kept`` seconds after
    the answer: of "all", of "uvm" (/dev/nvidia-uvm) or of the "rest"."""

    name: str
    text: str
    signal: int = TERM
    after: float = 0.0
    stop: str = ""
    drain: float = 0.0
    asks: bool = True
    keep: str = ""
    kept: float = 0.0
    control: int = 0
    """Ends with lost neighbours after which it is rejected; 0: after the first, and the exit status is 1."""
    most: int = 100


def _kept(what: str, seconds: float, control: int = 0) -> Rule:
    which = {"all": "its", "uvm": "its /dev/nvidia-uvm", "rest": "its other"}[what]
    text = f"SIGKILL at the answer, {which} GPU descriptors kept for {seconds:g} s"
    return Rule(f"{what}{1000 * seconds:.0f}", text, KILL, keep=what, kept=seconds, control=control)


RULES = [
    Rule("term3", "SIGTERM 3 ms after the answer (edition 170b9b80)", after=0.003, control=6, most=60),
    Rule("kill0", "SIGKILL at the answer", KILL, control=4, most=40),
    Rule("own", "no signal, the client's own exit", KILL, after=OWN, control=3),
    Rule("term500", "SIGTERM 0.5 s after the answer", after=0.5, control=1),
    Rule("term2000", "SIGTERM 2 s after the answer", after=2.0, control=1),
    Rule("stop500", "SIGSTOP at the answer, SIGKILL 0.5 s later", KILL, after=0.5, stop="answer", control=1),
    Rule("stopped500", "SIGSTOP, the request, SIGKILL 0.5 s later", KILL, after=0.5, stop="before", control=1),
    Rule("drained2000", "SIGSTOP, the request 2 s later, SIGKILL 20 ms later", KILL, 0.02, "before", 2.0, control=1),
    Rule("frozen3000", "SIGSTOP, SIGKILL 3 s later, nothing asked", KILL, 3.0, "before", asks=False, control=1),
    _kept("all", 0.5, 1),
    _kept("all", 3.0, 1),
    _kept("all", 10.0),
    _kept("uvm", 3.0, 1),
    _kept("uvm", 10.0),
    _kept("rest", 10.0, 1),
    Rule(
        "drained-all10000",
        "SIGSTOP, the request 1.5 s later, SIGKILL 20 ms later, its GPU descriptors kept for 10 s",
        KILL,
        0.02,
        "before",
        1.5,
        keep="all",
        kept=10.0,
        control=1,
    ),
]
PEOPLE = [
    Rule("sigint", "Ctrl-C without mpsagent", int(signal.SIGINT), asks=False, control=999, most=999),
    Rule("sigterm", "SIGTERM without mpsagent", TERM, asks=False, control=999, most=999),
    Rule("sigkill", "SIGKILL without mpsagent", KILL, asks=False, control=999, most=999),
]
VICTIMS = (
    "graph:exit torch:exit graph:stay queue:exit endless:exit torch:exit graph:exit small:exit torch:stay graph:stay "
    "copy:exit idle:exit"
).split()
OF_PEOPLE = ["torch:exit", "torch:exit", "jax:exit", "queue:exit", "torch:exit", "torch:exit", "small:exit", "jax:exit"]


class Kept:
    """Duplicates of the descriptors by which a process has the GPU."""

    def __init__(self, one: Program, what: str) -> None:
        self.descriptors: list[int] = []
        self.closed: float | None = None
        for name in os.listdir(f"/proc/{one.pid}/fd"):
            with contextlib.suppress(OSError):
                place = os.readlink(f"/proc/{one.pid}/fd/{name}")
                is_uvm = "/dev/nvidia-uvm" in place  # the simulator's is below its own directory
                if "/dev/nvidia" in place and what in ("all", "uvm" if is_uvm else "rest"):
                    found = LIBC.syscall(PIDFD_GETFD, one.pidfd, int(name), 0)
                    if found >= 0:
                        self.descriptors.append(found)

    def close(self) -> None:
        """Close them in a thread: it takes up to 3 s in the kernel."""

        def close() -> None:
            for one in self.descriptors:
                os.close(one)
            self.closed = time.time()

        threading.Thread(target=close, daemon=True).start()


@dataclass
class Hold:
    """What is kept of a process that has ended, until when, and what is to be written down of its end."""

    rule: Rule
    kept: Kept
    until: float
    zero: float
    said: dict[str, Any]


class Question:
    """One command to the control daemon, without waiting for the answer."""

    def __init__(self, pipe: Path, command: str) -> None:
        self.session = FrontEndSession([command])
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(NO_ANSWER)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.sock.connect(str(pipe / "control_privileged"))

    def read(self) -> bool:
        """Read one message and return whether the session is over."""
        data = self.sock.recv(8192)
        if not data:
            self.session.closed()
        for message in self.session.message(data) if data else []:
            mine = struct.pack("3i", os.getpid(), 0, 0)
            self.sock.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, mine)])
        if self.session.how is not None:
            self.sock.close()
        return self.session.how is not None

    def answer(self) -> str:
        while not self.read():
            pass
        return " ".join(self.session.answers).strip()


class Listed:
    """What NVML lists of one process, read every 10 ms by a thread."""

    def __init__(self, uuid: str | None) -> None:
        self.pid, self.seen = 0, list[tuple[float, str]]()
        if uuid is not None:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
            threading.Thread(target=self._follow, daemon=True).start()

    def follow(self, pid: int) -> None:
        self.seen, self.pid = [], pid

    def _follow(self) -> None:
        while True:
            time.sleep(0.01)
            pid = self.pid
            if pid:
                with contextlib.suppress(self.nvml.NVMLError):
                    listed = self.nvml.nvmlDeviceGetMPSComputeRunningProcesses(self.handle)
                    memory = [one.usedGpuMemory or 0 for one in listed if one.pid == pid]
                    text = f"{memory[0] >> 20} MiB" if memory else "gone"
                    if not self.seen or self.seen[-1][1] != text:
                        self.seen.append((time.time(), text))


class Plan:
    """What all lanes together have done so far, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def _open(self) -> Iterator[dict[str, list[int]]]:
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            found = json.loads(file.read() or "{}")
            yield found
            file.seek(0)
            file.truncate()
            file.write(json.dumps(found))

    def take(self, rules: Sequence[Rule], kind: str) -> Rule | None:
        """Return the rule that was played least with this kind of victim; None: no rule is left."""
        with self._open() as found:
            count = lambda key: found.get(key, [0, 0])  # noqa: E731
            left = [one for one in rules if count(one.name)[0] < one.most and count(one.name)[1] < max(1, one.control)]
            if not left:
                return None
            rule = min(left, key=lambda one: (count(f"{one.name} {kind}")[0], count(one.name)[0]))
            for key in (rule.name, f"{rule.name} {kind}"):
                found.setdefault(key, [0, 0])[0] += 1
            return rule

    def lost(self, rule: Rule) -> None:
        with self._open() as found:
            found.setdefault(rule.name, [0, 0])[1] += 1


class Lane:
    """One control daemon on one GPU, its neighbours and victims."""

    def __init__(self, options: argparse.Namespace, uuid: str) -> None:
        self.options, self.number, self.uuid = options, options.lane, uuid
        base = options.base / f"g{self.number}"
        self.pipe, self.log = base / "pipe", base / "log"
        for place in (base, self.pipe, self.log):
            place.mkdir(mode=0o755)
        self.backend = rigs.sim_backend(base) if options.sim else rigs.real_backend(base)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        self.environment = {
            **clean, **self.backend.environment,
            "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log),
        }  # fmt: skip
        sim = self.backend.client if options.sim else ()
        self.programs = Programs(base / "programs", options.client, self.environment, sim)
        self.server_log = Log(self.log / "server.log", "server.log")
        self.plan = Plan(options.out / "plan.json")
        self.listed = Listed(None if options.sim else uuid)
        self.neighbours: list[Program] = []
        self.pool: list[Program] = []
        self.holds: list[Hold] = []
        self.closing: Hold | None = None
        self.kinds: Iterator[str] = iter(())
        self.server = ""
        self.file = (options.out / f"ends-{self.number}.jsonl").open("a")

    def say(self, text: str) -> None:
        print(f"[{time.time() % 1000:7.2f} gpu {self.number}] {text}", flush=True)

    def open(self, crowd: str) -> None:
        since = time.time()
        run = subprocess.run(
            [self.backend.control, "-d", "--multiuser-server"], capture_output=True, text=True, timeout=30,
            env={**self.environment, "CUDA_VISIBLE_DEVICES": "0" if self.options.sim else self.uuid},
        )  # fmt: skip
        if run.returncode:
            raise RuntimeError(f"the control daemon does not start: {run.stdout}{run.stderr}")
        self.neighbours = self.programs.crowd(crowd)
        self.server = Question(self.pipe, "get_server_list").answer().split()[0]
        self.say(f"{crowd}: {len(self.neighbours)} neighbours at work after {time.time() - since:.1f} s")

    def close(self) -> None:
        """End all clients and the daemon, whose servers end with it."""
        end_all([*self.neighbours, *self.pool])
        for hold in self.holds:
            hold.kept.close()
        self.neighbours, self.pool, self.holds, self.closing = [], [], [], None
        place = self.pipe / "nvidia-cuda-mps-control.pid"
        with contextlib.suppress(OSError, ValueError):
            for pid in (int(place.read_text()), int(self.server)):
                with contextlib.suppress(ProcessLookupError):
                    descriptor = os.pidfd_open(pid)
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    select.select([descriptor], [], [], 10)
                    os.close(descriptor)
        place.unlink(missing_ok=True)

    def fill(self) -> None:
        """Keep victims in preparation."""
        for one in [one for one in self.pool if one.gone()]:
            self.say(f"victim {one.kind} {one.on_error} went before its time: {one.text()[-300:]!r}")
            self.pool.remove(one)
            one.close()
        while len(self.pool) < self.options.pool:
            kind, _, on_error = next(self.kinds).partition(":")
            self.pool.append(self.programs.start(ALICE, kind, on_error))

    def play(self, crowd: str, rules: Sequence[Rule], victims: Sequence[str], until: float) -> None:
        self.kinds = itertools.islice(itertools.cycle(victims), 3 * self.number, None)
        failures, idle = 0, time.time()
        while time.time() < until and failures < 4:
            try:
                if not self.neighbours:
                    self.open(crowd)
                    idle = time.time()
                self.fill()
                if self.closed():
                    self.close()
                    continue
                victim = next((one for one in self.pool if one.ready()), None)
                if victim is None or self.closing is not None:
                    if time.time() > idle + 40:
                        raise RuntimeError(f"no victim gets to work: {[(one.kind, one.text()) for one in self.pool]}")
                    time.sleep(0.01)
                    continue
                idle = time.time()
                rule = self.plan.take(rules, f"{victim.kind} {victim.on_error}")
                if rule is None:
                    break
                self.pool.remove(victim)
                self.fill()
                if self.end(rule, victim, crowd):
                    self.close()
            except Exception as error:
                failures += 1
                self.say(f"{error}\n{traceback.format_exc()[-1500:]}")
                self.close()
        self.close()

    def end(self, rule: Rule, victim: Program, crowd: str) -> bool:
        """End one victim by a rule; return whether neighbours were lost."""
        self.server_log.refresh()
        before = len(self.server_log.lines)
        kept = Kept(victim, rule.keep) if rule.keep else None
        self.listed.follow(victim.pid)
        times, zero, until = self._end(rule, victim)
        self.listed.pid = 0
        error = victim.error()
        if error is not None:
            times["error"] = round(1000 * (error[0] - zero), 1)
        said: dict[str, Any] = {
            "rule": rule.name, "kind": victim.kind, "on_error": victim.on_error, "crowd": crowd, "gpu": self.number,
            "pid": victim.pid, "at": round(zero, 3), "ms": times, "error": error[1][:80] if error else None,
            "round": victim.round(), "nvml": [[round(1000 * (at - zero), 1), text] for at, text in self.listed.seen],
        }  # fmt: skip
        lost = self.lost(said, zero, before, rule)
        if kept is not None and not lost:
            self.holds.append(Hold(rule, kept, until, zero, said))
        else:
            self.write(said)
        end_all([victim])
        return lost

    def closed(self) -> bool:
        """Close what was kept, one after the other; return whether neighbours were lost."""
        if self.closing is None:
            due = [one for one in self.holds if time.time() >= one.until]
            if due:
                self.closing = min(due, key=lambda one: one.until)
                self.holds.remove(self.closing)
                self.server_log.refresh()
                self.closing.said["lines"] = len(self.server_log.lines)
                self.closing.said["ms"]["close"] = round(1000 * (time.time() - self.closing.zero), 1)
                self.closing.kept.close()
            return False
        one = self.closing
        if one.kept.closed is None or time.time() < one.kept.closed + WATCH:
            return False
        one.said["ms"]["closed"] = round(1000 * (one.kept.closed - one.zero), 1)
        lost = self.lost(one.said, one.zero, one.said.pop("lines"), one.rule)
        self.write(one.said)
        self.closing = None
        return lost

    def lost(self, said: dict[str, Any], zero: float, before: int, rule: Rule) -> bool:
        """Look for lost neighbours and for lines of a fault since line ``before``, and note them."""
        self.server_log.refresh()
        faulty = any(FAULT.search(line) for line in self.server_log.lines[before:])
        if faulty or any(one.gone() for one in self.neighbours):
            time.sleep(3.0)
            self.server_log.refresh()
            self.plan.lost(rule)
        lost = sum(one.gone() for one in self.neighbours)
        mine = str(said["pid"])
        lines = [line for line in self.server_log.lines[before:] if mine in line or FAULT.search(line)]
        said |= {"lost": lost, "of": len(self.neighbours), "fault": faulty}
        said["log"] = [*said.get("log", []), *(_since(line, zero) for line in lines[:14])]
        if lost or faulty:
            victim = f"{said['kind']} {said['on_error']}"
            self.say(f"LOST {lost} of {len(self.neighbours)} by {rule.name} of {victim}: {said['ms']}")
        return bool(lost or faulty)

    def write(self, said: dict[str, Any]) -> None:
        self.file.write(json.dumps(said) + "\n")
        self.file.flush()

    def _end(self, rule: Rule, victim: Program) -> tuple[dict[str, float], float, float]:
        """Return the times of what happened, in ms after the request, when that was, and until when to keep."""
        if rule.stop == "before":
            victim.send(signal.SIGSTOP)
            time.sleep(rule.drain)
        zero = time.time()
        times: dict[str, float] = {}

        def mark(name: str) -> None:
            times.setdefault(name, round(1000 * (time.time() - zero), 1))

        question, number = None, rule.signal
        due: float | None = zero + rule.after
        if rule.asks:
            question = Question(self.pipe, f"terminate_client {self.server} {victim.pid}")
            due = due if rule.stop == "before" else None
        until = zero + rule.kept
        died: float | None = None
        ends = zero + 30
        while (now := time.time()) < ends:
            if due is not None and now >= due and died is None:
                victim.send(number)
                mark(signal.Signals(number).name)
                due, number = (now + 10, KILL) if number != KILL else (None, KILL)
            if question is not None and now > zero + NO_ANSWER:
                victim.send(KILL)
                mark("SIGKILL, no answer")
            if died is not None:
                ends = min(ends, died + WATCH)
            waits: list[Any] = [] if died else [victim.pidfd]
            waits += [question.sock] if question is not None else []
            found = select.select(waits, [], [], min(0.02, max(0.0, (due or now + 1) - now)))[0]
            if question is not None and question.sock in found and question.read():
                question = None
                mark("answer")
                if rule.stop == "answer":
                    victim.send(signal.SIGSTOP)
                if rule.stop != "before":
                    due = time.time() + rule.after
                until = time.time() + rule.kept
            if died is None and victim.pidfd in found:
                died = time.time()
                mark("death")
        return times, zero, until


def _since(line: str, zero: float) -> str:
    """Return a line of server.log with milliseconds since ``zero`` in front."""
    found = re.match(r"\[(\d+-\d+-\d+ \d+:\d+:\d+)\.(\d+) [^]]*\] (.*)", line)
    if not found:
        return line[:160]
    at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + float(f"0.{found[2]}")
    return f"{1000 * (at - zero):+.0f} {found[3][:140]}"


def lane(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    one = Lane(options, "" if options.sim else uuids(False)[options.first + options.lane])
    rules = [rule for rule in RULES if not options.rules or rule.name in options.rules]
    try:
        one.programs.loaded()
        rest = options.until - time.time()
        if "rules" in options.only:
            one.play(
                "busy",
                rules,
                options.victims or VICTIMS,
                options.until - (options.people * rest if "people" in options.only else 0),
            )
        if "people" in options.only:
            one.play(options.crowd, PEOPLE, options.victims or OF_PEOPLE, options.until)
    finally:
        one.close()
        one.programs.end()
    return 0


def report(ends: Sequence[dict[str, Any]], about: dict[str, str]) -> str:
    lines = ["# Ends of single clients on busy GPUs", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| rule | what is done | ends | with lost neighbours | by kind: ends (lost) | answer, ms | closed, s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for crowd, rule in itertools.product(CROWDS, (*RULES, *PEOPLE)):
        mine = [one for one in ends if one["rule"] == rule.name and one["crowd"] == crowd]
        if not mine:
            continue
        kinds = defaultdict(list)
        for one in mine:
            kinds[f"{one['kind']} {one['on_error']}"].append(bool(one["lost"] or one["fault"]))
        by = ", ".join(f"{kind} {len(each)} ({sum(each)})" for kind, each in sorted(kinds.items()))
        lost = sum(map(sum, kinds.values()))
        answers = _spread([one["ms"]["answer"] for one in mine if "answer" in one["ms"]], "{:.0f}")
        closed = _spread([one["ms"]["closed"] / 1000 for one in mine if "closed" in one["ms"]], "{:.1f}")
        lines.append(f"| {rule.name} ({crowd}) | {rule.text} | {len(mine)} | {lost} | {by} | {answers} | {closed} |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float], form: str) -> str:
    """Return least, median and most."""
    found = sorted(values)
    return ", ".join(form.format(one) for one in (found[0], found[len(found) // 2], found[-1])) if found else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = lambda given: [one.strip() for one in given.split(",") if one.strip()]  # noqa: E731
    parser.add_argument("--only", type=words, default=["rules", "people"])
    parser.add_argument("--rules", type=words, default=[])
    parser.add_argument("--victims", type=words, default=[])
    parser.add_argument("--crowd", choices=CROWDS, default="light", help="neighbours in `people`")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--people", type=float, default=0.3, help="their part of the time")
    parser.add_argument("--pool", type=int, default=6, help="victims that are being prepared")
    add_options(parser)
    options = parser.parse_args()
    if options.lane is not None:
        return lane(options)
    begun = time.time()
    with lanes(options, "ends", 25) as (_, ends):
        (options.out / "plan.json").unlink(missing_ok=True)
        (options.out / "ends.jsonl").write_text("".join(json.dumps(one) + "\n" for one in ends))
        text = report(ends, facts(begun))
        (options.out / "busy-ends.md").write_text(text)
        print(text)
        lost = Counter(one["rule"] for one in ends if one["lost"] or one["fault"])
        return int(any(lost[rule.name] for rule in RULES if not rule.control))


if __name__ == "__main__":
    sys.exit(main())
