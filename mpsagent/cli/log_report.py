"""A short, anonymous sample of log lines that were not understood, for people to send to the project. Pure.

Equal lines count as one once everything that could name a user is taken out: numbers and words with digits (pids,
uids, hosts), paths, addresses, quoted text, and the names that the caller knows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from mpsagent.mps import events as ev
from mpsagent.mps.events import Line

Json = dict[str, Any]
MOST_KINDS = 40
"""Different lines that are shown; the others are counted."""
MOST_KEPT = 2000
"""Different lines that are kept apart while reading, whatever the log has."""
LONGEST = 160

_STAMP = re.compile(r"\[[\d\s:.-]{10,40}")
_REMOVED = (
    (re.compile(r"[\"'`].*?[\"'`]"), '"…"'),
    (re.compile(r"\S*[/\\]\S*"), "PATH"),
    (re.compile(r"\S+@\S+"), "ADDRESS"),
    (re.compile(r"(?<![^\W_])[\w.:-]*\d[\w.:-]*"), "N"),
)
_WORD = re.compile(r"[^\W\d_][\w-]*")


class LogReport:
    """A fold over events; ``names``: words that stand for a user or a thing of this machine, in lower case."""

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._kinds: Counter[str] = Counter()
        self._lines = self._unknown = 0
        self._binary: int | None = None
        self._driver: str | None = None

    def feed(self, event: Line) -> None:
        self._lines += 1
        if event.what is ev.ControlVersion:
            self._binary = event.number
        elif event.what is ev.DriverNamed:
            self._driver = str(event.number)
        elif event.what is ev.Unknown:
            self._unknown += 1
            text = self._anonymous(event.text)
            if text in self._kinds or len(self._kinds) < MOST_KEPT:
                self._kinds[text] += 1

    def _anonymous(self, text: str) -> str:
        text = _STAMP.sub("[", text)
        for pattern, instead in _REMOVED:
            text = pattern.sub(instead, text)
        text = _WORD.sub(lambda word: "NAME" if word[0].lower() in self._names else word[0], text)
        return "".join(character if character.isprintable() else "?" for character in text)[:LONGEST]

    def finish(self) -> Json:
        """What JSON has of it; ``kinds`` with the most frequent first."""
        return {
            "lines": self._lines,
            "unknown": self._unknown,
            "kinds": [{"count": count, "text": text} for text, count in self._kinds.most_common(MOST_KINDS)],
            "binary_version": self._binary,
            "driver": self._driver,
        }


def page(body: Json, version: str) -> list[str]:
    """The report as text."""
    mps = f"MPS binary version {body['binary_version']}" if body["binary_version"] else "MPS of unknown version"
    driver = f"driver {body['driver']}" if body["driver"] else "driver unknown: please add it"
    lines = [f"mpsagent {version}, {mps}, {driver}", f"{body['unknown']} of {body['lines']} lines not understood"]
    shown = sum(one["count"] for one in body["kinds"])
    lines += [f"{one['count']:7}  {one['text']}" for one in body["kinds"]]
    if shown < body["unknown"]:
        lines.append(f"{body['unknown'] - shown:7}  others")
    return lines
