"""Bytes of control.log or server.log to lines (:mod:`mpsagent.mps.events`). Pure and incremental: any chunking gives
the same. A line never raises. A partial last line waits for its end.

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
from mpsagent.mps.events import CONTROL, SERVER, SHOWN, Line, What

LINE_LIMIT = 64 * 1024
"""Bytes of one line that are kept; the rest is dropped and the line becomes Unknown."""

Source = Literal["control", "server", "merged"]

_CONNECTION = {
    "Accepting connection...",
    "NEW UI",
    "UI closed",
    "User did not send valid credentials",
    "Unable to accept connection",
    "Unable to read new connection type information",
}

_HEAD = re.compile(r"(Control|Server|Other|Legacy Server|Client) +(\d{1,10})", re.ASCII).fullmatch
_DAEMON_STARTS = "Starting control daemon using socket "
"""A daemon that is killed while it answers does not end its answer: the next one's first line does."""
_DEVICES_FOLLOW = "The following devices will be reset:"
_CLIENTS_FOLLOW = {
    "The following client process have a sticky error set:",
    "The following clients have a sticky error set:",  # 535 and 550
}


SLACK = 1.0
"""Seconds by which a line may be older than the one before it: a server's threads write side by side."""


class LogParser:
    """Parser of one log. ``zone`` is the time zone of its time stamps (None: the machine's). The log does not say its
    zone, and in autumn an hour comes twice: there a line that would be older than the one before it is of the second
    time."""

    def __init__(self, source: Source, zone: tzinfo | None = None) -> None:
        self._source = source
        self._zone = zone
        self._rest = b""
        self._minute = ""
        self._minute_at = 0.0
        self._second_at: float | None = None
        """The same minute an hour later, when it comes twice."""
        self._newest = float("-inf")
        self.daemon: int | None = None
        """When set: only lines of the control daemon with this pid count. Another one may write into the same file."""
        self.other: int | None = None
        """The pid of another one, whose lines were left out."""
        self.ours: Callable[[int], bool] | None = None
        """When set: whether a server is one of ours. Asked once for each that starts; lines of others are left out."""
        self._servers: dict[int, bool] = {}
        self._last_at = 0.0
        self._heads: dict[str, tuple[str, int] | None] = {}
        self._answering = False
        self._answer_only = False
        self._answering_pid = 0
        self._listing: dict[int, What] = {}

    def feed(self, data: bytes, shift: float = 0.0) -> list[Line]:
        """Events of all lines that ``data`` completes. ``shift`` seconds are added to their times (a clock step that
        the caller knows of)."""
        found: list[Line] = []
        end = data.rfind(b"\n")
        if end < 0:
            self._keep(data)
            return found
        lines = (self._rest + data[:end]).split(b"\n")
        self._rest = b""
        for raw in lines:
            if len(raw) > LINE_LIMIT:
                found.append(ev.Unknown(self._last_at, self._source, raw[:SHOWN].decode("utf-8", "replace")))
                continue
            event = self._line(raw.decode("utf-8", "replace"), shift)
            if event is not None:
                found.append(event)
        self._keep(data[end + 1 :])
        return found

    def close(self, shift: float = 0.0) -> list[Line]:
        """The partial last line, taken as if it had ended."""
        return self.feed(b"\n", shift) if self._rest else []

    def _keep(self, data: bytes) -> None:
        rest = self._rest + data
        if len(rest) > LINE_LIMIT:
            rest = rest[: LINE_LIMIT + 1]  # one byte over, so that it is still known to be too long
        self._rest = rest

    def _line(self, line: str, shift: float) -> Line | None:
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
            if self.daemon is not None and pid != self.daemon and not self._starts(pid, message):
                self.other = pid
                return None
            return self._control(at, pid, message)
        if self.ours is not None and not self._is_ours(self.ours, pid, message == "Startup"):
            return None
        if who == "Client":
            return ev.Harmless.said(at, message[:SHOWN])
        return self._server(at, pid, message)

    def _starts(self, pid: int, message: str) -> bool:
        """The daemon's child says itself that it is to become a server (recording 02), or why it does not."""
        if message.startswith(f"Starting new server {pid} "):
            return self.ours is None or self._is_ours(self.ours, pid, True)
        return self._servers.get(pid, False)

    def _is_ours(self, ours: Callable[[int], bool], pid: int, fresh: bool) -> bool:
        known = None if fresh else self._servers.get(pid)
        if known is None:
            if len(self._servers) >= 256:
                self._servers.clear()
            known = self._servers[pid] = ours(pid)
        return known

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
                if self._zone is not None:
                    moment = moment.replace(tzinfo=self._zone)
                self._minute_at, again = moment.timestamp(), moment.replace(fold=1).timestamp()
            except (ValueError, OverflowError, OSError):
                return None
            self._second_at = again if again > self._minute_at else None
            self._minute = minute
        try:
            seconds = float(line[18:24])
        except ValueError:
            return None
        if not 0.0 <= seconds < 61.0:
            return None
        at = self._minute_at + seconds
        if self._second_at is not None and at < self._newest - SLACK:
            at = self._second_at + seconds
        self._newest = max(self._newest, at)
        return at

    def _unheaded(self, line: str) -> Line:
        """A line without MPS's head: part of a multi-line answer, or nothing we know."""
        if self._answering and self._source != "server":
            return ev.CommandAnswer.said(self._last_at, line[:SHOWN])
        return ev.Unknown(self._last_at, self._source, line[:SHOWN])

    def _control(self, at: float, pid: int, message: str) -> Line:
        if message in _CONNECTION:
            if message != "User did not send valid credentials":
                self._answering = self._answer_only = False
            return ev.ConnectionLine.said(at, message)
        if message.startswith("Cmd:"):
            self._answering = True
            self._answer_only = message[4:].lstrip().startswith("ps")
            self._answering_pid = pid
            return ev.CommandRead.said(at, message[4 : 4 + SHOWN])
        if not self._answer_only or (pid != self._answering_pid and message.startswith(_DAEMON_STARTS)):
            for row in CONTROL.get(message.partition(" ")[0], ()):
                found = row.match(message)
                if found is not None:
                    return row.line(at, pid, found)
        if self._answering:
            return ev.CommandAnswer.said(at, message[:SHOWN])
        return ev.Unknown(at, self._source, message[:SHOWN])

    def _server(self, at: float, pid: int, message: str) -> Line:
        if self._listing:
            kind = self._listing.get(pid)
            if kind is not None:
                if message.isascii() and message.isdecimal() and len(message) <= 10:
                    return kind(at, pid, int(message))
                del self._listing[pid]
        for row in SERVER.get(message.partition(" ")[0], ()):
            found = row.match(message)
            if found is not None:
                return row.line(at, pid, found)
        if message == _DEVICES_FOLLOW or message in _CLIENTS_FOLLOW:
            if len(self._listing) >= 64:
                self._listing.clear()
            self._listing[pid] = ev.FaultDevice if message == _DEVICES_FOLLOW else ev.FaultClient
            return ev.Harmless.said(at, message)
        return ev.Unknown(at, self._source, message[:SHOWN])
