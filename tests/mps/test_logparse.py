"""The logs as bytes: real ones are understood to the last line, hostile ones never raise and never become facts."""

from __future__ import annotations

import re
import sys
from datetime import UTC
from pathlib import Path
from typing import get_args

import pytest

from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LINE_LIMIT, LogParser, Source
from tests import recordings

SOURCES: tuple[Source, ...] = get_args(Source)
HEAD = b"[2026-11-20 23:56:21.865 Control   471] "
SERVER_HEAD = b"[2026-11-20 23:56:22.203 Server   608] "


def control(*messages: bytes) -> list[ev.Line]:
    return LogParser("control", UTC).feed(b"".join(HEAD + m + b"\n" for m in messages))


def server(*messages: bytes) -> list[ev.Line]:
    return LogParser("server", UTC).feed(b"".join(SERVER_HEAD + m + b"\n" for m in messages))


# --- real logs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recordings.names())
def test_every_line_of_the_recordings_is_known(name: str) -> None:
    logs = recordings.logs(name)
    for source, data in (("control", logs.control), ("server", logs.server)):
        found = LogParser(source, UTC).feed(data)  # type: ignore[arg-type]
        assert len(found) == sum(1 for line in data.splitlines() if line)
        assert [e for e in found if e.what is ev.Unknown] == []


def _messages(*texts: str) -> list[str]:
    """All that stands behind a head anywhere in them."""
    head = re.compile(r"(?:Control|Server|Other|Client) +\d+\] (.*?)'?$", re.MULTILINE)
    return [message for text in texts for message in head.findall(text.replace("\\n", "\n"))]


def test_each_row_names_a_recording_that_shows_it() -> None:
    """Or that it was not watched (`lib`)."""
    real = Path(__file__).parents[1] / "conformance" / "real"
    shown = {name[:2]: _messages(recordings.path(name).read_text()) for name in recordings.names()}
    shown["X"] = _messages(*(path.read_text(errors="replace") for path in real.rglob("*") if path.is_file()))
    rows = [row for table in (ev.CONTROL, ev.SERVER) for rows in table.values() for row in rows]
    for row in rows:
        by = [name for name, messages in shown.items() if any(map(row.match, messages))]
        assert (row.recording in by) if row.recording != "lib" else not by, (row.match, row.recording, by)


def test_the_time_for_a_hostile_line_does_not_grow_with_its_square() -> None:
    """With two gaps of any length in one row it would."""
    rows = [row for table in (ev.CONTROL, ev.SERVER) for rows in table.values() for row in rows]
    assert [row.match for row in rows if row.match.__self__.pattern.count(".{0,") > 1] == []  # type: ignore[attr-defined]


def _foreign_lines() -> list[bytes]:
    """Log lines of the recordings that no ``control.log|`` or ``server.log|`` marks: another daemon's file printed as
    it is (recording 02, R8), what a daemon in the foreground printed (R11), a full server (R13)."""
    found = []
    for name in recordings.names():
        text = recordings.path(name).read_bytes()
        found += [line for line in text.split(b"\n") if line.startswith(b"[2026-") and b"] " in line]
        for line in text.split(b"\n"):
            if b"server.log*| " in line:
                found.append(line.partition(b"server.log*| ")[2])
            if b"fg stdout: '" in line:
                found += line.partition(b"fg stdout: '")[2].replace(b"\\n", b"\n").rstrip(b"'").split(b"\n")
    return [line for line in found if line]


def test_lines_of_a_daemon_in_the_foreground_are_known_too() -> None:
    """``-f`` merges the lines of the control daemon and its servers in one stream."""
    lines = _foreign_lines()
    assert len(lines) > 50
    found = LogParser("merged", UTC).feed(b"\n".join(lines) + b"\n")
    assert [e for e in found if e.what is ev.Unknown] == []
    assert {e.what for e in found} >= {ev.ControlStarted, ev.ServerReady, ev.ContextConnected, ev.ThreadsSet}


def test_the_limits_that_a_server_states_are_read_to_the_byte() -> None:
    assert server(
        b"Active Threads Percentage set to 12.8",
        b"Device pinned memory limit for device 0 set to 0x80000000 bytes",
        b"Device pinned memory limit for device 1 set to 0x0 bytes",
    ) == [
        ev.ThreadsSet(pytest.approx(1795218982.203), 608, 12.8),
        ev.MemorySet(pytest.approx(1795218982.203), 608, 0, 2 << 30),
        ev.MemorySet(pytest.approx(1795218982.203), 608, 1, 0),
    ]


def test_the_list_of_a_fault_ends_with_its_first_other_line() -> None:
    """Bare numbers are devices or clients only below their heading, and only of the same server."""
    other = SERVER_HEAD.replace(b"608", b"609")
    data = [
        SERVER_HEAD + b"The following devices will be reset:",
        SERVER_HEAD + b"0",
        SERVER_HEAD + b"The following client process have a sticky error set:",
        SERVER_HEAD + b"976",
        other + b"977",
        SERVER_HEAD + b"987",
        SERVER_HEAD + b"Exiting",
        SERVER_HEAD + b"988",
    ]
    found = LogParser("server", UTC).feed(b"\n".join(data) + b"\n")
    assert [(e.what, e.pid, e.text) for e in found if e.what is not ev.Harmless] == [
        (ev.FaultDevice, 0, ""),
        (ev.FaultClient, 976, ""),
        (ev.Unknown, 0, "977"),
        (ev.FaultClient, 987, ""),
        (ev.ServerStopping, 0, ""),
        (ev.Unknown, 0, "988"),
    ]


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_bytes_one_by_one_give_the_events_of_a_recording() -> None:
    logs = recordings.logs("02", "R4")
    parser = LogParser("server", UTC)
    found = [e for i in range(len(logs.server)) for e in parser.feed(logs.server[i : i + 1])]
    assert found == LogParser("server", UTC).feed(logs.server)


