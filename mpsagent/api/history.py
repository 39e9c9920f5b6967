"""Everything that happened, numbered: in memory for those who follow, in a database for those who ask later.

A record is seen by followers only when it is on disk, so after a SIGKILL the numbers go on where the disk ends and no
follower has seen one of them with another meaning. Only while the disk takes nothing (full, read-only) records are
shown all the same, and written later. A database that is broken is set aside, and a new one goes on with the numbers.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mpsagent.api import database
from mpsagent.api.database import NAME, Database, Record, RecordRow, Unusable, session_row
from mpsagent.core.sessions import Key, Sessions
from mpsagent.linux.backoff import Backoff
from mpsagent.linux.threads import in_thread

T = TypeVar("T")
Written = tuple[RecordRow, Sequence[tuple[Any, ...]]]
"""A record, and the sessions that it changes."""

WRITE_STEP = 1000
"""Records of one transaction."""
TRIM_EVERY = 500
"""Records after which it is looked whether old ones have to go."""
BELIEVED = 3600.0
"""Seconds after the api's start until it goes by the wall clock in what is too old. After a boot the clock may be
months ahead until a time server has been reached, and the agent goes on with the time of its own start."""
SLOW = 5.0
"""Seconds after which a write that has not come back is said to be a problem."""
CLOSE_DEADLINE = 2.0
FOREVER = 10.0**9
LARGEST = 1 << 30
"""Bytes of the file. The oldest records go first, then sessions."""
LONGEST_RECORD = 16 << 10
"""Bytes of a record; longer fields are cut."""
RETRY_FIRST, RETRY_LAST = 1.0, 30.0
QUESTIONS = 4
"""How many are answered from the database at a time; others wait for their turn."""


class History:
    """The last ``capacity`` records in memory; all of the last ``keep`` seconds, at most ``LARGEST`` bytes, under
    ``directory``, if there is one. :attr:`problem`: why the disk takes nothing; :attr:`notes`: what was found amiss."""

    def __init__(self, directory: str | None, capacity: int = 10_000) -> None:
        self.problem: str | None = None
        self.notes: list[str] = []
        self.keep = FOREVER
        self.lost = 0
        """Records that never reached the disk because it took nothing for more than ``capacity`` records."""
        self._began = time.monotonic()
        self._path = Path(directory, NAME).absolute() if directory is not None else None
        self._capacity = capacity
        self._records: deque[Record] = deque(maxlen=capacity)
        self._pending: deque[Written] = deque()
        self.sessions = Sessions()
        self._settled: list[tuple[Any, ...]] = []
        self._last = 0
        self._shown = 0
        self._database: Database | None = None
        self._retry = Backoff(RETRY_FIRST, RETRY_LAST)
        self._writing: asyncio.Task[None] | None = None
        self._in_flight = 0
        """Records at the head of ``_pending`` that a thread is writing just now."""
        self._landed: int | Exception | None = None
        self._disk = threading.Lock()
        self._closed = False  # a step that its thread has not begun by now is never begun
        self._waiters: set[asyncio.Future[None]] = set()
        self._questions = asyncio.Semaphore(QUESTIONS)
        if self._path is not None:
            self._load(self._path)
            self._shown = self._last

    @property
    def newest(self) -> int:
        """Number of the newest record that may be seen; 0 before the first."""
        return self._shown

    @property
    def last(self) -> int:
        """Number of the last record, whether it may be seen yet or not."""
        return self._last

    @property
    def oldest(self) -> int:
        """Number of the oldest record that is kept; a reader with an older cursor has missed what is before it."""
        if self._database is not None and self._database.last:
            return min(int(self._database.oldest), self.in_memory)
        return self.in_memory

    @property
    def in_memory(self) -> int:
        """Number of the oldest record in memory."""
        return _number(self._records[0]) if self._records else self._last + 1

    def append(self, kind: str, at: float, **fields: object) -> int:
        """Adds a record and returns its number. Never raises for the disk's sake."""
        number = self._last + 1
        record: Record = {"seq": number, "at": at, "kind": kind, **fields}
        row = database.row(record)
        if len(row.fields) > LONGEST_RECORD:
            record = {key: value[:200] if isinstance(value, str) else value for key, value in record.items()}
            row = database.row(record)
        if len(row.fields) > LONGEST_RECORD:
            record = {"seq": number, "at": at, "kind": kind, "cut": True}
            row = database.row(record)
        self._last = number
        self._records.append(record)
        changed = self.sessions.take(record)
        if self._path is None:
            self._show(self._last)
            return self._last
        self._pending.append((row, [*map(session_row, changed), *self._settled]))
        self._settled.clear()
        if len(self._pending) > self._capacity:
            del self._pending[self._in_flight]
            self.lost += 1
        if self.problem is not None:
            self._show(self._last)
        if self._writing is None:
            try:
                self._writing = asyncio.get_running_loop().create_task(self._write())
            except RuntimeError:  # without a loop there is nothing to hold up
                self._write_now()
        return self._last

    def settle(self, there: Collection[Key], at: float) -> None:
        """Sessions that are not there have ended, although no record says so; written with the next record."""
        self._settled += map(session_row, self.sessions.settle(there, at))
        del self._settled[: -self._capacity]

    def since(self, cursor: int, limit: int = 1000) -> list[Record]:
        """At most ``limit`` records behind number ``cursor``, oldest first, as far as they are in memory."""
        if cursor >= self._shown:
            return []
        found = []
        for record in reversed(self._records):  # followers ask for the newest few
            number = _number(record)
            if number <= cursor:
                break
            if number <= self._shown:
                found.append(record)
        return found[: -limit - 1 : -1]

    async def ask(self, question: Callable[[Path], T]) -> T:
        """The file, in a thread: it has what is written so far. Raises OSError when there is none, TimeoutError when it
        takes too long."""
        path = self._path
        if path is None:
            raise OSError(0, "the history is only in memory: mpsagent-api was started without a state directory")
        async with asyncio.timeout(2 * database.PATIENCE), self._questions:
            return await in_thread(lambda: question(path), deadline=2 * database.PATIENCE)

    async def wait(self, cursor: int) -> None:
        """Returns as soon as there is a record behind number ``cursor``."""
        while self._shown <= cursor:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def close(self) -> None:
        """Writes what is left, if the disk takes it."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
            if not self._disk.acquire(timeout=CLOSE_DEADLINE):
                return  # the disk does not answer: what it has of this is not known
            self._closed = True
            self._disk.release()
            if self._landed is not None:
                self._account()
        self._write_now()
        if self._database is not None:
            with suppress(OSError, sqlite3.Error):
                self._database.save([*self._settled, *map(session_row, self.sessions.open.values())])
            self._database.close()
            self._database = None

    # --- writing -----------------------------------------------------------------------------------------------------

    def _write_now(self) -> None:
        while self._pending:
            self._put(self._batch())
            if not self._account():
                break

    async def _write(self) -> None:
        """In steps until all is written, each in a thread: a busy disk may hold a write up for longer than there is
        time to answer."""
        while self._pending:
            if self.problem is not None:
                await asyncio.sleep(self._retry.pause())
            step = asyncio.ensure_future(in_thread(self._put_in_thread, self._batch(), deadline=FOREVER))
            done, _ = await asyncio.wait({step}, timeout=SLOW)
            if not done:
                self.problem = f"{self._path}: the disk does not answer; the last records are only in memory"
                self._show(self._last)
            with suppress(TimeoutError):  # no thread to be had
                await step
            if self._account():
                self._retry.reset()
        self._writing = None

    def _batch(self) -> Sequence[Written]:
        """What the next step writes."""
        self._in_flight = min(WRITE_STEP, len(self._pending))
        return [self._pending[number] for number in range(self._in_flight)]

    def _put_in_thread(self, batch: Sequence[Written]) -> None:
        with self._disk:
            if not self._closed:
                self._put(batch)

    def _put(self, batch: Sequence[Written]) -> None:
        """Blocks. Leaves what came of it in ``_landed``."""
        assert self._path is not None
        try:
            try:
                self._write_to(self._path, batch)
            except (Unusable, sqlite3.Error, ValueError) as error:
                if not database.is_broken(error):
                    raise
                self._set_aside(self._path, error)
                self._write_to(self._path, batch)
            self._landed = len(batch)
        except (OSError, sqlite3.Error, Unusable, ValueError) as error:
            self._landed = error

    def _write_to(self, path: Path, batch: Sequence[Written]) -> None:
        if self._database is None:
            opened = Database(path)
            if opened.last >= batch[0][0].seq:  # it could not be read when the agent was started
                opened.close()
                raise Unusable("it has other records with the same numbers")
            self._database = opened
        self._database.write(batch)
        if batch[-1][0].seq // TRIM_EVERY != (batch[0][0].seq - 1) // TRIM_EVERY:
            believed = time.monotonic() >= self._began + BELIEVED
            now = min(batch[-1][0].at, time.time()) if believed else 0.0
            with suppress(sqlite3.OperationalError):  # later, then
                self._database.trim(now, self.keep, LARGEST)

    def _account(self) -> bool:
        """What the last step has brought. False when the disk takes nothing."""
        landed, self._landed, self._in_flight = self._landed, None, 0
        if not isinstance(landed, int):
            why = "no answer" if landed is None else getattr(landed, "strerror", None) or landed
            self.problem = f"{self._path}: {why}; the last {len(self._pending)} records are only in memory"
            self._show(self._last)
            return False
        for _ in range(landed):
            self._show(self._pending.popleft()[0].seq)
        self.problem = None
        return True

    def _show(self, number: int) -> None:
        if number > self._shown:
            self._shown = number
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    # --- at the start ------------------------------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        """The newest ``capacity`` records, and where the numbers go on."""
        found: list[Record] = []
        try:
            try:
                found = self._open(path)
            except (Unusable, sqlite3.Error, ValueError) as error:
                found = [] if isinstance(error, Unusable) else database.salvage(path, self._capacity)
                if not database.is_broken(error):
                    raise
                self._set_aside(path, error)
                self._open(path)
        except (OSError, sqlite3.Error, Unusable, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self.problem = f"{path}: {why}; the history is only in memory"
        self._records.extend(found)
        self.sessions.last = float(str(found[-1]["at"])) if found else 0.0
        self._last = max(self._last, _number(found[-1]) if found else 0)

    def _open(self, path: Path) -> list[Record]:
        self._database = Database(path)
        self._last, self.sessions = self._database.last, Sessions(self._database.sessions())
        return self._database.newest(self._capacity)

    def _set_aside(self, path: Path, why: Exception) -> None:
        """Raises OSError when that cannot be done."""
        if self._database is not None:
            with suppress(sqlite3.Error):
                self._database.close()
            self._database = None
        aside = database.set_aside(path)
        self.notes.append(f"{path} was not used any more: {why}; it is {aside} now, and a new one was begun")


def _number(record: Record) -> int:
    number = record["seq"]
    return number if isinstance(number, int) else 0
