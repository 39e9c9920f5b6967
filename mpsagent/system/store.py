"""What the agent has to remember beyond its own life, in one small file: a drain that was ordered, clients that are
being ended, how far the logs were read.

The file is written whole, beside the old one, and takes its place by rename: after any death it is the old one or the
new one. Writing happens in a thread of its own; many changes in a row become one write. A file that is broken, of
another version, or not ours is put aside and said, never trusted and never lost.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from mpsagent.linux import atomic_file

VERSION = 1
LARGEST = 64 << 20
"""Bytes; what the agent remembers is some kilobytes, and with hundreds of leases at dozens of instances megabytes."""
AGAIN = 5.0
"""Seconds until a write that failed is tried again (a full disk)."""
FAREWELL = 5.0
"""Seconds that :meth:`Store.close` waits for the disk."""


class Store:
    """``path`` None: nothing is kept beyond this process. Values are JSON. One event loop; :meth:`load` comes first."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path)
        self.notes: list[str] = []
        """What was wrong with the file that was found, for people."""
        self.problem: str | None = None
        """Why the newest values are not on disk, or None."""
        self._values: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        """Each of them as JSON. Neither dict is ever changed, so that the thread can read it."""
        self._number = 0
        self._written = 0
        self._wanted: dict[str, str] | None = None
        self._closed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def load(self) -> dict[str, Any]:
        """Reads the file; blocking, for the start. Never raises."""
        if self.path is not None:
            try:
                self._values = _read(self.path)
            except FileNotFoundError:
                self._values = {}
            except (OSError, ValueError) as error:
                self._values = {}
                self._put_aside(str(error) or type(error).__name__)
        self._texts = {name: json.dumps(value) for name, value in self._values.items()}
        return dict(self._values)

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def put(self, name: str, value: Any) -> None:
        """Remembers ``value`` under ``name`` (None: forget it); it is on disk soon after. Raises TypeError or
        ValueError for what JSON cannot hold; then nothing has changed."""
        if self._values.get(name) == value:
            return
        text = json.dumps(value, allow_nan=False)
        values, texts = {**self._values, name: value}, {**self._texts, name: text}
        if value is None:
            del values[name], texts[name]
        self._values, self._texts = values, texts
        if self.path is None:
            return
        with self._change:
            self._wanted, self._number = texts, self._number + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mpsagent-store", daemon=True)
                self._thread.start()
            self._change.notify_all()

    async def flushed(self, deadline: float = FAREWELL) -> bool:
        """Waits until what was put before is on disk. False when it is not within ``deadline`` seconds."""
        until = time.monotonic() + deadline
        number = self._number
        while self._written < number:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.002)
        return True

    def close(self) -> None:
        """The last values reach the disk, if it takes them in time; blocking, for the end."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(FAREWELL)

    # --- in the thread ---

    def _work(self) -> None:
        while True:
            with self._change:
                while self._wanted is None:
                    if self._closed:
                        return
                    self._change.wait()
                texts, number = self._wanted, self._number
                self._wanted = None
            try:
                assert self.path is not None
                atomic_file.write(self.path, _whole(texts), lasting=True)
            except OSError as error:
                self.problem = f"{self.path} cannot be written: {error.strerror or error}"
                with self._change:
                    if self._closed:
                        return
                    self._change.wait(AGAIN)
                    self._wanted = self._wanted or texts
            else:
                self.problem = None
                self._written = number

    def _put_aside(self, why: str) -> None:
        assert self.path is not None
        aside = self.path.with_name(f"{self.path.name}.broken-{int(time.time())}")
        try:
            self.path.rename(aside)
        except OSError as error:
            self.notes.append(f"{self.path} is not used: {why}; it cannot be put aside: {error.strerror}")
        else:
            self.notes.append(
                f"{self.path} was not used: {why}; it is {aside} now. A drain that was ordered has to be ordered again"
            )


class StorePart:
    """What one of several keeps in a store, under its own name."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    @property
    def problem(self) -> str | None:
        return self._store.problem

    def get(self, name: str, default: Any = None) -> Any:
        return self._store.get(f"{self._name}/{name}", default)

    def put(self, name: str, value: Any) -> None:
        self._store.put(f"{self._name}/{name}", value)


def _read(path: Path) -> dict[str, Any]:
    """Raises ValueError with what is wrong, or OSError."""
    try:
        content = json.loads(atomic_file.read(path, LARGEST))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if not isinstance(content, dict) or not isinstance(content.get("values"), dict):
        raise ValueError("it is not a file of this agent's")
    if content.get("version") != VERSION:
        raise ValueError(f"it has version {content.get('version')!r}, this agent reads version {VERSION}")
    values: dict[str, Any] = content["values"]
    return values


def _whole(texts: dict[str, str]) -> str:
    """Raises OSError when that is more than the next agent would read."""
    values = ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items())
    if len(values) > LARGEST - 100:
        raise OSError(errno.EFBIG, f"more than {LARGEST >> 20} MiB to remember")
    return f'{{"version": {VERSION}, "values": {{{values}}}}}'
