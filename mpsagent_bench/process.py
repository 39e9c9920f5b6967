"""A process of a run. It prepares its workload, waits for the start, works for some seconds and reports its steps.

It is forked, so that it can be another user's process although that user cannot read this program's files. It sends
lines of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from mpsagent_bench.workloads import Step

WARM_UP = 3
"""Steps before a process is ready: the first ones load code and memory."""
KEPT = 20_000
"""Latencies that a process tells, at most; of more every second one is dropped until they fit."""
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG; a change of user clears it
_LINE = 1 << 20
"""Bytes of a line at most: 20,000 latencies have room."""


Told = tuple[float, list[int]]
"""Steps that were done in time, and latencies in microseconds."""


@dataclass(frozen=True)
class Ready:
    """A prepared workload. ``work(begin, seconds)`` works from a time of the monotonic clock on."""

    gpu: str
    multiprocessors: int
    """The number that the process sees; 0: unknown."""
    work: Callable[[float, float], Told]
    end: Callable[[], None] = lambda: None
    """Ends the workload, after all other processes have reported: an exit during their work may be a fault for them."""


class Make(Protocol):
    """Makes the workload in the process itself."""

    def __call__(self, number: int) -> Ready: ...


class ProcessError(Exception):
    """A process did not come as far as it should."""


class SilentError(ProcessError):
    """The process has sent nothing in time."""


class Process:
    """A child with a workload. ``environment`` is added to this process's own; ``uid`` None: the same user."""

    def __init__(self, make: Make, number: int, uid: int | None, environment: Mapping[str, str]) -> None:
        self.number = number
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _child(theirs, make, number, uid, environment)
        theirs.close()
        self._socket = ours
        self._read = b""
        self._told = self._ended = False

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the process's next line. Raises SilentError if none arrives in time, ProcessError for an error."""
        end = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                raise SilentError(f"process {self.number} (pid {self.pid}) said nothing for {seconds:g} s")
            data = self._socket.recv(65536)
            if not data or len(self._read) > _LINE:
                raise ProcessError(f"process {self.number} (pid {self.pid}) ended before its time")
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise ProcessError(f"process {self.number} (pid {self.pid}): {said['error']}")
        self._told = "steps" in said
        return said

    def go(self, at: float, seconds: float) -> None:
        self._socket.sendall(json.dumps({"at": at, "seconds": seconds}).encode() + b"\n")

    def end(self) -> None:
        """Wait for the process's exit if it has reported, otherwise kill it."""
        if self._ended:
            return
        self._ended = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing is not enough: later children have it too
        self._socket.close()
        if not self._told:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _child(line: socket.socket, make: Make, number: int, uid: int | None, environment: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.environ.update(environment)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        _work(line, make, number)
        status = 0
    except Exception as error:
        line.sendall(json.dumps({"error": str(error) or type(error).__name__}).encode() + b"\n")
    finally:
        os._exit(status)


def _work(line: socket.socket, make: Make, number: int) -> None:
    ready = make(number)
    line.sendall(json.dumps({"gpu": ready.gpu, "multiprocessors": ready.multiprocessors}).encode() + b"\n")
    orders = line.makefile("rb")
    try:
        order = json.loads(orders.readline())
        steps, latencies = ready.work(order["at"], order["seconds"])
        line.sendall(json.dumps({"steps": steps, "latencies": latencies}).encode() + b"\n")
        orders.read()  # until the other end closes
    finally:
        ready.end()


class Latencies:
    """Latencies of all steps, or of every second, fourth, … step if there are very many."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self._steps, self._every = 0, 1

    def add(self, seconds: float) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.kept.append(round(seconds * 1e6))
            if len(self.kept) > KEPT:
                self.kept, self._every = self.kept[::2], self._every * 2


def stepping(gpu: str, multiprocessors: int, step: Step, end: Callable[[], None] = lambda: None) -> Ready:
    """A workload whose steps are done here, one after the other."""
    for _ in range(WARM_UP):
        step()

    def work(at: float, seconds: float) -> Told:
        time.sleep(max(0.0, at - time.monotonic()))
        steps, latencies = 0, Latencies()
        while (began := time.monotonic()) < at + seconds:
            began = step() or began
            now = time.monotonic()
            if now > at + seconds:
                break  # the step that the end cut does not count
            steps += 1
            latencies.add(now - began)
        return steps, latencies.kept

    return Ready(gpu, multiprocessors, work, end)


def simulated_client(programs: Path) -> int:
    """Connects, and stays as long as this process; the multiprocessors that it sees."""
    client = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", programs / "cuda-client", "sleep", "3600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    said = ""
    while "] sms " not in said:
        said = client.stdout.readline()
        if not said or "ERROR" in said:
            raise ProcessError(f"the simulated client: {said.strip() or 'ended'}")
    return int(said.split("] sms ")[1].split()[0])


class Simulated:
    """A client of the simulator: it connects and takes its limits as a CUDA program does, and computes nothing."""

    NOMINAL = 0.01
    """Seconds that a step lasts."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs

    def __call__(self, number: int) -> Ready:
        return stepping("simulated", simulated_client(self._programs), self._step)

    def _step(self) -> None:
        time.sleep(self.NOMINAL)
