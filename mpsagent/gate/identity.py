"""What the kernel says of a process: start time, ids, what it calls itself, by pidfd and /proc. For the agent, too."""

from __future__ import annotations

import select
from contextlib import suppress

LONGEST_COMMAND = 64


def fields(pid: int) -> list[bytes]:
    """Those of /proc/PID/stat behind the name, which may hold anything, parentheses and blanks too: the third one comes
    first. None at all when the process has gone."""
    return said(pid, "stat").rpartition(b")")[2].split()


def start_time(pid: int) -> int:
    """Clock ticks since boot; 0 when the process has gone."""
    found = fields(pid)
    return int(found[19]) if len(found) > 19 else 0


def said(pid: int, name: str) -> bytes:
    """A file of /proc/PID; nothing when the process has gone."""
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(16384)
    return b""


def ids(pid: int, row: bytes) -> tuple[int, ...]:
    """The real, effective, saved and file system's uids (``Uid:``) or gids (``Gid:``) of a process, or its pids in the
    namespaces from here on (``NSpid:``); none when it has gone."""
    found = next((line for line in said(pid, "status").splitlines() if line.startswith(row)), b"")
    return tuple(map(int, found.split()[1:]))


def signals(pid: int, row: bytes) -> int:
    """Return the signals that a process handles (``SigCgt:``) or ignores (``SigIgn:``), a bit for each from 1 on; 0
    when it has gone."""
    found = next((line for line in said(pid, "status").splitlines() if line.startswith(row)), b"")
    return int((found.split()[1:] or [b"0"])[0], 16)


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def pid_of(pidfd: int) -> int:
    """The pid of a pidfd's process; -1 when it has ended, 0 for what is no pidfd, or of a process that is in a pid
    namespace that cannot be seen."""
    with suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{pidfd}") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return 0


def command(pid: int) -> str:
    """What the process calls itself, without control characters."""
    text = said(pid, "comm").decode("utf-8", "replace").rstrip("\n")
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:LONGEST_COMMAND]
