"""What a few processes did, by the kernel's word: when each stood in a system call that cannot be interrupted (state D,
as in the driver), was stopped, or had gone. It shows for whom others waited: mpsagent, MPS or the driver."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

EVERY = 0.05
MOST = 150
"""Lines of a process."""


class Followed:
    """`whom`: names and pids, asked again and again, because more come. A line for each change, and its time."""

    def __init__(self, whom: Callable[[], Mapping[str, int]]) -> None:
        self.whom = whom
        self.lines: list[tuple[float, str]] = []
        self.gone: dict[str, float] = {}
        self.stuck: dict[str, float] = {}
        """Seconds in which a thread of it was in state D."""
        self._last: dict[str, str] = {}
        self._count: dict[str, int] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ending.set()
        self._thread.join(10)

    def _run(self) -> None:
        known: dict[str, int] = {}
        asked = before = 0.0
        while not self._ending.wait(EVERY):
            now = time.monotonic()
            if now - asked > 0.25:
                asked = now
                with contextlib.suppress(OSError, ValueError, KeyError):
                    known |= self.whom()
            for name, pid in known.items():
                if name in self.gone:
                    continue
                what = how(pid)
                if "D" in what.split(" ")[0] and before:
                    self.stuck[name] = self.stuck.get(name, 0.0) + now - before
                if what == "gone":
                    self.gone[name] = now
                if what != self._last.get(name, "") and self._count.setdefault(name, 0) < MOST:
                    self._last[name] = what
                    self._count[name] += 1
                    self.lines.append((now, f"{name} ({pid}): {what or 'runs or sleeps'}"))
            before = now


def how(pid: int) -> str:
    """Its threads' states without those that run or sleep, and where in the kernel those in state D are."""
    states, places, ended = [], [], 0
    task = Path(f"/proc/{pid}/task")
    try:
        threads = os.listdir(task)
    except OSError:
        return "gone"
    for one in threads:
        with contextlib.suppress(OSError, IndexError):
            state = (task / one / "stat").read_text().rpartition(")")[2].split()[0]
            ended += state in "ZX"
            if state not in "RSIZX":
                states.append(state)
            if state == "D":
                places.append((task / one / "wchan").read_text())
    if ended == len(threads):
        return "gone"
    return " ".join(["".join(sorted(states)), *sorted(set(places))]).strip()
