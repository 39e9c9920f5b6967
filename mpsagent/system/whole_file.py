"""A file that is there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str, mode: int = 0o600, *, lasting: bool = False) -> None:
    """In one step, with this mode whatever the umask: who reads finds the file of before or this one. ``lasting``: on
    disk when this returns, also after a power cut. One process writes a file. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
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
