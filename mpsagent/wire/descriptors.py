"""What comes beside a message at a Unix socket: descriptors (SCM_RIGHTS), as Linux packs them. Pure."""

from __future__ import annotations

import array
from collections.abc import Iterable, Sequence

SOL_SOCKET = SCM_RIGHTS = 1
SCM_CREDENTIALS = 2
SO_PASSCRED = 16

Ancillary = Sequence[tuple[int, int, bytes]]
_NUMBER = array.array("i").itemsize


def with_descriptors(descriptors: Iterable[int]) -> Ancillary:
    numbers = array.array("i", descriptors)
    return ((SOL_SOCKET, SCM_RIGHTS, numbers.tobytes()),) if numbers else ()


def descriptors_in(ancillary: Ancillary) -> list[int]:
    found = array.array("i")
    for level, kind, content in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            found.frombytes(content[: len(content) - len(content) % _NUMBER])
    return list(found)
