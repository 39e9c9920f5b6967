"""A lock file, so that only one agent runs at a time. The kernel releases the lock when the agent exits, even if it is
killed."""

from __future__ import annotations

import fcntl
import os
import stat


class AlreadyLocked(Exception):
    """Another agent holds the lock. The text names its process and the command that stops it."""


def take(path: str | os.PathLike[str], what: str) -> int:
    """Lock ``path`` and return the descriptor that holds the lock.

    The file is created with mode 0600, so that no other user can lock it. ``what``: the thing that the agent controls,
    for the error's text. Raises AlreadyLocked and OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(1, "is not a file of ours; remove it", os.fspath(path))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            said = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
            who = said if said.isdecimal() else "of unknown pid"
            raise AlreadyLocked(
                f"mpsagent {who} already runs for {what} ({path} is locked). One agent at a time: stop that one "
                f"(systemctl stop mpsagent, or kill it), or give this one other directories"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd
