"""Files that are written in one step, and that are read only if no other user could have written them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def write(path: Path, content: str | bytes, mode: int = 0o600, *, lasting: bool = False) -> None:
    """Replace a file in one step: a reader finds the old content or the new content.

    ``mode`` does not depend on the umask. ``lasting``: the content is on disk when this returns, even after a power
    cut. Only one process may write a file. Raises OSError.
    """
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
    """Return a descriptor to read a plain file. Raises OSError, even for a link, a FIFO or a device."""
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
    """Return the content of a file of this user or of root.

    Raises OSError as :func:`opened`, and ValueError with the reason if others could have written the file or it has
    more than ``largest`` bytes.
    """
    with open(opened(path), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            mode = stat.S_IMODE(status.st_mode)
            raise ValueError(f"others could have written it (owner {status.st_uid}, mode {mode:04o})")
        if status.st_size > largest:
            raise ValueError(f"it has {status.st_size} bytes")
        return file.read(largest)
