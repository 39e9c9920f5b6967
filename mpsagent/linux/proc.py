"""Facts about a process from the kernel: start time, user and group, command, cgroup, namespace. By pidfd and /proc."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path

LONGEST_COMMAND = 64
LONGEST_CGROUP = 512


def fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third one on; an empty list if the process has ended.

    The second field is the process's name, which may contain parentheses and blanks.
    """
    return read(pid, "stat").rpartition(b")")[2].split()


def start_time(pid: int) -> int:
    """Return the start time in clock ticks since boot; 0 if the process has ended."""
    found = fields(pid)
    return int(found[19]) if len(found) > 19 else 0


def start_of_users(pid: int, uid: int) -> int:
    """Return the start time of a process of this user; 0 if it is another user's or has ended."""
    return start_time(pid) if uid in ids(pid, b"Uid:") else 0


def read(pid: int, name: str) -> bytes:
    """Return the content of a file in /proc/PID; empty if the process has ended."""
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read(16384)
    return b""


def _status(pid: int, row: bytes) -> list[bytes]:
    """Return the words of a row of /proc/PID/status; an empty list if the process has ended."""
    return next((line.split()[1:] for line in read(pid, "status").splitlines() if line.startswith(row)), [])


def ids(pid: int, row: bytes) -> tuple[int, ...]:
    """Return the numbers in a row of /proc/PID/status; an empty tuple if the process has ended.

    ``Uid:`` and ``Gid:`` have the real, effective, saved and file system's id. ``NSpid:`` has the process's pid in each
    pid namespace, from this one down.
    """
    return tuple(map(int, _status(pid, row)))


def signals(pid: int, row: bytes) -> int:
    """Return the signals that a process handles (``SigCgt:``) or ignores (``SigIgn:``), the lowest bit for signal 1;
    0 if the process has ended."""
    return int((_status(pid, row) or [b"0"])[0], 16)


def real_gid(pid: int, uid: int) -> int | None:
    """Return the real group of a process whose real user is ``uid``; None if it is another user's or has ended."""
    group = ids(pid, b"Gid:")
    return group[0] if ids(pid, b"Uid:")[:1] == (uid,) and group else None


def command(pid: int) -> str:
    """Return the process's name, which the process chooses, without control characters."""
    text = read(pid, "comm").decode("utf-8", "replace").rstrip("\n")
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:LONGEST_COMMAND]


def cgroup(pid: int) -> str | None:
    """Return the path of the process's cgroup; None if the process has ended."""
    return cgroup_of(read(pid, "cgroup").decode("utf-8", "replace"))


def cgroup_of(text: str) -> str | None:
    """Return one of the paths in /proc/PID/cgroup.

    The freezer's path if there is one (cgroups version 1): systemd leaves that hierarchy to batch systems, and names
    their service in all others. Otherwise the path of version 2, otherwise the first path below the root. A path may
    contain every letter except a newline, and users name cgroups of their own.
    """
    rows = [line.split(":", 2) for line in text.split("\n") if line.count(":") >= 2]
    rows.sort(key=lambda row: (row[1] != "freezer", row[:2] != ["0", ""]))
    found = next((path for _, _, path in rows if path != "/"), "/")
    return found[:LONGEST_CGROUP] if rows else None


def namespace(pid: int | str, kind: str) -> int | None:
    """Return the inode of the process's namespace of this kind (``pid``, ``mnt``); None if it cannot be read.

    ``pid`` may be "self".
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/ns/{kind}").stat().st_ino
    return None


def contained(pid: int, start: int) -> bool:
    """Return True if the process is in a pid namespace below this one, as in a container, or has ended.

    /proc/PID/ns would need rights over the process; /proc/PID/status needs none.
    """
    return len(ids(pid, b"NSpid:")) > 1 or not start or start_time(pid) != start


def boot_id() -> str:
    """Return the random number that the kernel chose at this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# --- pidfds ----------------------------------------------------------------------------------------------------------


def open_pidfd(pid: int, start: int) -> int | None:
    """Return a new pidfd of the process with this start time (0: any); None if that process has ended."""
    if pid <= 0:
        return None
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    if start and start_time(pid) != start:
        os.close(descriptor)
        return None
    return descriptor


def exists(pid: int) -> bool:
    """Return False if there is no process with this pid. No descriptor is needed."""
    try:
        os.getpgid(pid)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def has_ended(pidfd: int) -> bool:
    """Return True if the process of this pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def pid_of(pidfd: int) -> int:
    """Return the pid of a pidfd's process; -1 if the process has ended; 0 if this is another kind of descriptor or the
    process is in a pid namespace that cannot be seen from here."""
    with suppress(OSError, ValueError), open(f"/proc/self/fdinfo/{pidfd}") as file:
        for line in file:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    return 0
