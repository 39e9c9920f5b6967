"""Workloads in separate programs, because they need PyTorch.

They run as the user of the process that starts them, and exit with it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import IO, Any

from mpsagent_bench.process import ProcessError, Ready, stepping

END = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_WITH_US = ["setpriv", "--pdeathsig", "KILL"]
_WORDS = 300
_NO_TORCH = 3
_NOT_STARTED = (126, 127)  # as in setpriv and shells
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
    """A workload of `torch_workloads.TORCH`, run by a Python that has PyTorch."""

    def __init__(self, python: str, name: str) -> None:
        self._name = name
        self._command = [python, "-c", resources.files("mpsagent_bench").joinpath("torch_workloads.py").read_text()]

    def __call__(self, number: int) -> Ready:
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        # In "/": Python's -c imports modules from the current directory, which another user may own.
        process = _started([*self._command, self._name], errors, _FOR_TORCH, stdin=subprocess.PIPE, cwd="/")
        assert process.stdin is not None
        assert process.stdout is not None
        about: dict[str, Any] = {}
        while "gpu" not in about:
            with suppress(ValueError):  # the output of a start script
                about = dict(json.loads(_line(process, process.stdout, errors)))

        def step() -> None:
            with suppress(OSError):  # it has exited: its last lines have the reason
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
