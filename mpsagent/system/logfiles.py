"""Following control.log and server.log.

MPS opens its logs once, for appending, and never again: after a rename the old file keeps growing, and only a daemon
that starts anew writes to a new file at the path. So a follower stays on the file that it has open and, beside it,
watches the path. Woken by inotify; a slow timer stands behind it. The directory may be hostile: regular files only, no
symbolic links, bounded steps.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from asyncinotify import Inotify, Mask

from mpsagent.linux.atomic_file import opened
from mpsagent.linux.backoff import Backoff
from mpsagent.linux.threads import in_thread
from mpsagent.system import log_heads

STEP = 64 << 10
"""Bytes read before the loop gets its turn: some 600 lines, 15 ms with their records."""
TAIL = 64
"""Bytes before the own position that must still be there: otherwise the file was truncated and has grown past it."""
FILES = 4
"""Open files of one log: the one at the path and older ones that are still written to."""
LINGER = 5.0
"""Seconds for which older files are still read after the newest got its first line (servers that are leaving)."""
DROPPING = 600.0
"""Seconds for taking the beginning of a log off the disk; it is not read meanwhile."""
DROP_AGAIN = 60.0
"""Seconds to the next attempt when that has failed."""
FIRST = 60.0
"""Seconds for finding where to begin, in a log that may have gigabytes; after that it is read from its beginning."""
CHECK = 5.0
"""Seconds between looks without any inotify event."""
RETRY_FIRST, RETRY_LAST = 0.1, 5.0
"""Seconds to the next attempt after a problem: doubling from one to the other."""

_DIRECTORY_MASK = Mask.CREATE | Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.DELETE_SELF | Mask.MOVE_SELF
_ABOVE_MASK = Mask.CREATE | Mask.MOVED_TO | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ATTRIB
_FILE_MASK = Mask.MODIFY | Mask.ATTRIB


class Chunk(NamedTuple):
    """Bytes of one file from ``offset`` on. ``fresh``: they do not continue this file's chunk before (first one, or the
    file was truncated). Each inode has its own sequence of chunks; two of them may alternate for a while."""

    data: bytes
    inode: int
    offset: int
    fresh: bool


class Position(NamedTuple):
    """Where a follower stands: for a checkpoint."""

    inode: int
    offset: int


class _File:
    """One open log file."""

    __slots__ = ("device", "dropping", "fd", "fresh", "inode", "offset", "tail")

    def __init__(self, fd: int, status: os.stat_result, offset: int = 0) -> None:
        self.fd = fd
        self.device = status.st_dev
        self.inode = status.st_ino
        self.offset = offset
        self.fresh = True
        self.dropping = False
        self.tail = os.pread(fd, min(TAIL, offset), offset - min(TAIL, offset)) if offset else b""

    def read(self) -> Chunk | None:
        """The next step, or None at the end of the file."""
        if self.dropping:
            return None
        size = os.fstat(self.fd).st_size
        if size < self.offset or (self.tail and size > self.offset and not self._same()):
            self.offset, self.tail, self.fresh = 0, b"", True
        if size == self.offset:
            return None
        data = os.pread(self.fd, STEP, self.offset)
        if not data:
            return None
        chunk = Chunk(data, self.inode, self.offset, self.fresh)
        self.offset += len(data)
        self.tail = (self.tail + data[-TAIL:])[-TAIL:]
        self.fresh = False
        return chunk

    def _same(self) -> bool:
        return os.pread(self.fd, len(self.tail), self.offset - len(self.tail)) == self.tail


class LogFollower:
    """Delivers what is appended to ``path``. ``on_problem`` hears why the log cannot be read, and None when it can
    again; one that does not exist yet is :attr:`missing`. ``first`` says, in a thread, where to begin in a file that is
    there at the start (None: at its beginning). Beyond ``most`` bytes its beginning goes, once it was read; ``on_long``
    hears why that cannot be done, or None."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        on_data: Callable[[Chunk], None],
        *,
        on_problem: Callable[[str | None], None] = lambda _: None,
        first: Callable[[int], int | None] | None = None,
        most: Callable[[], int] | None = None,
        on_long: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self.path = Path(path)
        self.missing = True
        self.problem: str | None = None
        self._on_data = on_data
        self._on_problem = on_problem
        self._first = first
        self._most = most
        self._on_long = on_long
        self._files: list[_File] = []
        self._inotify: Inotify | None = None
        self._watched: tuple[object, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._retry = Backoff(RETRY_FIRST, RETRY_LAST)
        self._pumping = False
        self._closed = False
        self._drops: set[asyncio.Task[None]] = set()
        self._drop_from = 0.0

    async def start(self) -> None:
        """Begins. What is there already is delivered in steps, beginning before this returns."""
        self._loop = asyncio.get_running_loop()
        with suppress(OSError):  # whatever is wrong now is found again, and reported, by the first look
            fd = opened(self.path)
            try:
                offset = await in_thread(self._first, fd, deadline=FIRST) if self._first is not None else 0
            except BaseException:
                os.close(fd)
                raise
            status = os.fstat(fd)
            self._files.append(_File(fd, status, min(offset or 0, status.st_size)))
        if not self._closed:
            self._look()
        elif self._files:
            self.close()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._drop_watches()
        for file in self._files:
            os.close(file.fd)
        self._files.clear()

    # --- looking -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Everything that may have to be done, in an order that misses nothing. Harmless when nothing has changed."""
        if self._closed:
            return
        problem = None
        try:
            self._find()
        except OSError as error:
            problem = f"{self.path}: {error.strerror}"
        for _ in range(4):  # again while the watches were out of date: something may have happened before they stood
            if not self._watch():
                break
            with suppress(OSError):
                self._find()
        problem = self._read() or problem
        if problem is None:
            self._retry.reset()
        if problem != self.problem:
            self.problem = problem
            self._on_problem(problem)
        self._schedule(problem is not None)

    def _schedule(self, problem: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._closed:
            return
        delay = self._retry.pause() if problem or self._inotify is None else CHECK
        self._timer = self._loop.call_later(delay, self._look)

    def _find(self) -> None:
        """Opens the file at the path if it is another one than the newest open file."""
        try:
            status = self.path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            self.missing = True
            return
        self.missing = False
        if self._files and (status.st_dev, status.st_ino) == (self._files[-1].device, self._files[-1].inode):
            return
        with suppress(FileNotFoundError):
            fd = opened(self.path)
            status = os.fstat(fd)
            for file in self._files:  # an older one was moved back
                if (file.device, file.inode) == (status.st_dev, status.st_ino):
                    os.close(fd)
                    self._files.remove(file)
                    self._files.append(file)
                    return
            self._files.append(_File(fd, status))
            while len(self._files) > FILES:
                self._retire()

    # --- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> bool:
        """Makes the watches fit what is open and what is there. True when they had to be changed."""
        above = self.path.parent
        while True:
            try:
                status = above.stat()
                break
            except OSError:
                if above == above.parent:
                    return False
                above = above.parent
        wanted = (status.st_dev, status.st_ino, str(above), *((file.device, file.inode) for file in self._files))
        if wanted == self._watched:
            return False
        self._drop_watches()
        inotify = None
        try:
            inotify = Inotify()
            os.set_blocking(inotify.fd, False)  # the library's NONBLOCK flag (4.4) is CLOEXEC by another name
            inotify.add_watch(above, _DIRECTORY_MASK if above == self.path.parent else _ABOVE_MASK)
            for file in self._files:
                inotify.add_watch(f"/proc/self/fd/{file.fd}", _FILE_MASK)  # the open file, whatever its name is now
        except OSError:  # out of instances or watches: the timer goes on alone
            if inotify is not None:
                inotify.close()
            return False
        self._inotify, self._watched = inotify, wanted
        self._loop.add_reader(inotify.fd, self._woken)
        return True

    def _drop_watches(self) -> None:
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
        self._inotify, self._watched = None, ()

    def _woken(self) -> None:
        """What the events say does not matter: a look finds out."""
        if self._inotify is not None:
            with suppress(BlockingIOError):
                os.read(self._inotify.fd, 64 << 10)
            self._look()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read(self) -> str | None:
        """One step of the oldest file that has something new; the rest in later turns of the loop."""
        for file in tuple(self._files):
            try:
                chunk = file.read()
            except OSError as error:
                return f"{self.path}: {error.strerror}"
            if chunk is None:
                self._shorten(file)
                continue
            if file is self._files[-1] and chunk.offset == 0 and len(self._files) > 1:
                self._loop.call_later(LINGER, self._let_go, file)
            if not self._pumping:
                self._pumping = True
                self._loop.call_soon(self._pump)
            self._deliver(chunk)
            break
        return None

    def _shorten(self, file: _File) -> None:
        """It was read to its end: drops its beginning when it has become too long."""
        if self._most is None or file.dropping or self._closed or self._loop.time() < self._drop_from:
            return
        length = log_heads.excess(file.fd, self._most(), file.offset)
        if length:
            file.dropping = True
            task = self._loop.create_task(self._drop(file, length))
            self._drops.add(task)
            task.add_done_callback(self._drops.discard)

    async def _drop(self, file: _File, length: int) -> None:
        problem = None
        try:
            descriptor = log_heads.writable(file.fd)
            if await in_thread(log_heads.drop, descriptor, length, deadline=DROPPING):
                file.offset = max(0, file.offset - length)
        except (OSError, TimeoutError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problem = f"{self.path} has more than its bound, and its beginning cannot be dropped: {why}"
            self._drop_from = self._loop.time() + DROP_AGAIN
        self._on_long(problem)
        file.dropping = False
        self._look()

    def _deliver(self, chunk: Chunk) -> None:
        try:
            self._on_data(chunk)
        except Exception as error:  # a mistake in a parser must not end the reading
            text = f"{self.path}: {len(chunk.data)} bytes at {chunk.offset} could not be taken in"
            self._loop.call_exception_handler({"message": text, "exception": error})

    def _pump(self) -> None:
        self._pumping = False
        if not self._closed and self._read() is not None:
            self._look()

    def _let_go(self, newest: _File) -> None:
        """Closes the files older than ``newest``: a new daemon writes, and what the old one had to say is read."""
        if newest in self._files and not self._closed:
            while self._files[0] is not newest:
                self._retire()
            self._look()

    def _retire(self) -> None:
        """Reads the oldest file to its end (16 steps at most) and closes it."""
        file = self._files.pop(0)
        try:
            for _ in range(16):
                chunk = file.read()
                if chunk is None:
                    break
                self._deliver(chunk)
        except OSError as error:
            self._on_problem(f"{self.path} (an older file, inode {file.inode}): {error.strerror}")
        finally:
            os.close(file.fd)


# --- where to begin --------------------------------------------------------------------------------------------------

START_MARKER = b"Starting control daemon using socket"
_STAMP = re.compile(rb"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) ", re.MULTILINE)


def at_position(position: Position) -> Callable[[int], int | None]:
    """For ``first``: go on from a checkpoint if it is about this very file and the file has not become shorter."""

    def find(fd: int) -> int | None:
        status = os.fstat(fd)
        return position.offset if status.st_ino == position.inode and status.st_size >= position.offset else None

    return find


def find_start(fd: int, marker: bytes = START_MARKER, *, limit: int = 1 << 30) -> int | None:
    """Offset of the last line ``[… Control PID] marker…``, looking back over at most ``limit`` bytes; None without one.

    The text has to stand right behind the prefix: what a user sends as a command is logged too (``Cmd:…``).
    """
    line = re.compile(rb"^\[\d{4}-\d\d-\d\d [\d:.]{12} Control +\d+\] " + re.escape(marker), re.MULTILINE)
    keep = len(marker) + 80  # a line's beginning may lie across two blocks
    end = os.fstat(fd).st_size
    floor = max(0, end - limit)
    carried = b""
    while end > floor:
        begin = max(floor, end - STEP)
        block = os.pread(fd, end - begin, begin) + carried
        # Whether the block's first byte begins a line is known from the byte before it.
        inside = begin > 0 and os.pread(fd, 1, begin - 1) != b"\n"
        # `in` is a hundred times as fast as the pattern, and most blocks of a long log have no such line.
        matches = line.finditer(block) if marker in block else iter(())
        found = [match.start() for match in matches if match.start() > 0 or not inside]
        if found:
            return begin + found[-1]
        carried = block[:keep]
        end = begin
    return None


def line_near_end(fd: int, limit: int) -> int:
    """Offset of the first line that begins in the last ``limit`` bytes."""
    at = max(0, os.fstat(fd).st_size - limit)
    if at:
        found = os.pread(fd, STEP, at - 1).find(b"\n")
        at += STEP if found < 0 else found
    return at


def find_time(fd: int, stamp: str, low: int = 0) -> int:
    """Offset of the first line from ``low`` on whose time is ``stamp`` or later (``2026-11-20 23:56:21.414``, as MPS
    writes it); the size of the file when there is none. By bisection: the times are taken to be in order."""
    wanted, size = stamp.encode(), os.fstat(fd).st_size
    high = size
    while low < high:
        middle = (low + high) // 2
        line = _first_stamp(fd, middle, high)
        if line is None or line[1] >= wanted:
            high = middle
        else:
            low = line[0] + 1
    line = _first_stamp(fd, low, size)
    return size if line is None else line[0]


def _first_stamp(fd: int, begin: int, end: int) -> tuple[int, bytes] | None:
    """The first line with a time that begins at or behind ``begin`` and before ``end``: its offset and the time."""
    at = begin
    while at < end:
        block = os.pread(fd, 8192, at)
        if not block:
            return None
        for match in _STAMP.finditer(block):
            inside = match.start() == 0 and at > 0 and os.pread(fd, 1, at - 1) != b"\n"
            if not inside and at + match.start() < end:
                return at + match.start(), match[1]
        if len(block) < 8192:
            return None
        at += len(block) - 32  # a time may lie across two blocks
    return None
