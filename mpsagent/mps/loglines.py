"""Bytes of control.log or server.log to events. Pure and incremental: any chunking gives the same events.

A line never raises. What no rule knows becomes :class:`Unknown`. A partial last line waits for its end. The texts and
their oddities (``recevie``, ``trigging``, ``Context:`` without ID) are those of drivers 460 to 580 (recordings 01-10);
lines of drivers before 550 say less: no pid of the client, no context.

Lines of an answer to a user's command carry text that the asker provoked: ``ps`` prints the command names of other
people's processes. So between ``Cmd:ps`` and the end of that connection every line is an answer, whatever it looks
like.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, tzinfo
from typing import Literal

from mpsagent.mps import events as ev

LINE_LIMIT = 64 * 1024
"""Bytes of one line that are kept; the rest is dropped and the line becomes Unknown."""
_SHOWN = 200

Source = Literal["control", "server", "merged"]
_Make = Callable[[float, int, "re.Match[str]"], ev.LogEvent]

_NUMBER = r"(\d{1,10})"
_CLIENT = r"Client \{PID: (-?\d{1,10}), Context ID: (\d{1,10})\}"
_CONNECTION = {
    "Accepting connection...",
    "NEW UI",
    "UI closed",
    "User did not send valid credentials",
    "Unable to accept connection",
    "Unable to read new connection type information",
}


def _rules(table: list[tuple[str, _Make]]) -> dict[str, list[tuple[Callable[[str], re.Match[str] | None], _Make]]]:
    """Rules by the first word of the message: one dictionary look-up instead of a try of every pattern."""
    by_word: dict[str, list[tuple[Callable[[str], re.Match[str] | None], _Make]]] = {}
    for pattern, make in table:
        word = pattern.split(" ", 1)[0].replace("\\", "")
        by_word.setdefault(word, []).append((re.compile(pattern, re.ASCII).fullmatch, make))
    return by_word


def _control_line(at: float, pid: int, match: re.Match[str]) -> ev.LogEvent:
    return ev.ControlLine(at, match[0][:_SHOWN])


_CONTROL = _rules(
    [
        (
            rf"NEW CLIENT {_NUMBER} from user {_NUMBER}: Server already exists",
            lambda at, pid, m: ev.ClientAdmitted(at, int(m[1]), int(m[2])),
        ),
        (
            rf"NEW CLIENT {_NUMBER} from user {_NUMBER}: Server is not ready, push client to pending list",
            lambda at, pid, m: ev.ClientQueued(at, int(m[1]), int(m[2])),
        ),
        (rf"NEW SERVER {_NUMBER}: Ready", lambda at, pid, m: ev.ServerReady(at, int(m[1]))),
        (
            rf"Server {_NUMBER} has {_NUMBER} active worker threads\. Server will not shutdown\.",
            lambda at, pid, m: ev.ShutdownRefused(at, int(m[1]), int(m[2])),
        ),
        (
            rf"Server {_NUMBER} exited with status (-?\d{{1,10}})",
            lambda at, pid, m: ev.ServerExited(at, int(m[1]), int(m[2])),
        ),
        (
            rf"Try shutting down server {_NUMBER}, backoff is (enabled|disabled)",
            lambda at, pid, m: ev.ShutdownTried(at, int(m[1]), m[2] == "enabled"),
        ),
        (
            rf"Control will try shutting down server {_NUMBER} again in at most {_NUMBER}ms",
            lambda at, pid, m: ev.ShutdownLater(at, int(m[1]), int(m[2]) / 1000),
        ),
        (
            rf"Starting new server {_NUMBER} for user {_NUMBER}",
            lambda at, pid, m: ev.ServerStarting(at, int(m[1]), int(m[2])),
        ),
        (rf"Force shutting down server {_NUMBER}", lambda at, pid, m: ev.ShutdownForced(at, int(m[1]))),
        (
            r"Starting control daemon using socket (.{1,4096})",
            lambda at, pid, m: ev.ControlStarted(at, pid, m[1]),
        ),
        (
            r"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=.*",
            lambda at, pid, m: ev.ConnectionLine(at, m[0][:_SHOWN]),
        ),
        (rf"CUDA MPS Control binary version: {_NUMBER}", lambda at, pid, m: ev.ControlVersion(at, pid, int(m[1]))),
        (rf"quit command issued with timeout of {_NUMBER}", lambda at, pid, m: ev.QuitIssued(at, int(m[1]))),
        (r"Exit with status (-?\d{1,10})", lambda at, pid, m: ev.ControlExited(at, pid, int(m[1]))),
        (r"Removed Shm file at (.{0,4096})", lambda at, pid, m: ev.SharedMemoryRemoved(at, m[1][:_SHOWN])),
        # 550 and later: said by the child that was to become the server, so the head has the server's pid.
        (
            rf"Failed to start server using uid {_NUMBER}\. (.{{0,4096}})",
            lambda at, pid, m: ev.ServerFailed(at, pid, m[2][:_SHOWN]),
        ),
        (r"Start", _control_line),  # 460, in a log of control and server merged
        (r"Server encountered a fatal exception\. Shutting down", _control_line),
        (r"NEW SERVER \d{1,10}: Ignoring (old connection request|connection from user)", _control_line),
        (r"NEW DEBUGGEE \d{1,10} from user \d{1,10}", _control_line),
        (r"Unknown type of connection", _control_line),
        (r"Unable to accept priviliged connection from other user", _control_line),
        (r"Warning: Failed writing log files to directory \[.{0,4096}\]\. No logs will be available\.", _control_line),
        (r"Failed to create control pid file .{1,4096}", _control_line),
        (r"CUDA MPS log recorder error", _control_line),
        (r"Internal error(?: when allocating \d{1,20} bytes)?", _control_line),
        (r"Using log directory: .{1,4096}", _control_line),
    ]
)


def _server_line(at: float, pid: int, match: re.Match[str]) -> ev.LogEvent:
    return ev.ServerLine(at, pid, match[0][:_SHOWN])


_SERVER = _rules(
    [
        (rf"{_CLIENT} connected", lambda at, pid, m: ev.ContextConnected(at, pid, int(m[1]), int(m[2]))),
        (
            rf"{_CLIENT} exiting\. (?:Worker is in reset\. )?Number of active client contexts is \d{{1,10}}\.",
            lambda at, pid, m: ev.ContextExiting(at, pid, int(m[1]), int(m[2])),
        ),
        (rf"Client process {_NUMBER} disconnected", lambda at, pid, m: ev.ClientDisconnected(at, pid, int(m[1]))),
        (
            rf"Client termination request failed: There is no active client context found for process {_NUMBER}\.",
            _server_line,
        ),
        (r"Client termination failed with invalid device context\.", _server_line),
        (r"Client termination succeeded\.", lambda at, pid, m: ev.TerminationDone(at, pid)),
        (rf"{_CLIENT} on device \d{{1,10}} to be torn down", _server_line),
        (rf"{_CLIENT} on the error-trigging process \d{{1,10}} to be torn down", _server_line),
        (r"Client \{PID: \d{1,10}, Context: \d{1,10}\} encountered a fatal GPU error\.", _server_line),
        (r"Client Priority set to -?\d{1,10}", _server_line),
        (r"Creating worker thread for client \{PID: -?\d{1,10}, Context ID: \d{1,10}\}", _server_line),
        (r"Creating server context on device \d{1,10} \(.{0,200}\)", _server_line),
        (r"Created anonymous shared memory region .{1,200}", _server_line),
        (r"Connecting to control daemon on socket: .{1,4096}", _server_line),
        (
            rf"Destroy server context on device {_NUMBER} \(.{{0,200}}\)",
            lambda at, pid, m: ev.ContextDestroyed(at, pid, int(m[1])),
        ),
        (
            r"Device .{1,200} \(uuid ([A-Za-z0-9/-]{1,80})\) is associated",
            lambda at, pid, m: ev.DeviceAssociated(at, pid, m[1]),
        ),
        (
            rf"Device pinned memory limit for device {_NUMBER} set to 0x([0-9a-f]{{1,16}}) bytes",
            lambda at, pid, m: ev.MemorySet(at, pid, int(m[1]), int(m[2], 16)),
        ),
        (
            r"Active Threads Percentage set to (\d{1,3}(?:\.\d{1,6})?)",
            lambda at, pid, m: ev.ThreadsSet(at, pid, float(m[1])),
        ),
        (r"Received new client request for \{PID: -?\d{1,20}, Context ID: -?\d{1,20}\}", _server_line),
        (r"Received device query command\. There are \d{1,10} devices", _server_line),
        (
            r"Server failed to recevie command with status -?\d{1,10}, "
            r"assuming client \{PID: -?\d{1,10}, Context ID: \d{1,10}\} exit",
            _server_line,
        ),
        (
            r"Server teardown in progress\. Refusing to accept new client \{PID: -?\d{1,10}, Context ID: -?\d{1,10}\}",
            _server_line,
        ),
        (
            r"Failed to accept client \{PID: (-?\d{1,10}), Context ID: -?\d{1,10}\} with status (\d{1,10})",
            lambda at, pid, m: ev.ClientRefused(at, pid, int(m[1]), f"status {m[2]}"),
        ),
        (
            rf"Failed to accept new client\. Maximum number of clients \({_NUMBER}\) reached\.",
            lambda at, pid, m: ev.ClientsFull(at, pid, int(m[1])),
        ),
        (rf"Status of client \{{PID: {_NUMBER}, Context ID: \d{{1,10}}\}} is [A-Z_]{{1,30}}", _server_line),
        (
            rf"MPS server requesting client \{{PID: {_NUMBER}, Context ID: \d{{1,10}}\}} to exit",
            lambda at, pid, m: ev.TerminationAsked(at, pid, int(m[1])),
        ),
        (r"Server was unable to shutdown due to \d{1,10} active clients", _server_line),
        (r"Server Priority set to -?\d{1,10}", _server_line),
        (r"All clients belonging to error trigging process \d{1,10} will be torn down", _server_line),
        (r"CUDA MPS Server for Linux/Unix\. Binary version: \d{1,10}", _server_line),
        (r"Display Driver version: [\d.]{1,30}", _server_line),
        (r"Using log directory: .{1,4096}", _server_line),
        (r"Startup", lambda at, pid, m: ev.ServerStartup(at, pid)),
        (r"Exiting", lambda at, pid, m: ev.ServerStopping(at, pid)),
        (r"Waiting for current clients to finish", lambda at, pid, m: ev.ServerStopping(at, pid)),
        (r"Server is handling a fatal GPU error\.", lambda at, pid, m: ev.FaultStarted(at, pid)),
        (r"User did not send valid credentials", lambda at, pid, m: ev.ServerStuck(at, pid)),
        (r"Server has been notified to shutdown", _server_line),
        (r"Server has started", lambda at, pid, m: ev.ServerStarted(at, pid)),
        (r"Initializing server process", _server_line),
        (r"Driver initialization failed with: .{0,4096}", _server_line),
        # 470 says `MPS server failed to start : R`, the first drivers gave no reason.
        (r"Failed to start : (.{0,4096})", lambda at, pid, m: ev.ServerFailed(at, pid, m[1][:_SHOWN])),
        (
            r"MPS server failed to start(?: : (.{0,4096}))?",
            lambda at, pid, m: ev.ServerFailed(at, pid, (m[1] or "")[:_SHOWN]),
        ),
        (r"MPS is only supported on .{1,200}", _server_line),
        # Drivers before 550: the same lines without the client's pid, which therefore say nothing about a process.
        (r"Start", lambda at, pid, m: ev.ServerStartup(at, pid)),
        (r"MPS Server is started", lambda at, pid, m: ev.ServerStarted(at, pid)),
        (r"MPS Server connecting to control daemon on socket: .{1,4096}", _server_line),
        (r"MPS Server: worker created", _server_line),
        (
            r"activeThreadsPercentage set to (\d{1,3}(?:\.\d{1,6})?)",
            lambda at, pid, m: ev.ThreadsSet(at, pid, float(m[1])),
        ),
        (r"Received new client request", _server_line),
        (r"Receive command failed, assuming client exit", _server_line),
        (r"Worker created", _server_line),
        (r"Creating worker thread", _server_line),
        (r"Created named shared memory region .{1,200}", _server_line),
        (r"Volta MPS Server: Received new client request", _server_line),
        (r"Volta MPS: Creating (?:worker thread|server context on device \d{1,10})", _server_line),
        (r"Volta MPS: Client disconnected\. Number of active client contexts is \d{1,10}", _server_line),
        (r"Volta MPS: Client process disconnected", _server_line),
        (r"Volta MPS: Device .{1,200} \(uuid [A-Za-z0-9/-]{1,80}\) is associated", _server_line),
        (r"New client \d{1,10} connected", _server_line),
        (r"Client \d{1,10} disconnected", _server_line),
    ]
)
_HEAD = re.compile(r"(Control|Server|Other|Legacy Server|Client) +(\d{1,10})", re.ASCII).fullmatch
_DAEMON_STARTS = "Starting control daemon using socket "
"""A daemon that is killed while it answers does not end its answer: the next one's first line does."""
_DEVICES_FOLLOW = "The following devices will be reset:"
_CLIENTS_FOLLOW = "The following client process have a sticky error set:"


