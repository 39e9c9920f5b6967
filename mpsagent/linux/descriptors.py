"""Descriptors that are sent with a message at a Unix socket (SCM_RIGHTS), as Linux packs them."""

from __future__ import annotations

import array
import os
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress

SOL_SOCKET = SCM_RIGHTS = 1
SCM_CREDENTIALS = 2
SO_PASSCRED = 16

Ancillary = Sequence[tuple[int, int, bytes]]
_NUMBER = array.array("i").itemsize

KEPT = 512
"""Descriptors of a process that are kept for its own work, whatever users have sent or opened."""


def may_keep(descriptor: int) -> bool:
    """Return False if this open descriptor is one of the last, which are for the process's own work: the kernel gives
    the lowest free number."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most == resource.RLIM_INFINITY or descriptor < most - KEPT


def with_descriptors(descriptors: Iterable[int]) -> Ancillary:
    """Return the ancillary data that sends these descriptors."""
    numbers = array.array("i", descriptors)
    return ((SOL_SOCKET, SCM_RIGHTS, numbers.tobytes()),) if numbers else ()


def descriptors_in(ancillary: Ancillary) -> list[int]:
    """Return the descriptors that were received."""
    found = array.array("i")
    for level, kind, content in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % _NUMBER])
    return list(found)


def close_all(descriptors: Iterable[int]) -> None:
    """Close each of these descriptors that is open."""
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)
