"""Processes and log files as a rig sees them: waited for, signalled through pidfds, followed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Log:
    """A followed log file: `lines` are its complete lines. It stays open through a rename, as MPS keeps it open too."""

    path: Path
    label: str
    descriptor: int | None = None
    offset: int = 0
    tail: bytes = b""
    lines: list[str] = field(default_factory=list)
    drained: int = 0  # lines already in the transcript
    seen: int = 0  # lines already consumed by wait_log

    def refresh(self) -> None:
        if self.descriptor is None:
            try:
                self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
        if os.fstat(self.descriptor).st_size < self.offset:
            self.offset, self.tail = 0, b""  # truncated in place
        while chunk := os.pread(self.descriptor, 1 << 20, self.offset):
            self.offset += len(chunk)
            *complete, self.tail = (self.tail + chunk).split(b"\n")
            self.lines += [line.decode(errors="replace") for line in complete]

    def reopen_if_replaced(self) -> None:
        """Before a new daemon starts: it will create the file anew if the name is free."""
        if self.descriptor is None:
            return
        self.refresh()
        try:
            same = os.stat(self.path).st_ino == os.fstat(self.descriptor).st_ino
        except FileNotFoundError:
            same = False
        if not same:
            self.close()
            self.offset, self.tail = 0, b""

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def exited(process: subprocess.Popen[bytes], timeout: float) -> bool:
    """Wait for a child without the coarse polling of Popen.wait, so that latencies mean something."""
    if process.poll() is not None:
        return True
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
        return process.poll() is not None
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll(max(0.0, timeout) * 1000)
    finally:
        os.close(descriptor)
    if process.poll() is None and timeout > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    return process.poll() is not None


def await_ends(pids: Iterable[int], timeout: float) -> None:
    """Until none of these processes lives, and no longer than that."""
    end = time.monotonic() + timeout
    for pid in pids:
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
            try:
                poller = select.poll()
                poller.register(descriptor, select.POLLIN)
                poller.poll(max(0.0, end - time.monotonic()) * 1000)
            finally:
                os.close(descriptor)


def send_signal(pid: int, number: int) -> bool:
    """Signal a process through a pidfd; False if it is gone, or none was found: 0 would be everybody here."""
    if pid <= 0:
        return False
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except (OSError, AttributeError):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    uid: int
    state: str
    arguments: str


def processes() -> Iterator[tuple[Process, bytes]]:
    """Every process with its environment (empty for those that we may not read)."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        base = Path("/proc", entry)
        try:
            text = (base / "stat").read_text(errors="replace")
            arguments = (base / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
            uid = base.stat().st_uid
            try:
                environment = (base / "environ").read_bytes()
            except OSError:
                environment = b""
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        yield Process(int(entry), int(parent), uid, state, arguments), environment
