"""Who computes on our GPUs outside MPS, without limits, and whether the compute mode is the policy's.

A client that cannot reach the control daemon runs without MPS and says nothing. NVML lists it; MPS does not. NVML lists
MPS's own servers too, of other instances as well, so a process is held against what runs in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mpsagent.system.devices import ComputeProcess
from mpsagent.system.processes import Process

EVERY = 60.0
"""Seconds between two looks while a process holds a GPU or waits; none while all is idle: each one starts a program."""
SERVER = "nvidia-cuda-mps-server"
SHOWN = 5


class Outsider(NamedTuple):
    """A process outside MPS. ``start`` tells it from a later one with the same pid."""

    pid: int
    start: int
    uid: int
    device: str
    memory: int | None


class Bypass:
    """Remembers who was found, so that each process is recorded once."""

    def __init__(self) -> None:
        self.found: tuple[Outsider, ...] = ()
        self._said: set[tuple[int, int]] = set()

    def take(
        self, listed: Iterable[ComputeProcess], ours: Iterable[str], known: Mapping[int, object] | set[int]
    ) -> list[Outsider]:
        """``listed`` by NVML; ``ours``: UUIDs of our GPUs; ``known``: pids of MPS's servers and clients. Returns those
        who were not seen before."""
        devices = set(ours)
        found: dict[int, Outsider] = {}
        for one in listed:
            if one.mps or one.pid in known or one.pid in found or one.device not in devices:
                continue
            process = Process.open(one.pid)
            if process is None:
                continue
            if not is_server(one.pid) and process.alive:
                found[one.pid] = Outsider(one.pid, process.started, process.uid, one.device, one.memory)
            process.close()
        self.found = tuple(found.values())
        fresh = [one for one in self.found if (one.pid, one.start) not in self._said]
        self._said = {(one.pid, one.start) for one in self.found}
        return fresh

    def drop_ended(self) -> None:
        """Forget who has ended."""
        if self.found:
            self.found = tuple(one for one in self.found if _lives(one))

    def trouble(self) -> str | None:
        if not self.found:
            return None
        who = ", ".join(f"process {one.pid} of user {one.uid} on {one.device}" for one in self.found[:SHOWN])
        more = f" and {len(self.found) - SHOWN} more" if len(self.found) > SHOWN else ""
        return f"computing outside MPS, without limits: {who}{more}"


def advice(pipe_directory: str) -> str:
    return (
        f"start them again with CUDA_MPS_PIPE_DIRECTORY={pipe_directory} in their environment; with the compute mode "
        "EXCLUSIVE_PROCESS (nvidia-smi -c EXCLUSIVE_PROCESS) such programs fail instead"
    )


def is_server(pid: int) -> bool:
    """Whether the program in a process is MPS's server (by its file, not by the name it gives itself)."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name.removesuffix(" (deleted)") == SERVER
    except OSError:
        return False


def mode_trouble(wanted: str | None, modes: Mapping[str, str], ours: Iterable[str]) -> str | None:
    """What is not as the policy wants it; ``modes`` by UUID, in the policy's words."""
    if wanted is None:
        return None
    wrong = [f"{modes[uuid]} on {uuid}" for uuid in ours if uuid in modes and modes[uuid] != wanted]
    return f"the compute mode is {', '.join(wrong)}; the policy wants {wanted}" if wrong else None


def _lives(one: Outsider) -> bool:
    process = Process.open(one.pid, one.uid, one.start)
    if process is None:
        return False
    process.close()
    return True
