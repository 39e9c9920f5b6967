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

from mpsagent.cli import client as api
from mpsagent.cli.wording import safe

Json = dict[str, Any]
_COLOURS = {"bad": "31", "good": "32", "warn": "33", "agent": "36", "dim": "2", "bold": "1"}
_QUIET = {"policy.loaded", "directory", "client.left", "turn.warned"}
"""Kinds that a spectator can do without."""
_QUIET_ACTIONS = {"Reconcile", "RunHook"}
_STYLES = {
    "client.waiting": "warn", "client.connected": "good", "client.refused": "bad", "client.sticky": "bad",
    "client.handover_failed": "bad", "limits.verified": "good", "limits.mismatch": "bad", "limits.unconfirmed": "bad",
    "turn.warning": "warn", "turn.ended": "warn", "server.fault": "bad", "server.fault_over": "good",
    "control.ended": "bad", "gate.lost": "bad", "front_end": "warn",
}  # fmt: skip
_OF_MPS = ("control.", "server.", "log.")
_OF_THE_GATE = ("client.waiting", "client.connected", "client.left", "client.refused", "client.handover_failed")


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
        """Show an action of a user."""
        self._line(time.time(), self._who(uid), self._named(text), "dim")

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
        kind, action = event["kind"], event.get("action")
        if kind in _QUIET or action in _QUIET_ACTIONS or kind == "action.done":
            return
        who = "gate" if kind in _OF_THE_GATE else "MPS" if kind.startswith(_OF_MPS) else "agent"
        style = "warn" if kind == "action.failed" else _STYLES.get(kind, "agent" if who == "agent" else "")
        text = self._named(event["sentence"].removesuffix(" (begun)"))
        self._line(datetime.fromisoformat(event["at"]).timestamp(), who, text, style)

    def _named(self, reason: str) -> str:
        for uid, name in self._names.items():
            reason = reason.replace(f"user {uid}", name)
        return reason

    @contextmanager
    def following(self, socket: str) -> Iterator[list[Json]]:
        """Show the agent's events from the first one on while the block runs; yields the list of them."""
        events: list[Json] = []
        over = threading.Event()

        def follow() -> None:
            cursor = 0
            while not over.is_set():  # an agent that was killed comes back, with its history
                with suppress(api.Unreachable, api.RequestRefused):
                    for line in api.lines(socket, f"/v1/events?follow=1&cursor={cursor}&limit=1000"):
                        event = json.loads(line)
                        cursor = event.get("cursor", cursor)
                        if "kind" in event:
                            events.append(event)
                            self.event(event)
                over.wait(0.05)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        yield events
        over.set()
        thread.join(5)
