"""Log lines: fields for the journal, readable text elsewhere."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

import structlog

SOCKET = "/run/systemd/journal/socket"
LONGEST = 8192
# Message ids by kind of record; the texts are in the catalog (systemd/mpsagent.catalog).
MESSAGE_IDS: Mapping[str, str] = {
    "policy.loaded": "a66ff773a02a541fbbd2d3cb85337def",
    "policy.rejected": "178666bce8c9519ea8da5b0ec1b9368a",
    "server.ready": "7bb64d6932e955318db93927769f9a0d",
    "fault": "f4a60d84ddf05a0792c08e8c975d1436",
    "fault.over": "fabf2f03c34f5baa91443c558a8ed8d7",
    "control.started": "7b97615e5950553f9f85c362eb42c11b",
    "control.failed": "8e5a7b8e29c0557bbf3b856eb66ba163",
    "limits.mismatch": "c75e05f70cdc573c80b5bfe2722c7fe9",
    "drain.begun": "b2d949629acd5544b22262c64189ac6e",
}
_FIELDS = {"uid": "MPS_UID", "server": "MPS_SERVER_PID", "rule": "MPSAGENT_RULE"}
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def configure_log(form: str = "auto") -> None:
    """``journal``: native fields, so that ``journalctl MPS_UID=1001`` tells a user's story; ``text``: one line each."""
    native = form == "journal" or (form == "auto" and "JOURNAL_STREAM" in os.environ)
    final: Callable[..., Any]
    if native:
        final = _Journal()
    else:
        final = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=22)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            *([] if native else [structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False)]),
            final,
        ],
        logger_factory=structlog.ReturnLoggerFactory() if native else structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


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
    """A record in journald's native protocol; values are cut and may hold anything."""
    reason = record.get("reason") or record.get("text")
    fields: dict[str, object] = {
        "MESSAGE": f"{kind}: {reason}" if reason else f"{kind} {_rest(record)}".strip(),
        "PRIORITY": _PRIORITIES.get(level, 6),
        "SYSLOG_IDENTIFIER": "mpsagent",
        "MPSAGENT_EVENT": kind,
    }
    if kind in MESSAGE_IDS:
        fields["MESSAGE_ID"] = MESSAGE_IDS[kind]
    for name, value in record.items():
        if name == "pid":
            fields["MPS_SERVER_PID" if kind.startswith("server.") else "MPS_CLIENT_PID"] = value
        elif name in _FIELDS:
            fields[_FIELDS[name]] = value
    data = bytearray()
    for name, value in fields.items():
        text = str(value).encode(errors="replace")[:LONGEST]
        data += name.encode() + b"\n" + len(text).to_bytes(8, "little") + text + b"\n"
    return bytes(data)


def _rest(record: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value, default=str)}" for key, value in record.items())
