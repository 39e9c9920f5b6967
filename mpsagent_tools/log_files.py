"""The lines of a pair of logs in the order of time.

**On a tie server.log goes first**: within one millisecond a server writes its limits and is Ready, or writes that its
last client leaves, and has exited. What this gets backwards (a client connects in the millisecond in which it is
admitted) costs nothing: the server knows its user.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import BinaryIO

from mpsagent.mps.events import Line
from mpsagent.mps.loglines import LogParser, Source

CHUNK = 256 * 1024
TAIL = 64 * 1024
_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", re.MULTILINE)
_SOON = 600.0
"""Seconds by which a log may have been changed after its last line, and still tell its zone; zones differ by more."""
_CLOCK_STEP = 1.0
"""Seconds backwards from which it is a step of the clock; lines of several processes may be out of order by less."""
_SILENCE = 3600.0
"""Seconds by which the two logs may differ in how large one and the same step looks."""


def merged(control: BinaryIO, server: BinaryIO, zone: tzinfo | None = None) -> Iterator[Line]:
    steps: list[float] = []
    both = _read(server, "server", zone, steps), _read(control, "control", zone, steps)
    return heapq.merge(*both, key=lambda line: line.at)


def _read(file: BinaryIO, source: Source, zone: tzinfo | None, steps: list[float]) -> Iterator[Line]:
    """Lines of a log, whose times never run backwards: after a step of the clock they are moved on by it. ``steps`` are
    those of both logs, which are moved alike."""
    parser, last, shift, seen = LogParser(source, zone), float("-inf"), 0.0, 0

    def forwards(lines: list[Line]) -> Iterator[Line]:
        nonlocal last, shift, seen
        for one in lines:
            step = last - (one.at + shift)
            if step > _CLOCK_STEP:
                if len(steps) > seen and abs(steps[seen] - step) < _SILENCE:
                    step = steps[seen]
                else:
                    steps.append(step)
                seen += 1
                shift += step
            last = max(last, one.at + shift)
            yield one if one.at == last else one._replace(at=last)

    while data := file.read(CHUNK):
        yield from forwards(parser.feed(data))
    yield from forwards(parser.close())


def zone_of(*logs: Path | None) -> tzinfo | None:
    """Return UTC if these logs have their times in UTC, as those of a daemon that mpsagent starts; None: local time. A
    log was changed last when its last line was written. Raises OSError."""
    for path in filter(None, logs):
        with _opened(path) as file:
            file.seek(max(0, file.seek(0, 2) - TAIL))
            stamps = _STAMP.findall(file.read(TAIL))
        if stamps:
            moment, changed = datetime.fromisoformat(stamps[-1].decode()), path.stat().st_mtime
            utc, local = (abs(one.timestamp() - changed) for one in (moment.replace(tzinfo=UTC), moment.astimezone()))
            return UTC if utc < local and utc < _SOON else None
    return None


def lines_of(control: Path | None, server: Path | None, both: Path | None = None) -> Iterator[Line]:
    """Return the lines of two log files, of which one may be missing, or of ``both``: the two in one file, as a daemon
    in the foreground prints them. Raises OSError."""
    zone = zone_of(control, server, both)
    if both is not None:
        with _opened(both) as file:
            yield from _read(file, "merged", zone, [])
        return
    with _opened(control) as control_file, _opened(server) as server_file:
        yield from merged(control_file, server_file, zone)


def _opened(path: Path | None) -> BinaryIO:
    return open(path if path is not None else "/dev/null", "rb", buffering=0)
