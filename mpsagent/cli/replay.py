"""``mpsagent-cli replay``: the story of a pair of logs, offline, line by line.

The two logs are merged by time. **On a tie server.log goes first**: a server writes its limits and then tells the
control daemon that it is Ready, and it writes its last client's leaving before the control daemon sees it exit, each
often within one millisecond. The other way round a server would be Ready without limits, and a client that had left
would be lost with its server. What this order gets backwards (a client connects in the millisecond in which it is
admitted) costs nothing: the server knows its user.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from datetime import tzinfo
from pathlib import Path
from typing import Any, BinaryIO

from mpsagent.api.views import iso, iso_or_none
from mpsagent.core.story import ClientRecord, FaultRecord, ServerRecord, Story
from mpsagent.mps.events import Line
from mpsagent.mps.loglines import LogParser, Source

CHUNK = 256 * 1024
Json = dict[str, Any]
_Timed = tuple[float, Line]
_CLOCK_STEP = 1.0
"""Seconds backwards from which it is a step of the clock; lines of several processes may be out of order by less."""
_SILENCE = 3600.0
"""Seconds by which the two logs may differ in how large one and the same step looks."""


def merged(control: BinaryIO, server: BinaryIO, zone: tzinfo | None = None) -> Iterator[Line]:
    """The events of both logs in the order of time, server.log first on a tie (see above)."""
    steps: list[float] = []
    server_events, control_events = _read(server, "server", zone, steps), _read(control, "control", zone, steps)
    return (event for _, event in heapq.merge(server_events, control_events, key=lambda timed: timed[0]))


def _read(file: BinaryIO, source: Source, zone: tzinfo | None, steps: list[float]) -> Iterator[_Timed]:
    """Events of a log with a key to merge by: their time, made to never run backwards.

    When the clock was set back, what follows is moved on by the step, as far as this log shows it; ``steps`` are those
    of both logs, so that both are moved alike and their order among each other stays right. Only the order depends on
    it; the times in the records are those of the log.
    """
    parser, last, shift, seen = LogParser(source, zone), float("-inf"), 0.0, 0

    def keyed(events: list[Line]) -> Iterator[_Timed]:
        nonlocal last, shift, seen
        for event in events:
            step = last - (event.at + shift)
            if step > _CLOCK_STEP:
                if len(steps) > seen and abs(steps[seen] - step) < _SILENCE:
                    step = steps[seen]
                else:
                    steps.append(step)
                seen += 1
                shift += step
            last = max(last, event.at + shift)
            yield last, event

    while data := file.read(CHUNK):
        yield from keyed(parser.feed(data))
    yield from keyed(parser.close())


def events_of(
    control: Path | None, server: Path | None, both: Path | None = None, zone: tzinfo | None = None
) -> Iterator[Line]:
    """The merged events of two log files, either may be missing; or those of ``both`` in one, as a daemon in the
    foreground prints them. Raises OSError."""
    if both is not None:
        with _opened(both) as file:
            yield from (event for _, event in _read(file, "merged", zone, []))
        return
    with _opened(control) as control_file, _opened(server) as server_file:
        yield from merged(control_file, server_file, zone)


def _opened(path: Path | None) -> BinaryIO:
    return open(path if path is not None else "/dev/null", "rb", buffering=0)


def story_json(story: Story) -> Json:
    """The records as the JSON of ``replay --json``."""
    return {
        "servers": [_server(one) for one in story.servers],
        "clients": [_client(one) for one in story.clients],
        "faults": [_fault(one) for one in story.faults],
        "refused": [
            {"pid": one.pid, "reason": one.reason, "at": iso(one.at), "server": one.server} for one in story.refused
        ],
        "unknown_lines": story.unknown_lines,
        "clients_named": not story.unnamed,
    }


def _server(one: ServerRecord) -> Json:
    return {
        "pid": one.pid,
        "uid": one.uid,
        "started": iso_or_none(one.started),
        "ready": iso_or_none(one.ready),
        "exited": iso_or_none(one.exited),
        "exit_status": one.exit_status,
        "forced": one.forced,
        "limits": {"threads": one.threads, "memory": {str(d): size for d, size in sorted(one.memory.items())}},
        "faults": one.faults,
    }


def _client(one: ClientRecord) -> Json:
    return {
        "pid": one.pid,
        "uid": one.uid,
        "server": one.server,
        "queued": iso_or_none(one.queued),
        "connected": iso_or_none(one.connected),
        "disconnected": iso_or_none(one.disconnected),
        "wait_seconds": round(one.waited, 3),
        "outcome": one.outcome,
    }


def _fault(one: FaultRecord) -> Json:
    return {
        "server": one.server,
        "at": iso(one.at),
        "sticky": list(one.sticky),
        "recovered": iso_or_none(one.recovered),
        "devices": list(one.devices),
    }
