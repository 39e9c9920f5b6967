"""Programs of users that gate.py and modes.py tell when to work (user_programs.py), and what came out of each."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from campaigns.gate_place import Here, Out
from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Json, Stage, StageError

PATIENCE = 90.0
OUTSIDE = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


@dataclass
class Worker:
    """A program that does what it is told (user_programs.py)."""

    uid: int
    percent: float
    started: rigs.Started
    writer: int
    core: int
    ready: Json | None = None
    heard: int = 0

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.writer, f"{line}\n".encode())

    def go(self, seconds: float, batch: int = 1, at: float = 0.0) -> None:
        self.tell(f"go {seconds} {batch} {self.core} {at}")

    def said(self, word: str) -> list[str]:
        return [line[len(word) :].strip() for line in self.started.read().splitlines() if line.startswith(word)]

    def wait(self, word: str, number: int = 1, timeout: float = PATIENCE) -> list[str]:
        end = time.monotonic() + timeout
        while len(found := self.said(word)) < number:
            if self.started.process.poll() is not None and len(self.said(word)) < number:
                raise StageError(f"a program of {self.uid} ended: {self.errors()}")
            if time.monotonic() > end:
                raise StageError(f"a program of {self.uid} has not said {word} {number} times: {self.errors()}")
            time.sleep(0.02)
        return found

    def errors(self) -> str:
        return f"{self.started.process.poll()} {self.started.err.read_text(errors='replace')[-1500:]}"

    def done(self, number: int, timeout: float = PATIENCE) -> Json:
        """What came out of its nth `go`."""
        return dict(json.loads(self.wait("DONE", number, timeout)[number - 1]))

    def end(self) -> None:
        self.tell("end")
        with contextlib.suppress(OSError):
            os.close(self.writer)
        self.writer = -1


class Crew:
    """All programs of a part. They are started at once, because PyTorch takes seconds to be there."""

    def __init__(self, here: Here, cores: Sequence[int], gpu: str = "0") -> None:
        """`gpu`: of programs outside MPS."""
        self.here, self.cores, self.gpu = here, cores, gpu
        self.all: list[Worker] = []
        here.program("cuda_client.py")
        python = rigs.other_users_python(A) if here.sim else here.python_with(A, "torch")
        self.command = [python, "-S" if here.sim else "-s", here.program("user_programs.py")]

    def start(
        self, stage: Stage, what: str, uids: Sequence[int], percents: Sequence[float], core: int = 0,
        outside: bool = False,
    ) -> list[Worker]:  # fmt: skip
        found = []
        for number, (uid, percent) in enumerate(zip(uids, percents, strict=True)):
            extra = {"CUDA_VISIBLE_DEVICES": self.gpu, **OUTSIDE} if outside else {"CUDA_VISIBLE_DEVICES": "0"}
            if self.here.sim:
                extra |= {"STAND_IN": " ".join(self.here.backend.client), "PACED": what}
            command = [*self.command, "stand-in" if self.here.sim else what]
            reader, writer = os.pipe()
            started = stage.rig.run(command, stdin_from=reader, uid=uid, env=self.here.environment(stage, uid, extra))
            os.close(reader)
            found.append(Worker(uid, percent, started, writer, self.cores[(core + number) % len(self.cores)]))
        self.all += found
        return found

    def loaded(self) -> None:
        for one in self.all:
            one.wait("LOADED")

    def ready(self, workers: Sequence[Worker], out: Out) -> None:
        """Contexts, one each 0.15 s, because MPS makes them one after the other; models; limits as they should be."""
        for one in workers:
            one.tell("load")
            time.sleep(0.15)
        for one in workers:
            self.judge(one, out)

    def judge(self, one: Worker, out: Out) -> None:
        one.ready = dict(json.loads(one.wait("READY")[0]))
        right = multiprocessors_for_percent(one.percent, self.here.machine.multiprocessors)
        out.check(one.ready["sms"] == right, f"a program of {one.uid} has {one.ready['sms']} SMs, right are {right}")

    def end(self) -> None:
        for one in self.all:
            if one.writer >= 0:
                one.end()
        for one in self.all:
            rigs.exited(one.started.process, 10)


def windows(seconds: float, groups: Sequence[Sequence[Worker]], batch: int = 1) -> list[list[Json]]:
    """All these programs at work at the same time; what came out of each."""
    at = time.monotonic() + 0.3
    before = {id(one): len(one.said("DONE")) for group in groups for one in group}
    for group in groups:
        for one in group:
            one.go(seconds, batch, at)
    return [[one.done(before[id(one)] + 1, seconds + PATIENCE) for one in group] for group in groups]


def rate(done: Sequence[Json]) -> float:
    """In a second, of all of them."""
    return float(sum(one["count"] / (one["end"] - one["begin"]) for one in done))
