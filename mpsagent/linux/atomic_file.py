"""A file that is there whole or not at all, and is believed only where no other user could have written it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def write(path: Path, content: str | bytes, mode: int = 0o600, *, lasting: bool = False) -> None:
    """In one step, with this mode whatever the umask: who reads finds the file of before or this one. ``lasting``: on
    disk when this returns, also after a power cut. One process writes a file. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content.encode() if isinstance(content, str) else content)
            if lasting:
                file.flush()
                os.fsync(fd)
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    if lasting:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def opened(path: str | os.PathLike[str]) -> int:
    """A descriptor of a plain file, to read: no link is followed, no FIFO or device waited for. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, not a plain file. Remove it", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a plain file. Remove it", str(path))
    return fd


def read(path: Path, largest: int) -> bytes:
    """Of ours or root's. Raises OSError as :func:`opened`, and ValueError with what is wrong."""
    with open(opened(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            mode = stat.S_IMODE(status.st_mode)
            raise ValueError(f"others could have written it (owner {status.st_uid}, mode {mode:04o})")
        if status.st_size > largest:
            raise ValueError(f"it has {status.st_size} bytes")
        return file.read(largest)
