"""What the logs already say when the agent starts: from the last ``Starting control daemon`` line, both logs by time.

Rules about both logs (a server that has ended, a client that waits) need their lines in order, so the two are merged by
their time stamps; what is appended later comes through the followers.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import merge
from typing import NamedTuple

from mpsagent.agent.records import event_record
from mpsagent.core.model import Control, State
from mpsagent.core.reduce import apply
from mpsagent.core.skim import Served, Skimmer, served
from mpsagent.mps.events import ControlGone, ControlStarted, LogEvent, ServerReady
from mpsagent.mps.loglines import LogParser
from mpsagent.system.logfiles import START_MARKER, STEP, Position, find_start, find_time, open_log

MISSED_MOST = 10_000
OVERLAP = 600.0
"""Seconds before the newest record in which lines of the logs are held against the records: the newest record may be
of an action, and lines from before it may not have been read when the last agent was killed."""


class Missed(NamedTuple):
    """A record that the last agent may not have written."""

    at: float
    kind: str
    fields: Mapping[str, object]


class Caught(NamedTuple):
    """The state that the logs give; where each was read to (None where there is no such file); what of them belongs
    into the history, as far back as was asked for; when a server was Ready last."""

    state: State
    control: Position | None
    server: Position | None
    records: Sequence[Missed]
    last_ready: float | None


def catch_up(
    control_log: str, server_log: str, control: LogParser, server: LogParser, since: float, socket: str
) -> Caught:
    """Read both logs to their present ends. ``since``: from when on records are wanted; ``socket``: of our control
    daemon (others may write into the same logs). Blocks (run it in a thread); raises nothing but what a disk does."""
    control_fd, server_fd = _open(control_log), _open(server_log)
    try:
        ends: dict[str, Position | None] = {"control": None, "server": None}
        marker = START_MARKER + b" " + os.fsencode(socket)
        start = 0 if control_fd is None else find_start(control_fd, marker) or 0
        stamp = _stamp(control_fd, start) if control_fd is not None else None
        begin = find_time(server_fd, stamp) if server_fd is not None and stamp is not None else 0
        state, records, ready = State(), deque[Missed](maxlen=MISSED_MOST), None
        streams = (
            # On a tie the server's line comes first: `Exiting` belongs before `Server S exited`.
            _events(server_fd, begin, server, ends, "server"),
            # By the time that more of control.log is read, all events before it are in the state.
            _events(control_fd, start, control, ends, "control", lambda: served(state)),
        )
        for event in merge(*streams, key=_time):
            if foreign(event, socket):
                continue
            state = apply(state, event)
            if isinstance(event, ServerReady):
                ready = event.at
            if event.at > since and (record := event_record(event, state)) is not None:
                records.append(Missed(event.at, *record))
        return Caught(state, ends["control"], ends["server"], records, ready)
    finally:
        for fd in (control_fd, server_fd):
            if fd is not None:
                os.close(fd)


def foreign(event: object, socket: str) -> bool:
    """Another control daemon says in our log that it starts. It is none of ours and ends nothing of ours."""
    if not isinstance(event, ControlStarted) or event.socket == socket:
        return False
    return os.path.realpath(event.socket) != os.path.realpath(socket)


def not_yet_written(found: Iterable[Missed], known: Iterable[Mapping[str, object]]) -> list[Missed]:
    """What of ``found`` is not among the ``known`` records. Times are those that MPS wrote, so they are equal where the
    line is the same; two lines that say the same in one millisecond are two."""
    seen = Counter(_mark(float(str(record["at"])), str(record["kind"]), record) for record in known)
    missed = []
    for one in found:
        mark = _mark(one.at, one.kind, one.fields)
        if seen[mark]:
            seen[mark] -= 1
        else:
            missed.append(one)
    return missed


def _mark(at: float, kind: str, fields: Mapping[str, object]) -> tuple[object, ...]:
    return (kind, round(at, 3), fields.get("pid"), fields.get("server"))


def settled(state: State, running: tuple[int, float] | None, socket: str, now: float) -> State:
    """The state, once it is known which control daemon runs (``running``: its pid and start, seconds since the epoch).
    Its first line may be gone from the log (rotated, removed): then what the rest says is all that is known of it."""
    control = state.control
    if running is None:
        return apply(state, ControlGone(now)) if control is not None else state
    pid, started = running
    if control is not None and control.pid == pid:
        return state
    ours = Control(pid=pid, started=started, socket=socket)
    if control is None:
        return replace(state, control=ours)
    return State(control=ours, unknown_lines=state.unknown_lines)  # what the log tells is about a daemon that has gone


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
    fd: int | None,
    offset: int,
    parser: LogParser,
    ends: dict[str, Position | None],
    name: str,
    known: Callable[[], Served] | None = None,
) -> Iterator[LogEvent]:
    """``known``: skim the log, by what is known so far. A day of polling is a hundred megabytes that change nothing."""
    if fd is None:
        return
    status = os.fstat(fd)
    skimmer = Skimmer()
    ends[name] = Position(status.st_ino, offset)
    while offset < status.st_size:
        data = os.pread(fd, min(STEP, status.st_size - offset), offset)
        if not data:
            break
        offset += len(data)
        ends[name] = Position(status.st_ino, offset)
        yield from parser.feed(data if known is None else skimmer.take(data, known()))
    yield from parser.feed(skimmer.end())
