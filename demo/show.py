"""What the terminal shows: one line for each thing that happens. Colours on a terminal only."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from mpsagent.interfaces import client as api
from mpsagent.interfaces.cli_text import safe

Json = dict[str, Any]
_COLOURS = {"bad": "31", "good": "32", "warn": "33", "agent": "36", "dim": "2", "bold": "1"}
_QUIET = {"Reconcile", "RunHook"}
_STYLES = {
    "client.waiting": "warn", "turn.warning": "warn", "turn.ended": "warn", "fault": "bad", "fault.over": "good",
    "control.gone": "bad", "client.sticky": "bad", "client.refused": "bad", "limits.verified": "good",
    "limits.mismatch": "bad", "server.forced": "warn", "client.connected": "good",
}  # fmt: skip
_TEXTS = {
    "control.started": "control daemon {pid} has started",
    "control.gone": "control daemon {pid} is gone",
    "control.quitting": "control daemon: quit, {timeout} s for those who work",
    "client.waiting": "client {pid} of {who} waits",
    "client.connected": "client {pid} of {who} is served",
    "client.disconnected": "client {pid} of {who} has left",
    "client.sticky": "client {pid} of {who} is in the fault",
    "client.refused": "client {pid} is refused: {reason}",
    "client.termination_asked": "client {pid} of {who} is asked to end",
    "server.ready": "server {pid} of {who} is ready",
    "server.exited": "server {pid} has ended",
    "server.forced": "server {pid} is shut down by force",
}
_DEEDS = {
    "SetDefaults": "sets the limits", "StartServer": "starts a server for {who}",
    "ShutdownServer": "ends server {server}",
    "TerminateClient": "terminate_client {pid}", "SignalClient": "signal {signal} to {pid}",
    "StartControl": "starts the control daemon", "OpenDoor": "opens the door", "Resume": "resumes process {pid}",
    "KillServer": "kills server {server}", "KillControl": "kills the control daemon", "QuitControl": "asks MPS to quit",
}  # fmt: skip


class Show:
    """``names``: user by uid."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._tty = sys.stdout.isatty()
        self._began = time.time()

    def _paint(self, text: str, style: str) -> str:
        return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if self._tty and style else text

    def _say(self, text: str, style: str = "") -> None:
        with self._lock:
            print(self._paint(text, style), flush=True)

    def title(self, text: str) -> None:
        self._say(text, "bold")

    def plain(self, text: str, style: str = "") -> None:
        self._say(text, style)

    def scene(self, text: str) -> None:
        self._say(f"\n── {text}", "bold")

    def deed(self, uid: int, text: str) -> None:
        """Something that a user does."""
        self._line(time.time(), self._who(uid), text, "dim")

    def _who(self, uid: object) -> str:
        if uid == 0:
            return "root"
        if uid == 65534:
            return "nobody"
        return self._names.get(uid, f"uid {uid}") if isinstance(uid, int) else "?"

    def _line(self, at: float, who: str, text: str, style: str) -> None:
        line = f"{max(0.0, at - self._began):6.2f} s  {who:<8} {safe(text, 300)}"
        width = shutil.get_terminal_size().columns if self._tty else len(line)
        self._say(line if len(line) <= width else line[: width - 1] + "…", style)

    def event(self, event: Json) -> None:
        """One line for one event of the agent's stream, or nothing for what only a machine wants to know."""
        kind, fields = event["kind"], {**event, "who": self._who(event.get("uid"))}
        at = datetime.fromisoformat(event["at"]).timestamp()
        if kind == "action":
            if event["action"] not in _QUIET:
                deed = _DEEDS.get(event["action"], event["action"]).format_map(_Known(fields))
                self._line(at, "agent", f"{deed}: {self._named(event['reason'])}", "agent")
        elif kind == "action.done":
            if not event["ok"]:
                self._line(at, "agent", f"{event['action']} was not done: {event['text']}", "warn")
        elif kind in _TEXTS:
            self._line(at, "MPS", _TEXTS[kind].format_map(_Known(fields)), _STYLES.get(kind, ""))
        elif "reason" in event:  # a report
            self._line(at, "agent", f"{kind}: {self._named(event['reason'])}", _STYLES.get(kind, "agent"))

    def _named(self, reason: str) -> str:
        for uid, name in self._names.items():
            reason = reason.replace(f"user {uid}", name)
        return reason

    @contextmanager
    def following(self, socket: str) -> Iterator[list[Json]]:
        """Show the agent's events from the first one on while the block runs; yields the list of them."""
        events: list[Json] = []

        def follow() -> None:
            with suppress(api.Unreachable, api.Refused):
                for line in api.lines(socket, "/v1/events?follow=1&cursor=0&limit=1000"):
                    event = json.loads(line)
                    if "kind" in event:
                        events.append(event)
                        self.event(event)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        yield events
        thread.join(5)


class _Known(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"