def test_a_partial_last_line_waits_for_its_end() -> None:
    """A line is written in one piece most of the time, but not read so: half a pid would be another process's."""
    parser = LogParser("control", UTC)
    assert parser.feed(HEAD + b"NEW CLIENT 60") == []
    assert parser.feed(b"6 from user 1001: Server already exists") == []
    (event,) = parser.feed(b"\n")
    assert event.what is ev.ClientAdmitted
    assert (event.pid, event.uid) == (606, 1001)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_a_line_is_capped_and_the_next_one_is_read() -> None:
    parser = LogParser("control", UTC)
    for _ in range(200):
        assert parser.feed(b"z" * 4096) == []
    assert sys.getsizeof(parser._rest) < 2 * LINE_LIMIT
    long, closed = parser.feed(b"\n" + HEAD + b"UI closed\n")
    assert long.what is ev.Unknown
    assert len(long.text) <= 200
    assert closed.what is ev.ConnectionLine


def test_a_hostile_log_does_not_grow_the_parser() -> None:
    """Every head, every server number and every list is remembered for a while only."""
    parser = LogParser("merged", UTC)
    for pid in range(5000):
        head = b"[2026-11-20 23:56:21.865 Server %d] " % pid
        parser.feed(head + b"The following devices will be reset:\n")
    assert len(parser._heads) <= 1024
    assert len(parser._listing) <= 64


def test_nul_bytes_before_a_line_are_what_a_truncation_left() -> None:
    """copytruncate under a writer that does not append leaves a hole of NUL bytes."""
    (event,) = LogParser("control", UTC).feed(b"\0" * 5000 + HEAD + b"NEW SERVER 608: Ready\n")
    assert event.what is ev.ServerReady


def test_half_a_character_is_shown_and_counted() -> None:
    (event,) = control(b"caf\xc3")
    assert event.what is ev.Unknown
    assert "�" in event.text


def test_a_command_name_in_ps_that_looks_like_a_log_line_is_an_answer() -> None:
    """``ps`` prints the names of other people's processes: a user may call his program anything."""
    forged = (
        b"608       1         608            GPU-0    4026531836     x\n" + HEAD + b"Server 608 exited with status 0"
    )
    found = control(b"NEW UI", b"Cmd:ps", forged, b"NEW CLIENT 1 from user 0: Server already exists", b"UI closed")
    assert [e.what for e in found] == [
        ev.ConnectionLine,
        ev.CommandRead,
        ev.CommandAnswer,
        ev.CommandAnswer,
        ev.CommandAnswer,
        ev.ConnectionLine,
    ]


def test_after_the_answer_facts_are_facts_again() -> None:
    found = control(b"Cmd:ps", b"606 1 608", b"UI closed", b"Server 608 exited with status 0")
    assert found[-1].what is ev.ServerExited


def test_a_daemon_that_was_killed_while_it_answered_does_not_swallow_the_next_one() -> None:
    """A stopped daemon is killed in the middle of ``ps`` (recording 06, V4): no line ends its answer."""
    parser = LogParser("control", UTC)
    parser.feed(HEAD + b"NEW UI\n" + HEAD + b"Cmd:ps\n")
    found = parser.feed(
        HEAD.replace(b"471", b"600") + b"Starting control daemon using socket /tmp/nvidia-mps/control\n"
    )
    assert [e.what for e in found] == [ev.ControlStarted]


def test_shutdown_texts_between_a_command_and_its_end_are_facts() -> None:
    """``shutdown_server -f`` is carried out before its connection closes (recording 01, S6)."""
    found = control(b"Cmd:shutdown_server 716 -f", b"Force shutting down server 716", b"UI closed")
    assert found[1].what is ev.ShutdownForced


def test_an_answer_without_a_head_belongs_to_its_command() -> None:
    """Answers of several lines have the head on some of them only."""
    parser = LogParser("control", UTC)
    found = parser.feed(HEAD + b"Cmd:device_query\n0,0000:00.06.00,GPU-fbf1\n" + HEAD + b"UI closed\n0,stray\n")
    assert [e.what for e in found] == [ev.CommandRead, ev.CommandAnswer, ev.ConnectionLine, ev.Unknown]


def test_a_head_of_the_other_log_is_unknown() -> None:
    (event,) = LogParser("control", UTC).feed(SERVER_HEAD + b"Exiting\n")
    assert event.what is ev.Unknown


def test_clock_steps_are_taken_as_they_are_and_a_known_step_is_added() -> None:
    parser = LogParser("control", UTC)
    early = b"[2026-11-20 23:00:00.000 Control   471] UI closed\n"
    late = b"[2026-11-20 23:59:60.500 Control   471] UI closed\n"  # a leap second
    times = [e.at for e in parser.feed(late + early + late)]
    assert times[0] == times[2] > times[1]
    assert [e.at for e in parser.feed(early, shift=2.5)] == [times[1] + 2.5]


def test_a_time_that_is_none_makes_the_line_unknown() -> None:
    for time in (
        b"2026-13-20 23:00:00.000",
        b"2026-11-20 25:00:00.000",
        b"2026-11-20 23:00:99.000",
        b"2026-11-20 23:00:nan.00",
    ):
        (event,) = LogParser("control", UTC).feed(b"[" + time + b" Control   471] UI closed\n")
        assert event.what is ev.Unknown