class LogParser:
    """Parser of one log. ``zone`` is the time zone of its time stamps (None: the machine's)."""

    def __init__(self, source: Source, zone: tzinfo | None = None) -> None:
        self._source = source
        self._zone = zone
        self._rest = b""
        self._minute = ""
        self._minute_at = 0.0
        self._last_at = 0.0
        self._heads: dict[str, tuple[str, int] | None] = {}
        self._answering = False
        self._answer_only = False
        self._answering_pid = 0
        self._listing: dict[int, type[ev.FaultDevice] | type[ev.FaultClient]] = {}

    def feed(self, data: bytes, shift: float = 0.0) -> list[ev.LogEvent]:
        """Events of all lines that ``data`` completes. ``shift`` seconds are added to their times (a clock step that
        the caller knows of)."""
        found: list[ev.LogEvent] = []
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(data)
            return found
        lines = (self._rest + data[:end]).split(b"\n")
        self._rest = b""
        for raw in lines:
            if len(raw) > LINE_LIMIT:
                found.append(ev.Unknown(self._last_at, self._source, raw[:_SHOWN].decode("utf-8", "replace")))
                continue
            event = self._line(raw.decode("utf-8", "replace"), shift)
            if event is not None:
                found.append(event)
        self._keep(data[end + 1 :])
        return found

    def close(self, shift: float = 0.0) -> list[ev.LogEvent]:
        """The partial last line, taken as if it had ended."""
        return self.feed(b"\n", shift) if self._rest else []

    def _keep(self, data: bytes) -> None:
        rest = self._rest + data
        if len(rest) > LINE_LIMIT:
            rest = rest[: LINE_LIMIT + 1]  # one byte over, so that it is still known to be too long
        self._rest = rest

    def _line(self, line: str, shift: float) -> ev.LogEvent | None:
        if line[:1] == "\0":
            line = line.lstrip("\0")
        if not line:
            return None
        stop = line.find("] ", 26, 64) if line[0] == "[" else -1
        head = None
        if stop > 0:
            key = line[25:stop]
            try:
                head = self._heads[key]
            except KeyError:
                head = self._head(key)
            at = self._time(line)
        if head is None or at is None:
            return self._unheaded(line)
        at += shift
        self._last_at = at
        who, pid = head
        message = line[stop + 2 :]
        if who == "Control":
            return self._control(at, pid, message)
        if who == "Client":
            return ev.ClientLine(at, pid, message[:_SHOWN])
        return self._server(at, pid, message)

    def _head(self, key: str) -> tuple[str, int] | None:
        """``Control   471`` -> ("Control", 471); None for what no such head is or does not belong in this log."""
        match = _HEAD(key)
        head = (match[1], int(match[2])) if match else None
        if head and self._source != "merged" and (head[0] == "Control") != (self._source == "control"):
            head = None
        if len(self._heads) >= 1024:
            self._heads.clear()
        self._heads[key] = head
        return head

    def _time(self, line: str) -> float | None:
        """Seconds since the epoch of ``[2026-11-20 23:56:21.414``, or None."""
        minute = line[1:17]
        if minute != self._minute:
            try:
                moment = datetime.fromisoformat(minute)
                self._minute_at = (moment.replace(tzinfo=self._zone) if self._zone else moment).timestamp()
            except (ValueError, OverflowError, OSError):
                return None
            self._minute = minute
        try:
            seconds = float(line[18:24])
        except ValueError:
            return None
        return self._minute_at + seconds if 0.0 <= seconds < 61.0 else None

    def _unheaded(self, line: str) -> ev.LogEvent:
        """A line without MPS's head: part of a multi-line answer, or nothing we know."""
        if self._answering and self._source != "server":
            return ev.CommandAnswer(self._last_at, line[:_SHOWN])
        return ev.Unknown(self._last_at, self._source, line[:_SHOWN])

    def _control(self, at: float, pid: int, message: str) -> ev.LogEvent:
        if message in _CONNECTION:
            if message != "User did not send valid credentials":
                self._answering = self._answer_only = False
            return ev.ConnectionLine(at, message)
        if message.startswith("Cmd:"):
            self._answering = True
            self._answer_only = message[4:].lstrip().startswith("ps")
            self._answering_pid = pid
            return ev.CommandRead(at, message[4 : 4 + _SHOWN])
        if not self._answer_only or (pid != self._answering_pid and message.startswith(_DAEMON_STARTS)):
            for match, make in _CONTROL.get(message.partition(" ")[0], ()):
                found = match(message)
                if found is not None:
                    return make(at, pid, found)
        if self._answering:
            return ev.CommandAnswer(at, message[:_SHOWN])
        return ev.Unknown(at, self._source, message[:_SHOWN])

    def _server(self, at: float, pid: int, message: str) -> ev.LogEvent:
        if self._listing:
            kind = self._listing.get(pid)
            if kind is not None:
                if message.isascii() and message.isdecimal() and len(message) <= 10:
                    return kind(at, pid, int(message))
                del self._listing[pid]
        for match, make in _SERVER.get(message.partition(" ")[0], ()):
            found = match(message)
            if found is not None:
                return make(at, pid, found)
        if message in (_DEVICES_FOLLOW, _CLIENTS_FOLLOW):
            if len(self._listing) >= 64:
                self._listing.clear()
            self._listing[pid] = ev.FaultDevice if message == _DEVICES_FOLLOW else ev.FaultClient
            return ev.ServerLine(at, pid, message)
        return ev.Unknown(at, self._source, message[:_SHOWN])
