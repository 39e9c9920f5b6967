"""Processes, each known by a pidfd and its start time, never by a bare pid: numbers are used again."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress

LONGEST_LINEAGE = 64
LONGEST_COMMAND = 64
NS_GET_PARENT, NS_GET_OWNER_UID = 0xB702, 0xB704  # linux/nsfs.h
TICKS = os.sysconf("SC_CLK_TCK")


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
        facts = _facts(pid)
        if (
            facts is None
            or _ended(fd)
            or (uid is not None and facts[1] != uid)
            or (started is not None and facts[0] != started)
        ):
            os.close(fd)
            return None
        return cls(pid, fd, *facts)

    @classmethod
    def from_pidfd(cls, fd: int, pid: int, uid: int, started: int) -> Process:
        """The process of a pidfd that came from elsewhere (the gate, over a socket); the pidfd is ours from now on, and
        whoever passed it knows the rest. Raises ValueError, and closes it, when it is no pidfd of that process."""
        if pid <= 0 or _pid_of(fd) not in (pid, -1):
            os.close(fd)
            raise ValueError(f"descriptor {fd} is not a pidfd of process {pid}")
        return cls(pid, fd, started, uid)

    @property
    def alive(self) -> bool:
        return self._fd >= 0 and not _ended(self._fd)

    def send(self, number: int) -> str | None:
        """Sends a signal. None when it was sent, else why not. Only SIGCONT goes to one that is another user's now."""
        if self._fd < 0:
            return f"process {self.pid} is not held any more"
        if _ended(self._fd):
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
        uids = _uids(self.pid)
        if uids is None or self.uid in (0, uids[0], uids[2]):
            return False
        return self.uid not in _namespace_owners(self.pid)

    def stopped(self) -> bool:
        """True when it is stopped (SIGSTOP, Ctrl-Z, a debugger)."""
        return stopped(self.pid) and self.alive

    def cpu_seconds(self) -> float | None:
        """User and system time that it has used; None when it has ended."""
        fields = _stat(self.pid)
        if fields is None or not self.alive:
            return None
        return (int(fields[11]) + int(fields[12])) / TICKS

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
    with suppress(OSError, ValueError):
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft
    return None


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which ``pid`` started, or None."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else None


def stopped(pid: int) -> bool:
    """True when the process that has this pid now is stopped (SIGSTOP, a debugger)."""
    fields = _stat(pid)
    return fields is not None and fields[0] in ("T", "t")


def parent(pid: int) -> int | None:
    """The pid of its parent, or None when it has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields is not None else None


def lineage(pid: int) -> tuple[tuple[int, int], ...]:
    """(pid, start time) of a process and of those that it descends from, as far as they can be read."""
    found: list[tuple[int, int]] = []
    while pid > 1 and len(found) < LONGEST_LINEAGE:
        fields = _stat(pid)
        if fields is None:
            break
        found.append((pid, int(fields[19])))
        pid = int(fields[1])
    return tuple(found)


def _pid_of(fd: int) -> int | None:
    """The process of a pidfd: -1 when it has ended, None when the descriptor is no pidfd, or its process is
    in a pid namespace that cannot be seen."""
    with suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file.read(4096).split(b"\n"):
            if line.startswith(b"Pid:"):
                return int(line.split()[1]) or None
    return None


def _ended(fd: int) -> bool:
    """A pidfd is readable from the moment its process has ended, reaped or not."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the command, which may hold blanks and brackets: field 3 comes first."""
    with suppress(OSError, ValueError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
        fields = file.read(4096).rpartition(b")")[2].decode("ascii").split()
        return fields if len(fields) > 19 else None
    return None


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


def _facts(pid: int) -> tuple[int, int] | None:
    """Start time and real uid."""
    fields, uids = _stat(pid), _uids(pid)
    return None if fields is None or uids is None else (int(fields[19]), uids[0])


def _uids(pid: int) -> tuple[int, ...] | None:
    """Real, effective, saved and file system's uid."""
    return ids(pid, b"Uid:")


def ids(pid: int, row: bytes) -> tuple[int, ...] | None:
    """The four uids (``Uid:``) or gids (``Gid:``) of a process."""
    with suppress(OSError, ValueError, StopIteration), open(f"/proc/{pid}/status", "rb") as file:
        row = next(line for line in file.read(8192).split(b"\n") if line.startswith(row))
        return tuple(int(one) for one in row.split()[1:5])
    return None


def command(pid: int) -> str:
    """What the process calls itself, without control characters."""
    with suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:
        text = file.read(256).decode("utf-8", "replace")
        return "".join(letter if letter.isprintable() else "?" for letter in text.rstrip("\n"))[:LONGEST_COMMAND]
    return ""
