"""What a process shows of itself: its command, since when it runs, where it looks for MPS, what it asks of MPS.

Its environment is read out of its memory, as a debugger would: /proc/PID/environ is its owner's alone, and the agent
has the right to look into processes (CAP_SYS_PTRACE) but none over other people's files. All of it is the process's own
word.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpsagent.linux.proc import start_time
from mpsagent.linux.processes import TICKS
from mpsagent.linux.threads import Slots


class Shown(NamedTuple):
    """``began``: seconds since the epoch; ``directory``: its CUDA_MPS_PIPE_DIRECTORY, empty when it has none, None when
    its environment cannot be read; ``reaches``: the public socket is there for it, None: cannot be known."""

    command: str = ""
    began: float | None = None
    directory: str | None = None
    reaches: bool | None = None


LOOKS = Slots(8)
"""Threads that look at processes. The pages that one shows may lie in a file system of its user's (FUSE), or behind a
userfaultfd, and never come; so 32 such processes took all threads there are."""
MOST = 128 << 10
"""Bytes of an environment that are read."""
LONGEST = 300
VARIABLE = b"CUDA_MPS_PIPE_DIRECTORY="
PARTITIONING = b"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING="
PERCENTAGE = b"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="
MEMORY = b"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT="
# How MPS reads the two, docs/measured.md, "A client's own environment".
_YES = re.compile(rb"\s*\+?0*1(?!\d)")
_NUMBER = re.compile(rb"\s*\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_LONGEST_NUMBER = 32
_SIZE = re.compile(r"\d+[GM]$", re.ASCII)
SHOWN = 60
"""Characters of a process's own that are told."""
_LEAST, _MOST = 0.04, 99.9
"""The percentages with which MPS was seen to hold such a client to its limit; with 0, 100 and more it did not."""


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def facts(processes: Sequence[tuple[int, int]], public: str) -> list[Shown]:
    """Of each (pid, start time). May block for as long as a process's memory or root directory does."""
    return [_facts(pid, start, public) for pid, start in processes]


def _facts(pid: int, start: int, public: str) -> Shown:
    command = ""
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read(4096).replace(b"\0", b" ").decode(errors="replace").strip()[:LONGEST]
    began = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + start / TICKS
    environment, reaches = environment_of(pid), _reaches(pid, public)
    if start_time(pid) != start:  # another process has the number now
        return Shown()
    directory = None
    if environment is not None:
        directory = _value(environment, VARIABLE).decode(errors="replace")[:LONGEST]
    return Shown(command, began, directory, reaches)


def lifts(processes: Sequence[tuple[int, int]], devices: Collection[str]) -> list[tuple[bool, str | None]]:
    """Which limits MPS forgets of each (pid, start time), because of what it was started with: that of threads, by
    partitioning by context without a percentage of its own; that of memory, by the text that is shown, which cannot be
    read or names none of ``devices`` (ordinals and UUIDs; empty: not known). May block as ``facts`` does."""
    found = []
    for pid, start in processes:
        environment = environment_of(pid) or b""
        if start_time(pid) != start:  # another process has the number now
            environment = b""
        found.append((_asks_for_all(environment), _forgotten(_value(environment, MEMORY), devices)))
    return found


def _forgotten(text: bytes, devices: Collection[str]) -> str | None:
    """The text, where MPS forgets the memory limit over it (recording 11)."""
    said = text.decode(errors="replace")
    parts = [part.partition("=") for part in said.split(",")] if said else []
    if all((device in devices or not devices) and _SIZE.match(size) for device, _, size in parts):
        return None
    return "".join(one if one.isprintable() else "?" for one in said[:SHOWN])


def _asks_for_all(environment: bytes) -> bool:
    own = _value(environment, PERCENTAGE)
    number = _NUMBER.match(own) if len(own) <= _LONGEST_NUMBER else None
    held = number is not None and _LEAST <= float(number[0]) <= _MOST
    return _YES.match(_value(environment, PARTITIONING)) is not None and not held


def _value(environment: bytes, variable: bytes) -> bytes:
    """The first one counts, as for getenv."""
    return next((one for one in environment.split(b"\0") if one.startswith(variable)), variable).removeprefix(variable)


def environment_of(pid: int) -> bytes | None:
    """The environment that a process was started with; None where that cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        begin, end = int(fields[47]), int(fields[48])
    except (OSError, ValueError, IndexError):
        return None
    length = min(end - begin, MOST)
    if begin <= 0 or length <= 0:
        return None
    buffer = ctypes.create_string_buffer(length)
    here, there = _Piece(ctypes.addressof(buffer), length), _Piece(begin, length)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    many = ctypes.c_ulong(1)
    got = libc.process_vm_readv(pid, ctypes.byref(here), many, ctypes.byref(there), many, ctypes.c_ulong(0))
    return buffer.raw[:got] if got > 0 else None


def _reaches(pid: int, public: str) -> bool | None:
    """Whether the socket that it finds at the public place is the one there is here; None: cannot be known."""
    try:
        here = Path(f"{public}/control").stat()
        there = Path(f"/proc/{pid}/root{public}/control").stat()
    except FileNotFoundError:
        return False if Path(f"{public}/control").exists() else None
    except OSError:
        return None
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
