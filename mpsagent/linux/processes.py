"""Processes, each known by a pidfd and its start time, never by a bare pid: numbers are used again."""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache

import psutil

from mpsagent.linux import proc

LONGEST_LINEAGE = 64
NS_GET_PARENT, NS_GET_OWNER_UID = 0xB702, 0xB704  # linux/nsfs.h
PIDFD_GETFD = 438
"""The number of its system call, the same on every architecture; Python has no function for it."""
TICKS = os.sysconf("SC_CLK_TCK")
_UNKNOWN = psutil.Error, OSError, ValueError  # it has gone, may not be asked, or no process has such a number


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Process:
    """One process, held by its pidfd: the number cannot come to mean another one. ``started`` in clock ticks after boot
    (field 22 of /proc/PID/stat), ``uid`` the real one. Made by :meth:`open`."""

    __slots__ = ("_fd", "_loop", "pid", "started", "uid")

    def __init__(self, pid: int, fd: int, started: int, uid: int) -> None:
        self.pid = pid
        self.started = started
        self.uid = uid
        self._fd = fd
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def open(cls, pid: int, uid: int | None = None, started: int | None = None) -> Process | None:
        """The living process ``pid``; None when there is none, or it is not ``uid``'s, or it started at another time
        than ``started`` (it is another one that has got the number)."""
        if pid <= 0:
            return None
        try:
            fd = os.pidfd_open(pid)
        except (OSError, OverflowError):
            return None
        # What /proc says now is about this very process if the pidfd is still alive afterwards.
        start, uids = proc.start_time(pid), proc.ids(pid, b"Uid:")
        found = bool(start and uids) and not proc.has_ended(fd)
        if not found or uid not in (None, uids[0]) or started not in (None, start):
            os.close(fd)
            return None
        return cls(pid, fd, start, uids[0])

    @classmethod
    def from_pidfd(cls, fd: int, pid: int, uid: int, started: int) -> Process:
        """The process of a pidfd that came from elsewhere (the gate, over a socket); the pidfd is ours from now on, and
        whoever passed it knows the rest. Raises ValueError, and closes it, when it is no pidfd of that process."""
        if pid <= 0 or proc.pid_of(fd) not in (pid, -1):
            os.close(fd)
            raise ValueError(f"descriptor {fd} is not a pidfd of process {pid}")
        return cls(pid, fd, started, uid)

    @property
    def alive(self) -> bool:
        return self._fd >= 0 and not proc.has_ended(self._fd)

    def send(self, number: int) -> str | None:
        """Sends a signal. None when it was sent, else why not. Only SIGCONT goes to one that is another user's now."""
        if self._fd < 0:
            return f"process {self.pid} is not held any more"
        if proc.has_ended(self._fd):
            return f"process {self.pid} has already ended"
        if number != signal.SIGCONT and self.is_anothers():
            return f"process {self.pid} of uid {self.uid} runs a setuid program of another user: nothing was sent"
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return f"process {self.pid} has already ended"
        except (OSError, ValueError) as error:
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            return f"{name} to process {self.pid} (uid {self.uid}): {error}"
        return None

    def duplicate(self, number: int) -> int:
        """Return a duplicate of one of its file descriptors (pidfd_getfd). Raises OSError."""
        found = _libc().syscall(
            ctypes.c_long(PIDFD_GETFD), ctypes.c_int(self._fd), ctypes.c_int(number), ctypes.c_uint(0)
        )
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(found)

    def when_gone(self, callback: Callable[[], None]) -> None:
        """``callback`` once in the running loop when the process has ended."""
        loop = self._loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._fd)
            self._loop = None
            callback()

        loop.add_reader(self._fd, gone)

    def is_anothers(self) -> bool:
        """It has executed a setuid program, and is the same process for all that (pid, start, pidfd). By the kernel's
        rule the user may signal it where its real or saved uid is the user's still, or its user namespace is; and root
        may signal anybody's."""
        uids = proc.ids(self.pid, b"Uid:")
        if not uids or self.uid in (0, uids[0], uids[2]):
            return False
        return self.uid not in _namespace_owners(self.pid)

    def handles(self, number: int) -> bool:
        """Return whether it has a handler for a signal, or ignores it, so that the signal does not end it."""
        found = proc.signals(self.pid, b"SigCgt:") | proc.signals(self.pid, b"SigIgn:")
        return bool(found >> (number - 1) & 1) and self.alive

    def stopped(self) -> bool:
        """True when it is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        return stopped(self.pid) and self.alive

    def cpu_seconds(self) -> float | None:
        """User and system time that it has used; None when it has ended."""
        with suppress(*_UNKNOWN):
            used = psutil.Process(self.pid).cpu_times()
            return used.user + used.system if self.alive else None
        return None

    def close(self) -> None:
        """Lets go of it; nothing is sent."""
        if self._fd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
                self._loop = None
            os.close(self._fd)
            self._fd = -1


def open_files(pid: int) -> int | None:
    """How many files a process may have open; None where that cannot be known, or without a limit."""
    with suppress(*_UNKNOWN):
        soft, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
        return None if soft == psutil.RLIM_INFINITY else soft
    return None


def stopped(pid: int) -> bool:
    """True when the process that has this pid now is stopped (SIGSTOP, a debugger)."""
    with suppress(*_UNKNOWN):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def parent(pid: int) -> int | None:
    """The pid of its parent, or None when it has ended."""
    with suppress(*_UNKNOWN):
        return psutil.Process(pid).ppid()
    return None


def lineage(pid: int) -> tuple[tuple[int, int], ...]:
    """(pid, start time) of a process and of those that it descends from, as far as they can be read."""
    found: list[tuple[int, int]] = []
    while pid > 1 and len(found) < LONGEST_LINEAGE:
        if not (fields := proc.fields(pid)):
            break
        found.append((pid, int(fields[19])))
        pid = int(fields[1])
    return tuple(found)


def _namespace_owners(pid: int) -> list[int]:
    """Who made the user namespace of a process, and those around it, up to ours; the kernel nests at most 32."""
    found: list[int] = []
    with suppress(OSError), ExitStack() as opened:
        space = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        while True:
            opened.callback(os.close, space)
            found.append(int.from_bytes(fcntl.ioctl(space, NS_GET_OWNER_UID, bytes(4)), sys.byteorder))
            space = fcntl.ioctl(space, NS_GET_PARENT)
    return found
