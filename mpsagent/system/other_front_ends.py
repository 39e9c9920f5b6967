"""Front-ends that other people have left open: the control daemon listens to one at a time (scenarios X25 and X27)."""

from __future__ import annotations

import os
from pathlib import Path

SHOWN = 5


def other_front_ends(program: str) -> list[tuple[int, int]]:
    """pid and uid of processes that look like an open front-end, ours left out. For a message only: a command line says
    whatever its owner likes. Reads all of /proc, so run it in a thread."""
    import psutil  # rarely needed, and slow to load

    name, found = Path(program).name, list[tuple[int, int]]()
    for process in psutil.process_iter():
        try:
            words = process.cmdline()[:4]
            if not any(Path(word).name == name for word in words) or process.ppid() == os.getpid():
                continue
            if not any(word.startswith("-") and set(word) & set("dfM") for word in words[1:]):
                found.append((process.pid, process.uids().real))
        except psutil.Error:  # it has ended meanwhile
            continue
    return found[:SHOWN]
