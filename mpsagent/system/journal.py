"""Log lines: fields for the journal, readable text elsewhere."""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TextIO

import structlog

from mpsagent.policy.origins import printable

SOCKET = "/run/systemd/journal/socket"
LONGEST = 8192
# Message ids by kind of record; the texts are in the catalog (systemd/mpsagent.catalog).
MESSAGE_IDS: Mapping[str, str] = {
    "policy.loaded": "a66ff773a02a541fbbd2d3cb85337def",
    "policy.rejected": "178666bce8c9519ea8da5b0ec1b9368a",
    "turn.began": "7bb64d6932e955318db93927769f9a0d",
    "turn.ended": "11d1716f165b43d0abb15fb4b3b68238",
    "server.fault": "f4a60d84ddf05a0792c08e8c975d1436",
    "server.fault_over": "fabf2f03c34f5baa91443c558a8ed8d7",
    "server.start_failed": "d9881d9341d24c57a89d7de03ace51b3",
    "control.started": "7b97615e5950553f9f85c362eb42c11b",
    "control.adopted": "7b97615e5950553f9f85c362eb42c11b",
    "control.unsafe": "6ef715f29a1846cfb85d25c0ff0f684a",
    "limits.unconfirmed": "c75e05f70cdc573c80b5bfe2722c7fe9",
    "gate.lost": "e089d69d376a41f9a5c12dc28df1da28",
    "gate.handshake_unknown": "ba8a54a186bc43d1a7291c5a27960b89",
    "directory.taken": "7a78a024eaef4e2a852cd0ddd80201da",
    "client.refused": "2729e3a3473c48cba866922c1f6f7930",
    "drain.ordered": "b2d949629acd5544b22262c64189ac6e",
    "client.unkillable": "4fd23a89e6c8410fa6c777a01977094d",
    "outside_mps": "2dbef223e1d04ef2adb2f7d6e9569646",
    "agent.error": "92c2441fa7bf4c8b8d811f32f8dc2c8e",
}
_CLIENT_ENDED, _HANG = "2491fcdc69425995853494d155f00691", "383dbd647b055f84b02864ee3bf55d79"
ACTION_IDS: Mapping[str, str] = {
    "TerminateClient": _CLIENT_ENDED,
    "SignalClient": _CLIENT_ENDED,
    "Resume": _HANG,
    "KillServer": _HANG,
    "KillControl": _HANG,
    "StartControl": "8e5a7b8e29c0557bbf3b856eb66ba163",
}
"""The same for actions that have been carried out; for StartControl when it failed."""
_GRAVE = {
    "policy.rejected", "server.fault", "server.start_failed", "server.full", "limits.unconfirmed", "control.ended",
    "control.unsafe", "directory.taken", "gate.lost", "gate.handshake_unknown", "outside_mps", "client.unkillable",
    "client.environment", "client.unlimited", "client.refused", "agent.error", "action.failed",
}  # fmt: skip
_FIELDS = {"uid": "MPS_UID", "server": "MPS_SERVER_PID", "rule": "MPSAGENT_RULE"}
_PIDS = {"server": "MPS_SERVER_PID", "control": "MPS_CONTROL_PID"}
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure_log(form: str = "auto") -> None:
    """``journal``: native fields, so that ``journalctl MPS_UID=1001`` tells a user's story; ``text``: one line each."""
    native = form == "journal" or (form == "auto" and "JOURNAL_STREAM" in os.environ)
    structlog.configure(
        processors=[structlog.processors.add_log_level, _Journal() if native else Lines(sys.stderr)],
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=True,
    )


class Lines:
    """Writes each record as a line and ends the chain. From a thread of its own: who reads a pipe or looks at a
    terminal may stop doing so, and the agent must not. What is too much is counted and dropped."""

    def __init__(self, file: TextIO, most: int = 5000) -> None:
        self._file = file
        self._queue: SimpleQueue[str] = SimpleQueue()
        self._most = most
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def __call__(self, _logger: object, _name: str, record: MutableMapping[str, Any]) -> str:
        if self._queue.qsize() >= self._most:
            self._dropped += 1
            raise structlog.DropEvent
        if self._dropped:
            self._queue.put(f"... {self._dropped} lines were left out, because they were not read in time\n")
            self._dropped = 0
        self._queue.put(text_line(record))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="mpsagent-log", daemon=True)
            self._thread.start()
            atexit.register(self.flush)
        raise structlog.DropEvent

    def flush(self, seconds: float = 1.0) -> None:
        """Let it be written, but do not wait for ever."""
        end = time.monotonic() + seconds
        while not self._queue.empty() and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.005)

    def _write(self) -> None:
        while True:
            text = self._queue.get()
            with suppress(OSError, ValueError):  # closed
                self._file.write(text)
                self._file.flush()


def text_line(record: MutableMapping[str, Any]) -> str:
    """A record for people. Values are JSON in ASCII: nothing that a user chose reaches a terminal as it is."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
    kind, level = str(record.pop("event", "")), str(record.pop("level", "info"))
    if level == "info" and _is_grave(kind, record):
        level = "warning"
    said = record.pop("sentence", None)
    text = _rest(record) if said is None else printable(str(said))
    return f"{clock} {level:<7} {_safe(kind):<20} {text}".rstrip() + "\n"


class _Journal:
    """Sends each record to journald's own socket and ends the chain. Never blocks: a full journal loses the line, not
    the agent."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def __call__(self, _logger: object, _name: str, record: MutableMapping[str, Any]) -> str:
        kind, level = str(record.pop("event", "")), str(record.pop("level", "info"))
        with suppress(OSError):
            self._socket.sendto(encode(kind, level, record), SOCKET)
        raise structlog.DropEvent


def encode(kind: str, level: str, record: Mapping[str, Any]) -> bytes:
    """A record in journald's native protocol; values are cut. Of a message that is not all printable, journalctl shows
    its size only."""
    reason = record.get("sentence") or record.get("reason") or record.get("text")
    if reason and "sentence" not in record:
        reason = f"{kind}: {reason}"
    fields: dict[str, object] = {
        "MESSAGE": printable(str(reason or f"{kind} {_rest(record)}".strip())[:LONGEST]),
        "PRIORITY": min(_PRIORITIES.get(level, 6), 4 if _is_grave(kind, record) else 7),
        "SYSLOG_IDENTIFIER": "mpsagent",
        "MPSAGENT_EVENT": kind,
    }
    message_id = MESSAGE_IDS.get(kind)
    if kind in ("action.done", "action.failed") and record.get("enforce") is not False:
        action = str(record.get("action"))
        message_id = ACTION_IDS.get(action) if (action == "StartControl") == (kind == "action.failed") else None
    if message_id is not None:
        fields["MESSAGE_ID"] = message_id
    if "pid" in record:
        fields[_PIDS.get(kind.partition(".")[0], "MPS_CLIENT_PID")] = record["pid"]
    for name, field in _FIELDS.items():
        if record.get(name) is not None:
            fields[field] = record[name]
    data = bytearray()
    for name, value in fields.items():
        text = str(value).encode(errors="replace")[:LONGEST]
        data += name.encode() + b"\n" + len(text).to_bytes(8, "little") + text + b"\n"
    return bytes(data)


def _is_grave(kind: str, record: Mapping[str, Any]) -> bool:
    return kind in _GRAVE or record.get("ok") is False


def _rest(record: Mapping[str, Any]) -> str:
    return " ".join(f"{_safe(str(key))}={json.dumps(value, default=str)}" for key, value in record.items())


def _safe(text: str) -> str:
    return text if text.isascii() and text.isprintable() else json.dumps(text)
