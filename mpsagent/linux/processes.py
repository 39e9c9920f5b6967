"""Processes that are held by a pidfd and a start time. A pid alone is not enough, because the kernel reuses pids."""

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
from mpsagent.linux.descriptors import may_keep

LONGEST_LINEAGE = 64
NS_GET_PARENT, NS_GET_OWNER_UID = 0xB702, 0xB704  # linux/nsfs.h
PIDFD_GETFD = 438
"""The number of this system call on every architecture. Python has no function for it."""
TICKS = os.sysconf("SC_CLK_TCK")
_UNKNOWN = psutil.Error, OSError, ValueError  # it has ended, may not be read, or there is no such pid


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class Process:
    """A process and its pidfd, from :meth:`open` or :meth:`from_pidfd`.

    ``started``: clock ticks since boot (field 22 of /proc/PID/stat). ``uid``: its real user.
    """

    __slots__ = ("_fd", "_loop", "pid", "started", "uid")

    def __init__(self, pid: int, fd: int, started: int, uid: int) -> None:
        self.pid = pid
        self.started = started
        self.uid = uid
        self._fd = fd
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def open(cls, pid: int, uid: int | None = None, started: int | None = None) -> Process | None:
        """Return the running process with this pid; None if there is none, or its user or start time is another one."""
        fd = proc.open_pidfd(pid, 0)
        if fd is None:
            return None
        # These facts are about this process if it still runs afterwards: until it ends, its pid is not reused.
        start, uids = proc.start_time(pid), proc.ids(pid, b"Uid:")
        found = bool(start and uids) and not proc.has_ended(fd)
        if not found or uid not in (None, uids[0]) or started not in (None, start):
            os.close(fd)
            return None
        return cls(pid, fd, start, uids[0])

    @classmethod
    def from_pidfd(cls, fd: int, pid: int, uid: int, started: int) -> Process:
        """Return the process of a pidfd that another process (the gate) has sent, with the user and start time that it
        has sent. Raises ValueError and closes the descriptor if it is not a pidfd of that process."""
        if pid <= 0 or proc.pid_of(fd) not in (pid, -1):
            os.close(fd)
            raise ValueError(f"descriptor {fd} is not a pidfd of process {pid}")
        return cls(pid, fd, started, uid)

    @property
    def kept(self) -> bool:
        """Return False if its pidfd is one of the last descriptors, which are for other work."""
        return may_keep(self._fd)

    @property
    def alive(self) -> bool:
        """True until the process ends or :meth:`close` is called."""
        return self._fd >= 0 and not proc.has_ended(self._fd)

    def send(self, number: int) -> str | None:
        """Send a signal; return the reason if it was not sent. Another user's process gets only SIGCONT."""
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
        """Return a duplicate of one of the process's descriptors (pidfd_getfd). Raises OSError."""
        found = _libc().syscall(
            ctypes.c_long(PIDFD_GETFD), ctypes.c_int(self._fd), ctypes.c_int(number), ctypes.c_uint(0)
        )
        if found < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return int(found)

    def when_gone(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once in the running loop when the process ends."""
        loop = self._loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._fd)
            self._loop = None
            callback()

        loop.add_reader(self._fd, gone)

    def is_anothers(self) -> bool:
        """Return True if the process runs a setuid program and its user may not signal it. It keeps pid, start time and
        pidfd.

        The kernel's rule: the user may signal it if its real or saved uid is still the user's, or if its user namespace
        is the user's. Root may signal each process.
        """
        uids = proc.ids(self.pid, b"Uid:")
        if not uids or self.uid in (0, uids[0], uids[2]):
            return False
        return self.uid not in _namespace_owners(self.pid)

    def handles(self, number: int) -> bool:
        """Return True if the process handles or ignores a signal, so that the signal does not end it."""
        found = proc.signals(self.pid, b"SigCgt:") | proc.signals(self.pid, b"SigIgn:")
        return bool(found >> (number - 1) & 1) and self.alive

    def stopped(self) -> bool:
        """Return True if the process is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        return stopped(self.pid) and self.alive

    def cpu_seconds(self) -> float | None:
        """Return the user and system time of the process; None if it has ended."""
        with suppress(*_UNKNOWN):
            used = psutil.Process(self.pid).cpu_times()
            return used.user + used.system if self.alive else None
        return None

    def close(self) -> None:
        """Close the pidfd. No signal is sent."""
        if self._fd >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self._fd)
                self._loop = None
            os.close(self._fd)
            self._fd = -1


def open_files(pid: int) -> int | None:
    """Return the number of files that a process may have open; None if it has no limit or the limit cannot be read."""
    with suppress(*_UNKNOWN):
        soft, _ = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
        return None if soft == psutil.RLIM_INFINITY else soft
    return None


def stopped(pid: int) -> bool:
    """Return True if the process that has this pid now is stopped (SIGSTOP, a debugger)."""
    with suppress(*_UNKNOWN):
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    return False


def parent(pid: int) -> int | None:
    """Return the pid of the process's parent; None if the process has ended."""
    with suppress(*_UNKNOWN):
        return psutil.Process(pid).ppid()
    return None


def lineage(pid: int) -> tuple[tuple[int, int], ...]:
    """Return pid and start time of a process and of its ancestors, as far as they can be read."""
    found: list[tuple[int, int]] = []
    while pid > 1 and len(found) < LONGEST_LINEAGE:
        if not (fields := proc.fields(pid)):
            break
        found.append((pid, int(fields[19])))
        pid = int(fields[1])
    return tuple(found)


def _namespace_owners(pid: int) -> list[int]:
    """Return the owners of the process's user namespace and of the namespaces around it, up to this process's own.

    The kernel nests at most 32.
    """
    found: list[int] = []
    with suppress(OSError), ExitStack() as opened:
        space = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        while True:
            opened.callback(os.close, space)
            found.append(int.from_bytes(fcntl.ioctl(space, NS_GET_OWNER_UID, bytes(4)), sys.byteorder))
            space = fcntl.ioctl(space, NS_GET_PARENT)
    return found
