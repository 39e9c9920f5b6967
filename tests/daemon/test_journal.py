"""What reaches the journal: its own protocol, whatever values hold, and ids that the catalog knows."""

from __future__ import annotations

import io
import os
import re
import socket
import time
from pathlib import Path

import pytest
import structlog

from mpsagent.system import journal

CATALOG = Path(__file__).resolve().parents[2] / "systemd/mpsagent.catalog"


def decoded(data: bytes) -> dict[str, bytes]:
    """Reads journald's native protocol as journald does: a name, a line break, 8 bytes of length, the value."""
    found: dict[str, bytes] = {}
    while data:
        name, _, data = data.partition(b"\n")
        size = int.from_bytes(data[:8], "little")
        found[name.decode()] = data[8 : 8 + size]
        assert data[8 + size : 9 + size] == b"\n"
        data = data[9 + size :]
    return found


def test_the_catalog_and_the_agent_know_the_same_ids() -> None:
    """An id that only one of them knows explains nothing."""
    ids = re.findall(r"^-- ([0-9a-f]{32})$", CATALOG.read_text(), re.MULTILINE)
    assert len(ids) == len(set(ids))
    assert set(ids) == {*journal.MESSAGE_IDS.values(), *journal.ACTION_IDS.values()}


def test_a_users_story_can_be_asked_for() -> None:
    """`journalctl MPS_UID=1001`, by server, by client, by rule."""
    record = {"uid": 1001, "server": 7, "pid": 9, "rule": "turn.time_limit", "reason": "its turn is over"}
    found = decoded(journal.encode("turn.ended", "info", record))
    assert (found["MPS_UID"], found["MPS_SERVER_PID"], found["MPS_CLIENT_PID"]) == (b"1001", b"7", b"9")
    assert (found["MPSAGENT_RULE"], found["MPSAGENT_EVENT"]) == (b"turn.time_limit", b"turn.ended")
    assert found["MESSAGE"] == b"turn.ended: its turn is over"
    assert found["MESSAGE_ID"].decode() == journal.MESSAGE_IDS["turn.ended"]


@pytest.mark.parametrize(
    ("kind", "field"),
    [("server.ready", "MPS_SERVER_PID"), ("control.started", "MPS_CONTROL_PID"), ("client.waiting", "MPS_CLIENT_PID")],
)
def test_a_pid_is_the_pid_of_what_it_is(kind: str, field: str) -> None:
    """Otherwise a daemon's end would be in some client's story."""
    found = decoded(journal.encode(kind, "info", {"pid": 4711}))
    assert [name for name in found if name.startswith("MPS_")] == [field]


def test_no_value_becomes_a_field_of_its_own() -> None:
    """Users choose texts: a line break in one must not forge a field, a user or a priority."""
    hostile = "x\nMPS_UID=0\nPRIORITY=0\n\x1b[2J\0\udcff" + "y" * 100_000
    found = decoded(journal.encode("log.unknown", "info", {"uid": 1001, "text": hostile, "MPS_UID": 0}))
    assert found["MPS_UID"] == b"1001"
    assert found["PRIORITY"] == b"6"
    assert len(found["MESSAGE"]) == journal.LONGEST
    assert found["MESSAGE"].decode().isprintable(), "journalctl shows no other text, but: [8K blob data]"


def test_what_failed_is_a_warning() -> None:
    """`journalctl -p warning` is where people look first."""
    assert decoded(journal.encode("server.fault", "info", {}))["PRIORITY"] == b"4"
    assert decoded(journal.encode("action.failed", "info", {"ok": False}))["PRIORITY"] == b"4"
    assert decoded(journal.encode("action.done", "info", {"ok": True}))["PRIORITY"] == b"6"
    assert decoded(journal.encode("anything", "error", {}))["PRIORITY"] == b"3"


def test_a_client_that_was_ended_says_so_only_if_it_was() -> None:
    """An action that is only reported has ended nobody, nor one that failed."""
    done = {"action": "SignalClient", "pid": 9, "uid": 1001, "ok": True, "enforce": True}
    assert "MESSAGE_ID" in decoded(journal.encode("action.done", "info", done))
    assert "MESSAGE_ID" not in decoded(journal.encode("action.done", "info", {**done, "enforce": False}))
    assert "MESSAGE_ID" not in decoded(journal.encode("action.failed", "info", {**done, "ok": False}))


def test_a_start_of_mps_is_explained_when_it_fails() -> None:
    """`journalctl -x` says what to do then."""
    start = {"action": "StartControl", "enforce": True}
    assert "MESSAGE_ID" in decoded(journal.encode("action.failed", "info", {**start, "ok": False}))
    assert "MESSAGE_ID" not in decoded(journal.encode("action.done", "info", {**start, "ok": True}))


def test_a_full_journal_loses_lines_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """journald may hang; a waiting client cannot wait for it."""
    path = tmp_path / "journal"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(path))
        monkeypatch.setattr(journal, "SOCKET", str(path))
        final = journal._Journal()
        for number in range(5000):
            with pytest.raises(structlog.DropEvent):
                final(None, "info", {"event": "server.ready", "level": "info", "uid": number})
        assert decoded(server.recv(65536))["MPS_UID"] == b"0"
    with pytest.raises(structlog.DropEvent):
        final(None, "info", {"event": "no journal any more", "level": "info"})


def test_a_line_of_text_shows_no_control_characters() -> None:
    """A terminal obeys them."""
    line = journal.text_line({"event": "log.unknown", "level": "info", "text": "\x1b]0;gotcha\x07 \u202e", "n": 1})
    assert line.isascii()
    assert line.rstrip("\n").isprintable()
    assert "log.unknown" in line
    assert "n=1" in line


def test_a_line_of_text_is_as_grave_as_in_the_journal() -> None:
    """Seen: "info  policy.rejected" and "info  action.failed"."""
    for kind, more in (("policy.rejected", {}), ("action.failed", {"ok": False}), ("server.fault", {})):
        line = journal.text_line({"event": kind, "level": "info", "sentence": "it went wrong", **more})
        assert line.split()[1:3] == ["warning", kind]
    assert journal.text_line({"event": "server.ready", "level": "info"}).split()[1] == "info"
    assert journal.text_line({"event": "policy.rejected", "level": "error"}).split()[1] == "error"


def test_nobody_reads_the_log_and_the_agent_goes_on() -> None:
    """A stopped terminal, a full pipe: lines are dropped and counted, the caller never waits."""
    reader, writer = os.pipe()
    lines = journal.Lines(os.fdopen(writer, "w"), most=100)
    for number in range(5000):  # a pipe holds 64 KiB
        with pytest.raises(structlog.DropEvent):
            lines(None, "info", {"event": "flood", "level": "info", "text": "x" * 100, "number": number})
    os.set_blocking(reader, False)
    said = b""
    end = time.monotonic() + 60
    while b"number=0" not in said or not lines._queue.empty():
        assert time.monotonic() < end
        try:
            said += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    with pytest.raises(structlog.DropEvent):
        lines(None, "info", {"event": "after", "level": "info"})
    while b"lines were left out" not in said:
        assert time.monotonic() < end
        try:
            said += os.read(reader, 1 << 16)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(reader)


def test_a_line_is_there_when_the_program_ends() -> None:
    """The reason for not starting is the last thing that it says."""
    file = io.StringIO()
    lines = journal.Lines(file)
    with pytest.raises(structlog.DropEvent):
        lines(None, "error", {"event": "the agent cannot start", "level": "error", "reason": "it is locked"})
    lines.flush()
    assert 'the agent cannot start reason="it is locked"' in file.getvalue()
