"""What real MPS wrote, taken out of the transcripts in tests/data/recordings.

A transcript is one run of one script on a real GPU. Its sections begin with a line of ``=``; in many a new control
daemon starts. Lines of the log files are marked ``control.log|`` and ``server.log|``; a few answers span lines, and
those keep their bytes too. What was written while a log file was renamed (recording 02, R9) is not in the transcript.
Recordings 08 and later hold findings instead: their sections begin with ``##`` and have no logs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).parent / "data" / "recordings"
_SECTION = re.compile(rb"^(?:\[ *[\d.]+\] =+|##) (\S+) ?(.*)$")
_LINE = re.compile(rb"^\[ *[\d.]+\]    (control|server)\.log\| (.*)$", re.DOTALL)


class Logs(NamedTuple):
    """The bytes of the two log files."""

    control: bytes
    server: bytes


def names() -> list[str]:
    """File names of all recordings, in order."""
    return sorted(path.name for path in DIRECTORY.glob("*.txt"))


def transcripts() -> list[str]:
    """Those that a script wrote on a real GPU, and a script can play again: 01 to 07."""
    return [name for name in names() if name < "08"]


def path(name: str) -> Path:
    """A transcript by file name, or by its beginning (``"02"``)."""
    (found,) = [DIRECTORY / each for each in names() if each.startswith(name)]
    return found


def sections(name: str) -> dict[str, Logs]:
    """Section -> what was written to the logs in it, in the order of the transcript."""
    found: dict[str, tuple[list[bytes], list[bytes]]] = {}
    current: tuple[list[bytes], list[bytes]] = ([], [])
    for line in path(name).read_bytes().split(b"\n"):
        if match := _SECTION.match(line):
            current = found.setdefault(match[1].decode(), ([], []))
        elif match := _LINE.match(line):
            current[match[1] == b"server"].append(match[2] + b"\n")
    return {key: Logs(b"".join(control), b"".join(server)) for key, (control, server) in found.items()}


def logs(name: str, *wanted: str) -> Logs:
    """The logs of a whole transcript, or of the sections named."""
    parts = [each for key, each in sections(name).items() if not wanted or key in wanted]
    if wanted and len(parts) != len(wanted):
        raise KeyError(f"{name} has no section {wanted}; it has {list(sections(name))}")
    return Logs(b"".join(p.control for p in parts), b"".join(p.server for p in parts))
