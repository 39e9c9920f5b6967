#!/usr/bin/env python3
"""Faults injected beside working clients, in each sharing mode, with the agent and without it: who is hit, who stays
asleep, and how soon the next client is served.

    fault_trial.py --gpus 2 --faults 1000 --bare-faults 150 --seconds 400 [--only agent|bare] [--out DIR]
    fault_trial.py --sim --faults 16 --bare-faults 8 --each 2

An injected fault is a client whose kernel was launched with an illegal access before anybody on its server had been
told of an error. `--each` clients do so in the same moment in each round of the part with the agent, 4 in the other.

Beside them in a round: a careful client of the same user, which ends at its first error; in every second round a
careless one, which goes on as if nothing had happened; and where users work at the same time, a careful one of another
user. When one of those that fault is told of it, or ends, a next client of each of the two users comes. Who has not
ended nor worked 10 s after the fault is a leftover; it is then ended by hand. A next client that is refused comes again
0.5 s later.

Every lane is an MPS of its own on one GPU, with an agent or a bare daemon, one for each mode and GPU, all beside each
other. MPS makes contexts one after the other, so all lanes together start a client each 0.1 s (`--gap`).

As root, with mpsagent importable. fault-trial.md, .json, .svg and .png go to DIR ($OUT). The part with the agent takes
three quarters of the time at most. Exit status: 0 with the agent no leftover, nobody refused and as many faults as were
asked for; 1 not; 2 it could not begin. Nothing that was started here is left, no setting of a GPU is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns import fault_report
from campaigns.begin import facts, parser, place, uuids
from campaigns.fault_report import MODES, Round
from tests.conformance import rig as rigs
from tests.policies import WAYS
from tests.scenes.stage import A, B, Client, Machine, Stage, StageError

WATCH = 10.0
"""Seconds after the fault in which a client must have ended or worked."""
AGAIN = 0.5
BARE_EACH = 4
READY = 60.0
LAST = 60.0
"""Seconds that the rounds which run when the time is over may still take."""
POLICY = """
[limits]
active_threads = '100%'
[turn]
time_limit = "1h"
[timeouts]
fault_recovery = "1s"
sigkill_delay = "1s"
"""
AT = re.compile(r"\] (step|work now|oob launch|oob sync) (\S+) at ([\d.]+)")


class Pace:
    """One start each `gap` seconds, whoever asks."""

    def __init__(self, gap: float) -> None:
        self._gap, self._next, self._lock = gap, 0.0, threading.Lock()

    def wait(self) -> None:
        with self._lock:
            now = time.monotonic()
            at = max(now, self._next)
            self._next = at + self._gap
        time.sleep(at - now)


@dataclass
class Goal:
    """Rounds of one mode until so many faults have been injected, or until the time is over."""

    faults: int
    until: float
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, number: int) -> bool:
        """Whether another round is to begin, which will inject about so many."""
        with self.lock:
            more = self.done < self.faults and time.monotonic() < self.until
            self.done += number if more else 0
            return more

    def correct(self, number: int) -> None:
        with self.lock:
            self.done += number


def heard(client: Client) -> list[tuple[str, str, float]]:
    """What a client said with a time: step, work now, oob launch or oob sync; a word; when."""
    return [(what, word, float(at)) for what, word, at in AT.findall(client.text())]


@dataclass
class Next:
    """The client that comes at the fault, again and again until it is served."""

    uid: int
    client: Client | None = None
    due: float = 0.0
    refused: int = 0
    served: float | None = None

    def look(self, start: Callable[[int], Client]) -> None:
        now = time.monotonic()
        if self.served is not None:
            return
        if self.client is None:
            if now >= self.due:
                self.client = start(self.uid)
        elif self.client.rc is not None:
            if self.client.rc == 0 and "last CUDA_SUCCESS" in self.client.text():
                self.served = now
            else:
                self.refused += 1
                self.client, self.due = None, now + AGAIN


class Lane:
    """One MPS on one GPU, and rounds of faults on it. `uuid`: of the GPU."""

    def __init__(
        self,
        backend: rigs.Backend,
        machine: Machine,
        place: Path,
        mode: str,
        agent: bool,
        gpu: int,
        uuid: str,
        pace: Pace,
    ) -> None:
        self.backend, self.machine, self.place = backend, machine, place
        self.mode, self.agent, self.gpu, self.uuid, self.pace = mode, agent, gpu, uuid, pace
        self.rounds: list[Round] = []
        self.problems: list[str] = []
        self.left: list[str] = []
        self.stages = 0
        self.stage: Stage | None = None
        self.neighbours: dict[str, Client] = {}
        """By kind: careful, careless, other."""

    # what its MPS is

    def open(self) -> Stage:
        self.stages += 1
        self.neighbours = {}
        place = self.place.with_name(f"{self.place.name}{self.stages}")
        self.stage = stage = Stage(self.backend, place, self.machine, quick=self.backend.name == "sim")
        if self.agent:
            stage.policy(POLICY, extra=f'{WAYS[self.mode]}devices = ["{self.uuid}"]')
            agent = stage.start_agent()
            stage.answering(agent)
            if self.mode == "apart":
                stage.until(lambda: (stage.rig.pipe / "control").exists(), "the gate's socket is there")
            else:
                stage.open(agent)
        else:
            options = ["-d", *(["--multiuser-server"] if self.mode in ("shared", "together") else [])]
            for where in ("", "b") if self.mode == "apart" else ("",):
                reply = stage.rig.start(*options, env={"CUDA_VISIBLE_DEVICES": self.uuid}, where=where)
                if reply.rc != 0:
                    raise StageError(f"the control daemon does not start: {reply}")
        return stage

    def close(self) -> None:
        stage, self.stage = self.stage, None
        if stage is not None:
            stage.end()
            self.left += stage.left

    def start(self, stage: Stage, uid: int, *words: str | float, hurry: bool = False) -> Client:
        if not hurry:  # the next client comes at once
            self.pace.wait()
        environment = {"CUDA_VISIBLE_DEVICES": "0"} if self.agent else {}
        if self.mode == "apart" and not self.agent and uid == B:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = str(stage.rig.base / "pipeb")
        mode, *arguments = words
        return stage.client(uid, str(mode), *arguments, **environment)

    # rounds

    def play(self, goal: Goal, each: int) -> None:
        failures = 0
        while failures < 3 and goal.take(each):
            before = len(self.rounds)
            try:
                self.round(self.stage or self.open(), each)
            except Exception as error:  # the lane's MPS is lost, not the trial
                failures += 1
                self.problems.append(f"{self.name()}: {error}\n{traceback.format_exc()[-1500:]}")
                self.close()
            goal.correct(sum(one.injected for one in self.rounds[before:]) - each)
        for client in self.neighbours.values():
            client.signal(signal.SIGUSR1)
        self.close()

    def name(self) -> str:
        return f"{self.mode} {'with the agent' if self.agent else 'bare'} on GPU {self.gpu}"

    def round(self, stage: Stage, each: int) -> None:
        one = Round(self.mode, self.agent, self.gpu, len(self.rounds) % 2 == 1)
        self._fill(stage, one)
        faulty = [self.start(stage, A, "fault") for _ in range(each)]
        for client in faulty:
            stage.until(lambda c=client: "] armed " in c.text() or c.rc is not None, "a client is armed", READY)  # type: ignore[misc]
        faulty = [client for client in faulty if client.rc is None]
        beside = dict(self.neighbours)
        for kind, client in beside.items():
            if client.rc is not None:
                self.problems.append(f"{self.name()}: the {kind} client ended before the fault: {client.text()[-300:]}")
                del self.neighbours[kind]
        beside = dict(self.neighbours)
        one.at = time.time()
        for client in faulty:  # all within microseconds: nothing else of this program may come between
            os.kill(client.pid, signal.SIGUSR1)  # it was not waited for since it was looked at, so it is still the same
        following = self._follow(stage, one, faulty, beside)
        self.rounds.append(one)
        if any(one_next.served is None for one_next in following):
            self._lost(stage, one, following)
            raise StageError("MPS does not serve again; it is started anew")

    def _lost(self, stage: Stage, one: Round, following: list[Next]) -> None:
        """What there is to find out why; then the next clients are ended."""
        for one_next in following:
            client = one_next.client
            said = "none" if client is None else f"{client.pid} (rc {client.rc}): {client.text()[-500:]}"
            one.problems.append(f"next client of {one_next.uid}: served {one_next.served}, the last one {said}")
            if one_next.served is None and client is not None:
                client.kill()
        for agent in stage.agents:
            one.problems += [f"{what}: {stage.cli(agent, what)[1]}" for what in ("status", "queue", "clients")]
            one.problems.append(f"the agent's journal: {agent.log()[-60000:]}")
        stage.rig.drain()
        one.problems += [f"{log.label}: {chr(10).join(log.lines[-400:])}" for log in stage.rig.logs.values()]

    def _fill(self, stage: Stage, one: Round) -> None:
        """Who works beside the faults."""
        wanted = {"careful": (A, 0), **({"careless": (A, 1)} if one.careless else {})}
        if self.mode in ("together", "apart") or (self.mode == "shared" and not self.agent):
            wanted["other"] = (B, 0)
        for kind, (uid, goes_on) in wanted.items():
            if kind not in self.neighbours:
                self.neighbours[kind] = self.start(stage, uid, "mind", 900, goes_on)
        for kind, client in self.neighbours.items():
            stage.until(
                lambda c=client: "] step " in c.text() or c.rc is not None,
                f"the {kind} client works",
                READY,  # type: ignore[misc]
            )

    def _follow(self, stage: Stage, one: Round, faulty: list[Client], beside: dict[str, Client]) -> list[Next]:
        began = time.monotonic()
        following = [Next(A), Next(B)]
        settled: dict[int, str] = {}
        first = False
        told: float | None = None
        """When each of those that fault had heard of it or ended."""
        while True:
            # one that the agent ends may not have been told of its error yet
            first = first or any("oob sync" in client.text() or client.rc is not None for client in faulty)
            if told is None and all("oob sync" in client.text() or client.rc is not None for client in faulty):
                told = time.monotonic()
            for client in (*faulty, *beside.values()):
                if client.pid not in settled and (fate := _fate(client, None if client in faulty else told)):
                    settled[client.pid] = fate
            if first:
                for one_next in following:
                    one_next.look(lambda uid: self.start(stage, uid, "work", 1, hurry=True))
            all_settled = len(settled) == len(faulty) + len(beside)
            if all_settled and all(one_next.served is not None for one_next in following):
                break
            now = time.monotonic() - began
            if now > WATCH and not all_settled:
                for client in (*faulty, *beside.values()):
                    if client.pid not in settled:
                        settled[client.pid] = "leftover"
                        client.kill()
                        one.by_hand += 1
            if now > WATCH + 30:
                one.problems.append(f"a next client was not served {now:.0f} s after the fault")
                break
            time.sleep(0.02)
        self._write(one, faulty, beside, settled, following)
        return following

    def _write(
        self,
        one: Round,
        faulty: list[Client],
        beside: dict[str, Client],
        settled: dict[int, str],
        following: list[Next],
    ) -> None:
        times = [heard(client) for client in faulty]
        errors = [at for said in (*times, *map(heard, beside.values())) for what, word, at in said
                  if what in ("oob sync", "work now") and word != "CUDA_SUCCESS"]  # fmt: skip
        launches = [at for said in times for what, word, at in said if what == "oob launch" and word == "cudaSuccess"]
        told = min(errors, default=float("inf"))
        one.injected = sum(at <= told for at in launches)
        one.late = len(launches) - one.injected
        fault = min(launches, default=told)
        one.until_told = told - fault if launches and errors else None
        one.faulty = dict(Counter(settled[client.pid] for client in faulty))
        for kind, client in beside.items():
            one.beside[kind] = settled[client.pid]
            if settled[client.pid] != "works":
                self.neighbours.pop(kind, None)
        for who, one_next in zip(("same", "other"), following, strict=True):
            one.served[who] = one_next.served - fault if one_next.served is not None and launches else None
            one.refused[who] = one_next.refused


def _fate(client: Client, told: float | None) -> str | None:
    """works: a step a second after everybody's fault was known, at `told`; ended, or ended by a signal."""
    if client.rc is not None:
        return "ended" if client.rc >= 0 else "ended by a signal"
    mine = heard(client)
    if told is not None and mine and mine[-1][0] == "step" and mine[-1][2] > told + 1.0:
        return "works"
    return None


