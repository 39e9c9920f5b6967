"""Tells when a process opens a GPU: inotify on the device files, and the use count of NVIDIA's module.

Every CUDA program opens nvidia-uvm when it begins, and the GPU's own file again for each context; nvidia-smi and other
watchers open the latter too. Device files that a container has made for itself have another inode, which is not
watched: the module's count sees them. Nothing is read while no GPU is opened, but that one number.
"""

from __future__ import annotations

import asyncio
import os
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from asyncinotify import Inotify, Mask

PAUSE = 0.5
"""Seconds from an event until it is told, and so between two: a process may open the file in a loop."""
BLIND = 10
COUNT = "/sys/module/nvidia_uvm/refcnt"
_EVENT = struct.Struct("iIII")
"""The head of an inotify event: watch, mask, cookie, length of the name behind it."""
_CERTAIN = re.compile(r"nvidia-uvm")
_LIKELY = re.compile(r"nvidia\d+")


class DeviceWatch:
    """``opened()`` is called within ``PAUSE`` of an open, in the loop in which it was made. ``ours()``: it may be us
    who open the GPU's own file. While nothing can be watched, ``opened()`` is called every ``BLIND`` looks."""

    def __init__(
        self, directory: str, opened: Callable[[], None], ours: Callable[[], bool], count: str = COUNT
    ) -> None:
        self._directory = Path(directory)
        self._opened = opened
        self._ours = ours
        self._count_file = count
        self._count = self._read_count()
        self._loop = asyncio.get_running_loop()
        self._inotify: Inotify | None = None
        self._likely: frozenset[int] = frozenset()
        """Watches that our own helper may set off."""
        self._above = -1
        """The watch of the directory."""
        self._timer: asyncio.TimerHandle | None = None
        self._blind = 0
        self.problem: str | None = None
        """Why opens are not seen at once."""
        self._begin()

    def _begin(self) -> None:
        """Watch the device files that there are now, and the directory for more of them: the driver may be loaded
        later."""
        self._end()
        self.problem, self._blind = None, 0
        try:
            if not self._directory.is_dir():  # on a simulated machine
                return
            inotify = self._inotify = Inotify()
            os.set_blocking(inotify.fd, False)
            self._above = inotify.add_watch(self._directory, Mask.CREATE | Mask.MOVED_TO).wd
            likely = []
            for path in self._directory.iterdir():
                if _CERTAIN.fullmatch(path.name) or _LIKELY.fullmatch(path.name):
                    watch = inotify.add_watch(path, Mask.OPEN)
                    likely += [watch.wd] if _LIKELY.fullmatch(path.name) else []
            self._likely = frozenset(likely)
            self._loop.add_reader(inotify.fd, self._woken)
        except OSError as error:  # out of instances or watches
            self._end()
            self.problem = f"{self._directory} cannot be watched: {error.strerror}"

    def _woken(self) -> None:
        """Not heard again until the pause is over, whatever happens meanwhile."""
        if self._inotify is None:
            return
        which = self._read(self._inotify)
        if self._above in which:
            self._begin()
        if not (which <= self._likely and self._ours()):
            self._tell()
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._loop.call_later(PAUSE, self._listen, self._inotify)

    def _listen(self, inotify: Inotify) -> None:
        if inotify is self._inotify:
            self._loop.add_reader(inotify.fd, self._woken)

    def _read(self, inotify: Inotify) -> set[int]:
        """The watches of the events that lie there; what is left of very many comes next time."""
        with suppress(BlockingIOError):
            data, which, at = os.read(inotify.fd, 64 << 10), set(), 0
            while at < len(data):
                watch, _, _, length = _EVENT.unpack_from(data, at)
                which.add(watch)
                at += _EVENT.size + length
            return which
        return set()

    def _tell(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(PAUSE, self._told)

    def _told(self) -> None:
        self._timer = None
        self._opened()

    def look(self) -> None:
        """Every second: whether the module is used more than before."""
        before, self._count = self._count, self._read_count()
        if self._count > before:
            self._tell()
        if self.problem is not None:
            self._blind += 1
            if self._blind >= BLIND:
                self._begin()
                self._tell()

    def _read_count(self) -> int:
        with suppress(OSError, ValueError), open(self._count_file, "rb", buffering=0) as file:
            return int(file.read(32))
        return 0

    def _end(self) -> None:
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None

    def close(self) -> None:
        self._end()
        if self._timer is not None:
            self._timer.cancel()
