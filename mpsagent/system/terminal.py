"""One line on the terminal of a process, written as the process's user: never as root, never waiting.

The agent has no right to be another user. Under systemd a unit is the user, ``mpsagent-tell@UID.service``; without it a
process that is started by root gives all rights up before it opens anything of the user's. It writes where the
process's own stderr, stdout or stdin is a terminal, by /proc, so a terminal in a container or of tmux is the right one,
and the kernel says whether this user may.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from mpsagent.linux import atomic_file
from mpsagent.linux.proc import ids, start_time
from mpsagent.linux.threads import in_thread
from mpsagent.system.control_unit import RUN_DIRECTORY, SystemBus
from mpsagent.system.spawn import run_program

DEADLINE = 5.0
LONGEST = 400
STEP = 0.02
MOST, OF_ONE, AT_ONCE = 32, 4, 8
"""Lines of all users that wait to be written, of one user, and users whose lines are written beside each other. A line
is a courtesy: those of many users, or of one whose terminal hangs (FUSE), must keep the agent from nothing else."""


class Terminals:
    """``unit``: by systemd, which opens the file with the words for the helper."""

    _beside = asyncio.Semaphore(AT_ONCE)
    _waiting: ClassVar[dict[int, tuple[asyncio.Lock, int]]] = {}
    """Of each user: who writes, and how many lines there are."""

    def __init__(self, *, unit: bool, systemd: SystemBus | None = None, run_directory: str = RUN_DIRECTORY) -> None:
        self._systemd = systemd or SystemBus() if unit else None
        self._directory = Path(run_directory, "tell")

    async def tell(self, uid: int, pid: int, start: int, text: str) -> str | None:
        """Of a user one after the other, whichever instance it is about: a user has one unit. Why it was not told, or
        None."""
        if uid == 0:
            return "root is told nothing"
        waiting = self._waiting
        if sum(count for _, count in waiting.values()) >= MOST:
            return f"{MOST} lines wait to be written"
        lock, count = waiting.get(uid) or (asyncio.Lock(), 0)
        if count >= OF_ONE:
            return f"{OF_ONE} lines of this user wait to be written"
        waiting[uid] = lock, count + 1
        try:
            async with lock, self._beside:
                return await self._write(uid, json.dumps({"pid": pid, "start": start, "text": text}).encode())
        finally:
            waiting[uid] = lock, waiting[uid][1] - 1
            if not waiting[uid][1]:
                del waiting[uid]

    async def _write(self, uid: int, words: bytes) -> str | None:
        if self._systemd is not None:
            return await in_thread(_by_unit, self._systemd, self._directory, uid, words, deadline=DEADLINE)
        argv = [sys.executable, "-P", "-m", __name__, str(uid)]
        ended = await run_program(argv, _environment(), feed=words, deadline=DEADLINE)
        return None if ended.code == 0 else ended.problem or ended.err.strip()[-200:] or "it has no terminal"


def _environment() -> Mapping[str, str]:
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PATH": os.defpath, "LANG": "C.UTF-8", **kept}


def _by_unit(systemd: SystemBus, directory: Path, uid: int, words: bytes) -> str | None:
    unit, file = f"mpsagent-tell@{uid}.service", directory / str(uid)
    directory.mkdir(mode=0o700, exist_ok=True)
    atomic_file.write(file, words)
    until = time.monotonic() + DEADLINE  # the thread ends, too, whatever systemd says
    try:
        systemd.start(unit)
        while (state := systemd.state(unit)).job or state.active in ("activating", "deactivating"):
            if time.monotonic() > until:
                return f"{unit} did not end within {DEADLINE:g} s"
            time.sleep(STEP)
    finally:
        with suppress(OSError):
            file.unlink()
    return None if state.active == "inactive" else f"{unit} has {state.active}"


# --- the helper -------------------------------------------------------------------------------------------------------


def main() -> int:
    """``mpsagent-tell UID``, with the words on stdin."""
    uid, said = int(sys.argv[1]), json.loads(os.read(0, 4096))
    if os.geteuid() == 0 and uid > 0:
        groups = ids(int(said["pid"]), b"Gid:")  # /proc asks for the same
        if not groups:
            return 1  # the process has exited
        gid = groups[0]
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if 0 in os.getresuid() or os.geteuid() != uid:
        return 2
    return 0 if write(int(said["pid"]), int(said["start"]), str(said["text"])) else 1


def write(pid: int, start: int, text: str) -> bool:
    """Whether a terminal of the process has taken the line. One that is stopped (Ctrl-S) takes none, and is not waited
    for."""
    line = "".join(one if one.isprintable() else "?" for one in text[:LONGEST])
    for number in (2, 1, 0):
        with suppress(OSError):
            terminal = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            try:
                if os.isatty(terminal) and start_time(pid) == start:
                    os.write(terminal, f"\r\nmpsagent: {line}\r\n".encode())
                    return True
            finally:
                os.close(terminal)
    return False


if __name__ == "__main__":
    sys.exit(main())
