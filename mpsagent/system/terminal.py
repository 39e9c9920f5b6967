"""One line on the terminal of a process, or in the file or pipe that is its standard error, written as the process's
user: never as root, never waiting.

The agent has no right to be another user. Under systemd a unit is the user, ``mpsagent-tell@UID.service``; without it a
process that is started by root gives all rights up before it opens anything of the user's. It writes where the
process's own stderr, stdout or stdin is a terminal, by /proc, so a terminal in a container or of tmux is the right one,
and the kernel says whether this user may. A file or pipe gets the line only if the order says so (a job of Slurm), and
only if it is the user's own, and a file that the process itself appends to: elsewhere the program's next output would
overwrite the line.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from mpsagent.linux import atomic_file
from mpsagent.linux.proc import real_gid, start_time
from mpsagent.linux.threads import in_thread
from mpsagent.system.control_unit import RUN_DIRECTORY, SystemBus
from mpsagent.system.spawn import run_program

DEADLINE = 5.0
LONGEST = 600
"""Letters of a line. With the encoding's 4 bytes each, a pipe takes it whole or not at all."""
STEP = 0.02
MOST, OF_ONE, AT_ONCE = 32, 4, 8
"""Lines of all users that wait to be written, of one user, and users whose lines are written at the same time. A line
is a courtesy: the lines of many users, or of one user whose terminal or file hangs (FUSE, a dead server of NFS), must
not keep the agent from anything else."""
SLOW, PAUSE = 2.0, 600.0
"""A user whose line took this many seconds gets no further line for this long. The kernel may keep a helper that waits
for a file system, even if it was killed."""
NOWHERE = "it has no terminal, and no file or pipe for such a line"
TERMINALS = frozenset({4, 5, *range(136, 144), 204, 229})
"""Major numbers of the devices that are opened: consoles and serial lines, /dev/tty and /dev/console, pseudo terminals,
serial lines of embedded systems, consoles of hypervisors (Linux, Documentation/admin-guide/devices.txt)."""


class Terminals:
    """``unit``: by systemd, which opens the file with the words for the helper."""

    _beside = asyncio.Semaphore(AT_ONCE)
    _waiting: ClassVar[dict[int, tuple[asyncio.Lock, int]]] = {}
    """Of each user: who writes, and how many lines there are."""
    _paused: ClassVar[dict[int, float]] = {}
    """Users whose last line was slow, and until when they get none."""

    def __init__(self, *, unit: bool, systemd: SystemBus | None = None, run_directory: str = RUN_DIRECTORY) -> None:
        self._systemd = systemd or SystemBus() if unit else None
        self._directory = Path(run_directory, "tell")

    async def tell(self, uid: int, pid: int, start: int, text: str, *, files: bool = False) -> str | None:
        """Write the lines of a user one after the other, whichever instance they are about: a user has one unit. Return
        why a line was not written, or None. ``files``: also into a file or pipe that is its standard error."""
        if uid == 0:
            return "root is told nothing"
        if time.monotonic() < self._paused.get(uid, 0.0):
            return f"this user's last line took more than {SLOW:g} s"
        waiting = self._waiting
        if sum(count for _, count in waiting.values()) >= MOST:
            return f"{MOST} lines wait to be written"
        lock, count = waiting.get(uid) or (asyncio.Lock(), 0)
        if count >= OF_ONE:
            return f"{OF_ONE} lines of this user wait to be written"
        waiting[uid] = lock, count + 1
        try:
            async with lock, self._beside:
                words = {"pid": pid, "start": start, "text": text, "files": files}
                begun = time.monotonic()
                try:
                    return await self._write(uid, json.dumps(words).encode())
                finally:
                    self._took(uid, time.monotonic() - begun)
        finally:
            waiting[uid] = lock, waiting[uid][1] - 1
            if not waiting[uid][1]:
                del waiting[uid]

    def _took(self, uid: int, seconds: float) -> None:
        now = time.monotonic()
        for other in [other for other, until in self._paused.items() if until <= now]:
            del self._paused[other]
        if seconds > SLOW:
            self._paused[uid] = now + PAUSE

    async def _write(self, uid: int, words: bytes) -> str | None:
        if self._systemd is not None:
            return await in_thread(_by_unit, self._systemd, self._directory, uid, words, deadline=DEADLINE)
        argv = [sys.executable, "-P", "-m", __name__, str(uid)]
        ended = await run_program(argv, _environment(), feed=words, deadline=DEADLINE)
        return None if ended.code == 0 else ended.problem or ended.err.strip()[-200:] or NOWHERE


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
        gid = real_gid(int(said["pid"]), uid)  # /proc asks for the same
        if gid is None:
            return 1  # the process has exited, or is another user's
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if 0 in os.getresuid() or os.geteuid() != uid:
        return 2
    return 0 if write(int(said["pid"]), int(said["start"]), str(said["text"]), files=bool(said["files"])) else 1


def write(pid: int, start: int, text: str, *, files: bool = False) -> bool:
    """Return whether a terminal, or with ``files`` the standard error, of the process has taken the line. A terminal
    that is stopped (Ctrl-S) or a pipe that is full takes none, and is not waited for."""
    line = "".join(one if one.isprintable() else "?" for one in text[:LONGEST])
    for number in (2, 1, 0):
        with suppress(OSError), _descriptor(pid, number) as place:
            if _is_terminal(place) and _put(place, pid, start, f"\r\nmpsagent: {line}\r\n", terminal=True):
                return True
    with suppress(OSError), _descriptor(pid, 2) as place:
        if files and _takes_lines(place, pid):
            return _put(place, pid, start, f"\nmpsagent: {line}\n")
    return False


@contextmanager
def _descriptor(pid: int, number: int) -> Iterator[int]:
    """Yield what a process has open under this number, as a place only: nothing is opened by that, so no device starts
    anything, and no file system is asked."""
    place = os.open(f"/proc/{pid}/fd/{number}", os.O_PATH)
    try:
        yield place
    finally:
        os.close(place)


def _is_terminal(place: int) -> bool:
    found = os.fstat(place)
    return stat.S_ISCHR(found.st_mode) and os.major(found.st_rdev) in TERMINALS


def _takes_lines(place: int, pid: int) -> bool:
    """Return whether standard error is a pipe or a file of this user alone, into which the process itself writes, and
    at the end if it is a file. Raises OSError."""
    found = os.fstat(place)
    with open(f"/proc/{pid}/fdinfo/2", "rb") as file:
        flags = next(int(row.split()[1], 8) for row in file.read(4096).splitlines() if row.startswith(b"flags:"))
    if found.st_uid != os.geteuid() or flags & os.O_ACCMODE == os.O_RDONLY:
        return False
    return stat.S_ISFIFO(found.st_mode) or (stat.S_ISREG(found.st_mode) and bool(flags & os.O_APPEND))


def _put(place: int, pid: int, start: int, line: str, *, terminal: bool = False) -> bool:
    """Open a place and write, if the process is still the one that it was. Raises OSError, for a FIFO without a reader,
    too."""
    out = os.open(f"/proc/self/fd/{place}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if start_time(pid) != start or (terminal and not os.isatty(out)):
            return False
        os.write(out, line.encode())
        return True
    finally:
        os.close(out)


if __name__ == "__main__":
    sys.exit(main())