def part(
    options: argparse.Namespace, backend: rigs.Backend, machine: Machine, base: Path, agent: bool, until: float,
    done: list[Lane],
) -> None:  # fmt: skip
    """All modes and GPUs beside each other, with the agent or without; the lanes are added to `done`."""
    pace = Pace(options.gap)
    faults, each = (options.faults, options.each) if agent else (options.bare_faults, min(options.each, BARE_EACH))
    # MPS alone does not tell turns with one server for all from all users together.
    modes = [mode for mode in options.modes if agent or mode != "together" or "shared" not in options.modes]
    goals = {mode: Goal(-(-faults // len(modes)), until) for mode in modes}
    word = "a" if agent else "b"
    lanes = [
        Lane(backend, machine, base / f"{word}{mode[:2]}{number}-", mode, agent, number, uuid, pace)
        for number, uuid in enumerate(uuids(options.sim)[: options.gpus]) for mode in modes
    ]  # fmt: skip
    done += lanes
    threads = [threading.Thread(target=lane.play, args=(goals[lane.mode], each), daemon=True) for lane in lanes]
    for thread in threads:
        thread.start()
    said = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.1)
        if time.monotonic() > said + 10:
            said = time.monotonic()
            print(f"{word}: {({mode: goal.done for mode, goal in goals.items()})} faults, "
                  f"{sum(len(lane.rounds) for lane in lanes)} rounds", flush=True)  # fmt: skip
        if time.monotonic() > until + LAST:
            raise StageError(
                f"stands: {[lane.name() for lane, one in zip(lanes, threads, strict=True) if one.is_alive()]}"
            )


def main() -> int:
    arguments = parser(__doc__, 400.0)
    arguments.add_argument("--gpus", type=int, default=1)
    arguments.add_argument("--faults", type=int, default=1000, help="with the agent, over all modes")
    arguments.add_argument("--bare-faults", type=int, default=150, help="without it")
    arguments.add_argument("--each", type=int, default=12, help="clients that fault in the same moment")
    arguments.add_argument("--gap", type=float, default=0.1, help="seconds between two starts, over all lanes")
    arguments.add_argument("--modes", default=",".join(MODES), help="with commas")
    arguments.add_argument("--only", choices=("agent", "bare"))
    options = arguments.parse_args()
    options.modes = options.modes.split(",")
    if unknown := set(options.modes) - set(MODES):
        arguments.error(f"no mode {', '.join(unknown)}; there are {', '.join(MODES)}")
    began = time.monotonic()
    done: list[Lane] = []
    problems: list[str] = []
    parts = [agent for agent in (True, False) if options.only in (None, "agent" if agent else "bare")]
    with place(options.sim, options.gpus) as (backend, machine, base):
        about = {**facts(backend, machine), "GPUs": options.gpus, "the command": " ".join(sys.argv)}
        try:
            for agent in parts:
                share = 0.75 if agent and len(parts) > 1 else 1.0
                since = time.monotonic()
                try:
                    part(options, backend, machine, base, agent, began + share * options.seconds, done)
                except StageError as error:
                    problems.append(str(error))
                about[f"seconds {'with the agent' if agent else 'without it'}"] = round(time.monotonic() - since, 1)
        finally:
            for lane in done:
                with contextlib.suppress(Exception):
                    lane.close()
    rounds = [one for lane in done for one in lane.rounds]
    problems += [text for lane in done for text in lane.problems]
    problems += [f"{lane.name()} left behind: {lane.left}" for lane in done if lane.left]
    wanted = options.faults if True in parts else 0
    return fault_report.write(options.out, about, rounds, problems, wanted)


if __name__ == "__main__":
    sys.exit(main())
