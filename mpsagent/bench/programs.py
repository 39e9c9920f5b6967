"""Workloads that are programs of their own: PyTorch's, and those of whoever measures.

They run as the user of the process that starts them, and end with it.
"""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from typing import IO, Any

from mpsagent.bench.process import Latencies, ProcessError, Ready, Told, stepping

FIRST = 50.0
"""Seconds in which a program must have told of its first steps, or have ended once: less than a run waits for it."""
END = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
_STEPS = re.compile(rb"\s*steps:?\s+(\d{1,15})\b")
_SAYS_MUCH = 1 << 20
_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def python_with_torch(asked: str | None) -> str:
    """``asked``, or the Python on PATH, if it has PyTorch; else empty."""
    python = asked or shutil.which("python3") or ""
    with suppress(OSError, subprocess.SubprocessError):
        if python and subprocess.run([python, "-c", _HAS_TORCH], check=False, timeout=30, cwd="/").returncode == 0:
            return python
    return ""


class Torch:
    """One of `torch_workloads.TORCH`, run by a Python that has PyTorch."""

    def __init__(self, python: str, name: str) -> None:
        self._name = name
        self._command = [python, "-c", resources.files("mpsagent.bench").joinpath("torch_workloads.py").read_text()]

    def __call__(self, number: int) -> Ready:
        user = {"USER": "bench", "LOGNAME": "bench", "HOME": "/nonexistent"}  # PyTorch asks who it is
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        process = _started([*self._command, self._name], errors, user, stdin=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        said = _line(process, process.stdout, errors)

        def step() -> None:
            process.stdin.write(b"\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            _line(process, process.stdout, errors)  # type: ignore[arg-type]

        about: dict[str, Any] = json.loads(said)
        return stepping(about["gpu"], about["multiprocessors"], step, lambda: _ended(process))


def _line(process: subprocess.Popen[bytes], out: IO[bytes], errors: IO[bytes]) -> bytes:
    if line := out.readline():
        return line
    raise ProcessError(f"PyTorch ended with {process.wait()}: {_last(errors)}")


class Program:
    """A command of whoever measures. Its speed is that of the lines `steps N` which it prints, N so far; of one that
    prints none by the time it has ended for the first time, it is that of its runs: it is started again and again."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._rest = b""
        self._before = self._now = 0
        """Steps of runs that have ended, and of all."""
        self._tells = False

    def __call__(self, number: int) -> Ready:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._start()
        end = time.monotonic() + FIRST
        while not self._read(end):
            if self._process.poll() is not None:
                self._succeeded()
                break
            if time.monotonic() > end:
                raise ProcessError(f"{self._command[0]} printed no line `steps N` in {FIRST:g} s and did not end")
        return Ready("", 0, self._told if self._tells else self._runs, self._end)

    def _start(self) -> None:
        self._rest, self._before = b"", self._now
        self._process = _started(self._command, self._errors, {"PYTHONUNBUFFERED": "1"}, stdin=subprocess.DEVNULL)

    def _succeeded(self) -> None:
        if self._process.wait():
            raise ProcessError(f"{self._command[0]} ended with {self._process.returncode}: {_last(self._errors)}")
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, until: float) -> bool:
        """Whether it has told of steps; waits for output, for its end, or until then."""
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
            return False
        data = os.read(out.fileno(), 65536)
        if not data:  # it has closed it; most likely it ends
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(min(0.2, max(0.0, until - time.monotonic())))
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_SAYS_MUCH:]
        told = [int(found[1]) for line in lines if (found := _STEPS.match(line))]
        if told:
            self._now, self._tells = self._before + told[-1], True
        return bool(told)

    def _told(self, at: float, seconds: float) -> Told:
        """From the last line before the begin to the last one before the end: as many steps as that makes in the
        time. When the program ends it is started again, and its start counts."""
        end = at + seconds
        known: list[tuple[float, int]] = []
        latencies = Latencies()
        while time.monotonic() < end:
            if self._read(end) and (now := time.monotonic()) <= end:
                if known and known[-1][0] >= at and self._now > known[-1][1]:
                    latencies.add((now - known[-1][0]) / (self._now - known[-1][1]))
                known.append((now, self._now))
            elif self._process.poll() is not None:
                self._succeeded()
                self._start()
        first = max((one for one in known if one[0] <= at), default=known[0] if known else (end, 0))
        if not known or known[-1][0] <= first[0]:
            raise ProcessError(f"{self._command[0]} printed no two lines `steps N` in {seconds:g} s: more --seconds")
        return (known[-1][1] - first[1]) / (known[-1][0] - first[0]) * seconds, latencies.kept

    def _runs(self, at: float, seconds: float) -> Told:
        """Runs that end in time, at the speed they have until the last of them ends."""
        time.sleep(max(0.0, at - time.monotonic()))
        end, count, latencies = at + seconds, 0, Latencies()
        last = at
        while (began := time.monotonic()) < end:
            self._start()
            while self._process.poll() is None and time.monotonic() < end:
                self._read(end)
            if self._process.poll() is not None and (now := time.monotonic()) <= end:
                self._succeeded()
                count += 1
                last = now
                latencies.add(now - began)
        if not count:
            raise ProcessError(f"no run of {self._command[0]} ended in {seconds:g} s: more --seconds")
        return count / (last - at) * seconds, latencies.kept

    def _end(self) -> None:
        _ended(self._process)


def _started(command: list[str], errors: IO[bytes], more: dict[str, str], stdin: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen([*_WITH_US, *command], stdin=stdin, stdout=subprocess.PIPE, stderr=errors,
                                env={**os.environ, **more}, start_new_session=True)  # fmt: skip
    except OSError as error:
        raise ProcessError(f"{command[0]}: {error.strerror}") from None


def _ended(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # its session is its own
        with suppress(subprocess.TimeoutExpired):
            process.wait(END)
            return


def _last(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"
