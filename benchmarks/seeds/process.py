"""A process of a seed: forked, so that what takes seconds to import is imported once; it makes its program ready, and
then works in as many windows as it is told to, one line of JSON for each.

Before a window it works without counting, because a GPU that was idle raises its clocks only under work.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mpsagent_bench.process import simulated_client
from mpsagent_bench.workloads import Step

Make = Callable[[int], tuple[str, int, Step]]
"""In the process itself, with its number: the GPU's name, the multiprocessors that it may use, its step."""
WARM_UP = 3
"""Steps before a process is ready: the first ones load code and memory."""
KEPT = 10_000
"""Latencies that a process tells of a window, at most; of more every second one is dropped until they fit."""
ENOUGH = 5
"""Steps of which the rate is that between the first one's begin and the last one's end; of fewer, the window's."""
NOMINAL = 0.01
"""Seconds that a step lasts on the simulator."""
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG; a change of user clears it


class ProcessError(Exception):
    """A process did not come as far as it should."""


class Process:
    """``environment`` is added to this process's own; ``uid`` None: the same user."""

    def __init__(self, make: Make, number: int, uid: int | None, environment: Mapping[str, str]) -> None:
        self.number = number
        self._socket, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            _child(theirs, make, number, uid, environment)
        theirs.close()
        self._read = b""
        self._busy, self._ended = True, False

    def hear(self, seconds: float) -> dict[str, Any]:
        """Its next line. Raises ProcessError when none comes in time, or when the line is an error."""
        end = time.monotonic() + seconds
        who = f"process {self.number} (pid {self.pid})"
        while b"\n" not in self._read:
            if not select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ProcessError(f"{who} said nothing for {seconds:.0f} s")
            data = self._socket.recv(65536)
            if not data:
                raise ProcessError(f"{who} ended before its time")
            self._read += data
        line, self._read = self._read.split(b"\n", 1)
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise ProcessError(f"{who}: {said['error']}")
        self._busy = False
        return said

    def go(self, warm: float, at: float, seconds: float) -> None:
        """It works from ``warm`` on, counts from ``at`` on for so many seconds, and tells."""
        self._busy = True
        self._socket.sendall(json.dumps({"warm": warm, "at": at, "seconds": seconds}).encode() + b"\n")

    def end(self) -> None:
        """It has ended when this returns: by itself when it waits for a window, else killed."""
        if self._ended:
            return
        self._ended = True
        if self._busy:
            os.kill(self.pid, signal.SIGKILL)
        self._socket.shutdown(socket.SHUT_RDWR)  # closed, it would stay open in those that were forked later
        self._socket.close()
        os.waitpid(self.pid, 0)


def _child(line: socket.socket, make: Make, number: int, uid: int | None, environment: Mapping[str, str]) -> NoReturn:
    status = 1
    try:
        os.environ.update(environment)
        if uid is not None:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        name, multiprocessors, step = make(number)
        for _ in range(WARM_UP):
            step()
        _tell(line, {"gpu": name, "multiprocessors": multiprocessors})
        for text in line.makefile("rb"):
            _tell(line, window(step, **json.loads(text)))
        status = 0
    except Exception as error:
        _tell(line, {"error": f"{type(error).__name__}: {error}"[:1000]})
    finally:
        os._exit(status)


def _tell(line: socket.socket, said: dict[str, Any]) -> None:
    line.sendall(json.dumps(said).encode() + b"\n")


def window(step: Step, warm: float, at: float, seconds: float) -> dict[str, Any]:
    """Steps a second, and microseconds a step. A step that begins before the window or ends after it does not count."""
    time.sleep(max(0.0, warm - time.monotonic()))
    while time.monotonic() < at:
        step()
    steps, latencies, every = 0, [], 1
    first = last = time.monotonic()
    while (began := time.monotonic()) < at + seconds:
        began = step() or began
        now = time.monotonic()
        if now > at + seconds:
            break
        steps, last = steps + 1, now
        if steps % every == 0:
            latencies.append(round((now - began) * 1e6))
            if len(latencies) > KEPT:
                latencies, every = latencies[::2], every * 2
    return {"steps": steps, "rate": steps / (last - first if steps >= ENOUGH else seconds), "latencies": latencies}


class Simulated:
    """A client of the simulator: it connects and takes its limits as a CUDA program does, and computes nothing."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs

    def __call__(self, number: int) -> tuple[str, int, Step]:
        return "simulated", simulated_client(self._programs), lambda: time.sleep(NOMINAL)
