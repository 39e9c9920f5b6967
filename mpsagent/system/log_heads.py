"""Takes the beginning of a log off the disk while others append to it, without a line lost.

MPS opens its logs once, for append, so they cannot be renamed; and between reading and truncating lines would be lost.
``fallocate`` takes whole blocks out of the file in one step: on ext4 and XFS what follows moves up (a file that begins
in the middle of a line); elsewhere they become a hole, which takes no room. MPS wrote on after both
(docs/measured/2026-11-23-2xH200-580.159.04/contexts-full.txt, ext4).
"""

from __future__ import annotations

import ctypes
import errno
import os

STEP = 1 << 20
"""A multiple of every file system's blocks."""
KEPT = 0.75
"""The part that stays: each time costs MPS a moment in which it cannot write."""

_KEEP_SIZE, _PUNCH_HOLE, _COLLAPSE_RANGE = 0x01, 0x02, 0x08
_NOT_HERE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def excess(fd: int, most: int, read: int) -> int:
    """How many bytes of a log with more than ``most`` are to go from its beginning. None beyond ``read``, the position
    of who reads it."""
    size = os.fstat(fd).st_size
    if size <= most:
        return 0
    try:
        begin = os.lseek(fd, 0, os.SEEK_DATA)  # behind the hole of the last time
    except OSError:
        return 0
    if size - begin <= most:
        return 0
    length = int(min(size - most * KEPT, read - STEP)) // STEP * STEP
    return length if length > begin else 0


def writable(fd: int) -> int:
    """The same file, opened to drop its beginning. Raises OSError, also for one that has another name: its directory
    may be hostile."""
    if os.fstat(fd).st_nlink > 1:
        raise OSError(errno.EPERM, "it has another name, too (a hard link)")
    return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)


def drop(fd: int, length: int) -> bool:
    """Drops so many bytes; True when what follows has moved up. Closes ``fd``. Raises OSError; it may take seconds."""
    try:
        for mode in (_COLLAPSE_RANGE, _PUNCH_HOLE | _KEEP_SIZE):
            error = _fallocate(fd, mode, length)
            if not error:
                return mode == _COLLAPSE_RANGE
            if error not in _NOT_HERE:
                break
        raise OSError(error, os.strerror(error))
    finally:
        os.close(fd)


def _fallocate(fd: int, mode: int, length: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.fallocate(fd, mode, ctypes.c_int64(0), ctypes.c_int64(length))
    return ctypes.get_errno() if failed else 0
