"""The control daemon as a process: what a supervisor does, and why there may be none to work with."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mpsagent.linux.processes import Process
from mpsagent.mps.commands import NO_DAEMON_TEXT
from mpsagent.mps.units import percent_text
from mpsagent.system.spawn import find_program

PROGRAM, SERVER = "nvidia-cuda-mps-control", "nvidia-cuda-mps-server"
PID_FILE = "nvidia-cuda-mps-control.pid"
DEFAULT_PIPE_DIRECTORY = "/tmp/nvidia-mps"
DEFAULT_LOG_DIRECTORY = "/var/log/nvidia-mps"
MULTIUSER = "--multiuser-server"
NO_LIBCUDA = 244
"""Exit status of the control daemon when it cannot load libcuda.so.1."""


@dataclass(frozen=True, slots=True)
class Running:
    """A control daemon that was proved to be the one of ``pipe_directory``; ``how`` says how it was found."""

    process: Process
    pipe_directory: str
    log_directory: str
    devices: str | None
    """Its CUDA_VISIBLE_DEVICES."""
    threads: str | None
    """Its CUDA_MPS_ACTIVE_THREAD_PERCENTAGE: the default that it started with."""
    multiuser: bool
    how: str

    @property
    def pid(self) -> int:
        return self.process.pid


class ProblemKind(StrEnum):
    """``ABSENT``: start one. ``MISSING``: NVIDIA's program is not there; a person has to install it. ``UNSUPPORTED``:
    this driver's daemon does not know --multiuser-server; start it without. ``UNSAFE``: one is there that is not to be
    touched. ``FAILED``: it did not start; later it may."""

    ABSENT = "not running"
    MISSING = "not installed"
    UNSUPPORTED = "not supported by this driver"
    UNSAFE = "not safe to take over"
    FAILED = "did not start"


@dataclass(frozen=True, slots=True)
class ControlProblem:
    """Why there is no control daemon to work with; ``commands`` clean up, for a person to run."""

    kind: ProblemKind
    text: str
    commands: tuple[str, ...] = ()


class ControlSupervisor(ABC):
    """Starts, adopts and holds the control daemon of one instance. Nothing here raises or blocks the loop.
    ``on_gone(pid)`` is called when it has ended."""

    def __init__(self, pipe_directory: str, on_gone: Callable[[int], None], program: str) -> None:
        self.pipe_directory, self.program = pipe_directory, program
        self._on_gone = on_gone
        self.running: Running | None = None
        """The daemon that is held, if any."""

    @abstractmethod
    async def start(
        self, environment: Mapping[str, str], threads: float, *, multiuser: bool = False
    ) -> Running | ControlProblem:
        """Starts a daemon in the hidden directory. ``threads``: the fail-safe percentage, in force from its first
        moment; ``multiuser``: one server for all users."""

    @abstractmethod
    async def adopt(self) -> Running | ControlProblem:
        """Takes over our own daemon, which runs already."""

    async def forget(self) -> None:  # noqa: B027
        """There is to be no daemon here any more."""

    def hold(self, running: Running) -> Running:
        self.close()
        self.running = running
        running.process.when_gone(lambda: self._gone(running))
        return running

    def kill(self) -> str | None:
        """SIGKILL; its servers exit with it. None when it was sent, else why not."""
        if self.running is None:
            return "no control daemon is held"
        return self.running.process.send(signal.SIGKILL)

    def close(self) -> None:
        """Lets go; the daemon runs on."""
        if self.running is not None:
            self.running.process.close()
            self.running = None

    def _gone(self, running: Running) -> None:
        if self.running is running:
            self.close()
            self._on_gone(running.pid)


# --- starting one ----------------------------------------------------------------------------------------------------


def daemon_environment(hidden: str, threads: float) -> dict[str, str]:
    """What a control daemon is given beside the policy's own variables."""
    return {"CUDA_MPS_PIPE_DIRECTORY": hidden, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent_text(threads)}


def installed(program: str, environment: Mapping[str, str]) -> str | ControlProblem:
    """The path of NVIDIA's program, or that it is not installed."""
    path = find_program(program, environment)
    if path is not None:
        return path
    if "/" in program:
        text = f"{program} is not there or not executable (control_daemon_path in [instance.NAME]); correct the policy"
    else:
        looked = environment.get("PATH") or "no PATH"
        text = (
            f"{program} is not installed (looked in {looked}); install MPS (Debian: apt install nvidia-cuda-mps; "
            f"elsewhere it comes with the driver), or set control_daemon_path in [instance.NAME]"
        )
    return ControlProblem(ProblemKind.MISSING, text)


def start_failure(path: str, code: int | None, said: str, multiuser: bool) -> ControlProblem:
    """What an exit status other than 0 of ``nvidia-cuda-mps-control -d`` means. ``said``: its output, in one line."""
    name = Path(path).name
    if code == NO_LIBCUDA:
        text = f"{name} ended with status 244: it cannot load libcuda.so.1. Is the NVIDIA driver installed, and does "
        text += "ldconfig -p list that library?"
        return ControlProblem(ProblemKind.FAILED, text, ("nvidia-smi", "ldconfig"))
    if multiuser and code == 1 and NO_DAEMON_TEXT in said:
        # Drivers 470, 535 and 550 take an unknown option for a call of the front-end.
        return ControlProblem(ProblemKind.UNSUPPORTED, f"{name} of this driver does not know {MULTIUSER}")
    return ControlProblem(ProblemKind.FAILED, f"{path} -d ended with status {code}: {said or 'no message'}")
