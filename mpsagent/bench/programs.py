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
from pathlib import Path
from typing import IO, Any

from mpsagent.bench.process import Latencies, ProcessError, Ready, Told, stepping

FIRST = 50.0
"""Seconds in which a program must have told of its first steps, or have ended once: less than a run waits for it."""
END = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
_STEPS = re.compile(rb"\s*steps:?\s+(\d{1,15})\b")
_SAYS_MUCH = 1 << 20
_WORDS = 300
_NO_TORCH = 3
_NOT_STARTED = (126, 127)  # as setpriv says it, and shells
_HAS_TORCH = f"import importlib.util, sys; importlib.util.find_spec('torch') or sys.exit({_NO_TORCH}); import torch"
_FOR_TORCH = {"USER": "bench", "LOGNAME": "bench", "HOME": "/nonexistent"}  # PyTorch asks who it is
IMPORT = 60.0
"""Seconds that the first import of PyTorch may take, from a cold disk."""


def python_with_torch(asked: str | None, uid: int | None) -> tuple[str, str]:
    """``asked``, or the first python3 on PATH; and why it does not do, or nothing. It must do for the user whose the
    processes will be (None: for ourselves)."""
    found = shutil.which(asked or "python3") or asked
    if not found:
        return "", "there is no python3 on PATH"
    python = str(Path(found).absolute())  # not a link's target: a venv's Python knows itself by its link
    as_user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    who = "" if uid is None else f" for user {uid}, as whom the processes run"
    command = [*_WITH_US, python, "-c", _HAS_TORCH]
    with tempfile.TemporaryFile() as errors:
        try:
            code = subprocess.run(
                command, check=False, timeout=IMPORT, cwd="/", env={**os.environ, **_FOR_TORCH}, stdout=errors,
                stderr=errors, **as_user,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return python, f"{python} does not import PyTorch in {IMPORT:g} s{who}"
        if code == _NO_TORCH:
            return python, f"{python} has no PyTorch{who}"
        if code in _NOT_STARTED:
            return python, f"{python} does not start{who}: {_last(errors)}"
        return python, f"{python} cannot import PyTorch{who}: {_last(errors)}" if code else ""


class Torch:
    """One of `torch_workloads.TORCH`, run by a Python that has PyTorch."""

    def __init__(self, python: str, name: str) -> None:
        self._name = name
        self._command = [python, "-c", resources.files("mpsagent.bench").joinpath("torch_workloads.py").read_text()]

    def __call__(self, number: int) -> Ready:
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        # In "/": Python's -c looks for modules where it is started, and that may be anybody's directory.
        process = _started([*self._command, self._name], errors, _FOR_TORCH, stdin=subprocess.PIPE, cwd="/")
        assert process.stdin is not None
        assert process.stdout is not None
        about: dict[str, Any] = {}
        while "gpu" not in about:
            with suppress(ValueError):  # what a start script prints
                about = dict(json.loads(_line(process, process.stdout, errors)))

        def step() -> None:
            with suppress(OSError):  # it has ended: its last words say why
                os.write(process.stdin.fileno(), b"\n")  # type: ignore[union-attr]
            _line(process, process.stdout, errors)  # type: ignore[arg-type]

        return stepping(about["gpu"], about["multiprocessors"], step, lambda: _ended(process))


def _line(process: subprocess.Popen[bytes], out: IO[bytes], errors: IO[bytes]) -> bytes:
    line = out.readline()
    if not line:
        raise ProcessError(f"PyTorch {_end(process.wait())}: {_last(errors)}")
    if line.startswith(b'{"error"'):
        raise ProcessError(f"PyTorch: {json.loads(line)['error'][:_WORDS]}")
    return line


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
            raise ProcessError(f"{self._command[0]} {_end(self._process.returncode)}: {_last(self._errors)}")
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


def _started(
    command: list[str], errors: IO[bytes], more: dict[str, str], stdin: int, cwd: str | None = None
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen([*_WITH_US, *command], stdin=stdin, stdout=subprocess.PIPE, stderr=errors, cwd=cwd,
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


def _end(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def _last(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:_WORDS] if lines else "it said nothing"
