"""What the logs already say when the agent starts: from the last ``Starting control daemon`` line, both logs by time.

Rules about both logs (a server that has ended) need their lines in order, so the two are merged by their time stamps;
what is appended later comes through the followers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from heapq import merge
from typing import NamedTuple

from mpsagent.linux.atomic_file import opened
from mpsagent.linux.processes import parent
from mpsagent.mps.events import ControlStarted, Line
from mpsagent.mps.loglines import LogParser
from mpsagent.mps.skim import Skimmer
from mpsagent.system.logfiles import START_MARKER, STEP, Position, find_start, find_time, line_near_end

CONTROL_MOST, SERVER_MOST = 256 << 20, 32 << 20
"""Bytes from the end of each log that are read at most: a log that is not rotated, or a file with a hole, must not hold
up the start. What the skipped part would have said is asked of MPS, as after a rotation."""


class Caught(NamedTuple):
    """The events in the order of time; how far each log was read (None where there is no such file); how many bytes
    of the present daemon's lines were passed over, or may have been."""

    events: list[Line]
    control: Position | None
    server: Position | None
    passed_over: int = 0


def catch_up(control_log: str, server_log: str, control: LogParser, server: LogParser, socket: str) -> Caught:
    """Read both logs to their present ends. ``socket``: of our control daemon (others may write into the same logs).
    Blocks (run it in a thread); raises nothing but what a disk does."""
    control_fd, server_fd = _open(control_log), _open(server_log)
    try:
        ends: dict[str, Position | None] = {"control": None, "server": None}
        marker = START_MARKER + b" " + os.fsencode(socket)
        start = find_start(control_fd, marker, limit=CONTROL_MOST) if control_fd is not None else 0
        passed_over = 0
        if start is None:
            assert control_fd is not None
            passed_over = start = line_near_end(control_fd, CONTROL_MOST)
        stamp = _stamp(control_fd, start) if control_fd is not None else None
        begin = 0
        if server_fd is not None:
            begin = floor = line_near_end(server_fd, SERVER_MOST)
            if stamp is not None:
                begin = find_time(server_fd, stamp, floor)
            passed_over += floor if begin == floor else 0
        streams = (
            # On a tie the server's line comes first: `Exiting` belongs before `Server S exited`.
            _events(server_fd, begin, server, ends, "server"),
            _events(control_fd, start, control, ends, "control", Skimmer()),
        )
        events = [event for event in merge(*streams, key=_time) if not foreign(event, socket)]
        return Caught(events, ends["control"], ends["server"], passed_over)
    finally:
        for fd in (control_fd, server_fd):
            if fd is not None:
                os.close(fd)


def foreign(event: Line, socket: str) -> bool:
    """Another control daemon says in our log that it starts. Its servers and clients are not this instance's, and none
    of this instance's have ended."""
    if event.what is not ControlStarted or event.text == socket:
        return False
    return os.path.realpath(event.text) != os.path.realpath(socket)


def child_of(daemon: int) -> Callable[[int], bool]:
    """Whether a server is this daemon's, as the kernel says. One that has gone already may have been: what its log says
    is a hint in any case."""
    return lambda pid: parent(pid) in (None, daemon)


def _time(event: Line) -> float:
    # The new daemon's first line wipes out what was before; at the same millisecond it has to come first.
    return event.at - 0.0005 if event.what is ControlStarted else event.at


def _open(path: str) -> int | None:
    try:
        return opened(path)
    except OSError:  # the follower reports it
        return None


def _stamp(fd: int, offset: int) -> str | None:
    """The time stamp of the line at ``offset``, as MPS writes it."""
    line = os.pread(fd, 64, offset)
    return line[1:24].decode("ascii", "replace") if line[:1] == b"[" else None


def _events(
    fd: int | None,
    offset: int,
    parser: LogParser,
    ends: dict[str, Position | None],
    name: str,
    skimmer: Skimmer | None = None,
) -> Iterator[Line]:
    """``skimmer``: leave out what changes nothing. A day of polling is a hundred megabytes."""
    if fd is None:
        return
    status = os.fstat(fd)
    ends[name] = Position(status.st_ino, offset)
    while offset < status.st_size:
        data = os.pread(fd, min(STEP, status.st_size - offset), offset)
        if not data:
            break
        offset += len(data)
        ends[name] = Position(status.st_ino, offset)
        yield from parser.feed(data if skimmer is None else skimmer.take(data))
    if skimmer is not None:
        yield from parser.feed(skimmer.end())
