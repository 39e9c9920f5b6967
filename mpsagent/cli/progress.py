"""What takes more than a second says so on a terminal: what it is at, and for how long. Nothing of it stays there."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

AFTER, EVERY = 1.0, 0.5
"""Seconds until it is said, and between two times."""


class Progress:
    """``with Progress("reading the log") as progress: … progress.at("counting")``. Written to stderr."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, what: str) -> None:
        """The next part."""
        self._what = what

    def __enter__(self) -> Progress:
        if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            self._thread = threading.Thread(target=self._say, args=(time.monotonic(),), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _say(self, began: float) -> None:
        wait, said = AFTER, False
        while not self._over.wait(wait):
            sys.stderr.write(f"\r{self._what[:60]} … {time.monotonic() - began:.0f} s\x1b[K")
            sys.stderr.flush()
            wait, said = EVERY, True
        if said:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
