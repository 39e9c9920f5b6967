"""What the logs already say when the agent starts: from the last ``Starting control daemon`` line, both logs by time.

Rules about both logs (a server that has ended, a client that waits) need their lines in order, so the two are merged by
their time stamps; what is appended later comes through the followers.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import merge
from typing import NamedTuple

from mpsagent.facts.events import ControlStarted, LogEvent
from mpsagent.facts.logparse import LogParser
from mpsagent.facts.model import State
from mpsagent.facts.reduce import apply
from mpsagent.hands.logfiles import STEP, Position, find_start, find_time, open_log

MISSED_MOST = 10_000


class Caught(NamedTuple):
    """The state that the logs give; where each was read to (None where there is no such file); what happened while no
    agent was there to see it."""

    state: State
    control: Position | None
    server: Position | None
    missed: Sequence[LogEvent]


def catch_up(control_log: str, server_log: str, control: LogParser, server: LogParser, since: float) -> Caught:
    """Read both logs to their present ends; ``since``: the time of the last thing that was written down. Blocks (run it
    in a thread); raises nothing but what a disk does."""
    control_fd, server_fd = _open(control_log), _open(server_log)
    try:
        ends: dict[str, Position | None] = {"control": None, "server": None}
        start = 0 if control_fd is None else find_start(control_fd) or 0
        stamp = _stamp(control_fd, start) if control_fd is not None else None
        begin = find_time(server_fd, stamp) if server_fd is not None and stamp is not None else 0
        state, missed = State(), deque[LogEvent](maxlen=MISSED_MOST)
        streams = (
            # On a tie the server's line comes first: `Exiting` belongs before `Server S exited`.
            _events(server_fd, begin, server, ends, "server"),
            _events(control_fd, start, control, ends, "control"),
        )
        for event in merge(*streams, key=_time):
            state = apply(state, event)
            if event.at > since:
                missed.append(event)
        return Caught(state, ends["control"], ends["server"], missed)
    finally:
        for fd in (control_fd, server_fd):
            if fd is not None:
                os.close(fd)


def _time(event: LogEvent) -> float:
    # The new daemon's first line wipes out what was before; at the same millisecond it has to come first.
    return event.at - 0.0005 if isinstance(event, ControlStarted) else event.at


def _open(path: str) -> int | None:
    try:
        return open_log(path)[0]
    except OSError:  # the follower reports it
        return None


def _stamp(fd: int, offset: int) -> str | None:
    """The time stamp of the line at ``offset``, as MPS writes it."""
    line = os.pread(fd, 64, offset)
    return line[1:24].decode("ascii", "replace") if line[:1] == b"[" else None


def _events(
    fd: int | None, offset: int, parser: LogParser, ends: dict[str, Position | None], name: str
) -> Iterator[LogEvent]:
    if fd is None:
        return
    status = os.fstat(fd)
    while offset < status.st_size:
        data = os.pread(fd, min(STEP, status.st_size - offset), offset)
        if not data:
            break
        offset += len(data)
        yield from parser.feed(data)
    ends[name] = Position(status.st_ino, offset)
