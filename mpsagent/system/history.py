"""Everything that happened, numbered: in memory for those who follow, on disk for those who ask later.

A record is seen by followers only when it is on disk, so after a SIGKILL the numbers go on where the disk ends and no
follower has seen one of them with another meaning. Only while the disk takes nothing (full, read-only) records are
shown all the same, and written later.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mpsagent.system.threads import in_thread

NAME = "history.jsonl"
FILE_SIZE = 16 << 20
"""Bytes after which a file is put aside."""
KEPT_FILES = 4
WRITE_STEP = 64 << 10
"""Bytes written before the loop gets its turn."""
SLOW = 5.0
"""Seconds after which a write that has not come back is said to be a problem."""
CLOSE_DEADLINE = 2.0
FOREVER = 10.0**9
LONGEST_RECORD = 16 << 10
"""Bytes of a line; longer fields are cut."""
RETRY_FIRST, RETRY_LAST = 1.0, 30.0

Record = dict[str, object]


class History:
    """The last ``capacity`` records in memory, all of them (about 80 MiB) under ``directory``, if there is one.

    ``on_problem`` is called with a sentence when the disk takes nothing, and with None when it does again.
    :attr:`notes` says what was found amiss at the start.
    """

    def __init__(
        self,
        directory: str | None,
        capacity: int = 10_000,
        *,
        on_problem: Callable[[str | None], None] = lambda _: None,
    ) -> None:
        self.problem: str | None = None
        self.notes: list[str] = []
        self.lost = 0
        """Records that never reached the disk because it took nothing for more than ``capacity`` records."""
        self._path = Path(directory, NAME) if directory is not None else None
        self._capacity = capacity
        self._on_problem = on_problem
        self._records: deque[Record] = deque(maxlen=capacity)
        self._pending: deque[tuple[int, bytes]] = deque()
        self._last = 0
        self._shown = 0
        self._fd = -1
        self._size = 0
        self._cut = False  # the first of the pending lines is the rest of one that the disk has taken in part
        self._retry = RETRY_FIRST
        self._scheduled: asyncio.Handle | None = None
        self._writing: asyncio.Task[None] | None = None
        self._in_flight = 0
        """Records at the head of ``_pending`` that a thread is writing just now."""
        self._landed: int | OSError | None = None
        self._disk = threading.Lock()
        self._closed = False  # a step that its thread has not begun by now is never begun
        self._waiters: set[asyncio.Future[None]] = set()
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
        """Number of the oldest record in memory; a reader with an older cursor has missed what is before it."""
        return _number(self._records[0]) if self._records else self._last + 1

    def append(self, kind: str, at: float, **fields: object) -> int:
        """Adds a record and returns its number. Never raises for the disk's sake."""
        self._last += 1
        record: Record = {"seq": self._last, "at": at, "kind": kind, **fields}
        line = _line(record)
        if len(line) > LONGEST_RECORD:
            short = {key: value[:200] if isinstance(value, str) else value for key, value in record.items()}
            line = _line(short)
            record = short if len(line) <= LONGEST_RECORD else {"seq": self._last, "at": at, "kind": kind, "cut": True}
            line = _line(record)
        self._records.append(record)
        if self._path is None:
            self._show(self._last)
            return self._last
        self._pending.append((self._last, line))
        if len(self._pending) > self._capacity:
            del self._pending[max(self._in_flight, 1 if self._cut else 0)]
            self.lost += 1
        if self.problem is not None:
            self._show(self._last)
        if self._scheduled is None and self._writing is None:
            self._schedule(0 if self.problem is None else self._retry)
        return self._last

    def since(self, cursor: int, limit: int = 1000) -> list[Record]:
        """At most ``limit`` records behind number ``cursor``, oldest first."""
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
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
            if not self._disk.acquire(timeout=CLOSE_DEADLINE):
                return  # the disk does not answer: what it has of this is not known
            self._closed = True
            self._disk.release()
            if self._landed is not None:
                self._account()
        while self._pending:
            self._put(self._batch())
            if not self._account():
                break
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # --- writing -----------------------------------------------------------------------------------------------------

    def _schedule(self, delay: float) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # without a loop there is nothing to hold up
            while self._pending:
                self._put(self._batch())
                if not self._account():
                    break
            return
        self._scheduled = loop.call_later(delay, self._flush) if delay else loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = None
        self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """One step, in a thread: a busy disk may hold a write up for longer than there is time to arm."""
        step = asyncio.ensure_future(in_thread(self._put_in_thread, self._batch(), deadline=FOREVER))
        done, _ = await asyncio.wait({step}, timeout=SLOW)
        if not done:
            self._report(f"{self._path}: the disk does not answer; the last records are only in memory")
            self._show(self._last)
        try:
            await step
        except TimeoutError:  # no thread to be had
            self._in_flight, well = 0, False
        else:
            well = self._account()
        self._writing = None
        if well:
            self._retry = RETRY_FIRST
            if self._pending:
                self._schedule(0)
        else:
            self._schedule(self._retry)
            self._retry = min(self._retry * 2, RETRY_LAST)

    def _batch(self) -> bytes:
        """The next step's bytes: whole records, or the rest of one that a full disk has cut."""
        data = bytearray()
        self._in_flight = 0
        for _, line in self._pending:
            if data and len(data) + len(line) > WRITE_STEP:
                break
            data += line
            self._in_flight += 1
        return bytes(data)

    def _put_in_thread(self, data: bytes) -> None:
        with self._disk:
            if not self._closed:
                self._put(data)

    def _put(self, data: bytes) -> None:
        """Blocks. Leaves what came of it in ``_landed``."""
        assert self._path is not None
        try:
            if self._fd >= 0 and self._size >= FILE_SIZE and not self._cut:
                self._rotate(self._path)
            if self._fd < 0:
                self._open(self._path)
            self._landed = os.write(self._fd, data)
        except OSError as error:
            self._landed = error

    def _account(self) -> bool:
        """What the last step has brought. False when the disk takes nothing."""
        landed, self._landed, self._in_flight = self._landed, None, 0
        if not isinstance(landed, int):
            why = landed.strerror if landed is not None else "no answer"
            self._report(f"{self._path}: {why}; the last {len(self._pending)} records are only in memory")
            self._show(self._last)
            return False
        self._written(landed)
        self._report(None)
        return True

    def _written(self, count: int) -> None:
        """The disk has taken ``count`` bytes; a full one takes a part of a line."""
        self._size += count
        while count:
            number, line = self._pending[0]
            self._cut = count < len(line)
            if self._cut:
                self._pending[0] = (number, line[count:])
                return
            count -= len(line)
            self._pending.popleft()
            self._show(number)

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640)
        self._size = os.fstat(self._fd).st_size

    def _rotate(self, path: Path) -> None:
        os.close(self._fd)
        self._fd = -1
        for number in range(KEPT_FILES - 1, 0, -1):
            with suppress(FileNotFoundError):
                _old(path, number).replace(_old(path, number + 1))
        path.replace(_old(path, 1))

    def _show(self, number: int) -> None:
        if number > self._shown:
            self._shown = number
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _report(self, problem: str | None) -> None:
        changed = (problem is None) != (self.problem is None)
        self.problem = problem
        if changed:
            self._on_problem(problem)

    # --- reading at the start ----------------------------------------------------------------------------------------

    def _load(self, path: Path) -> None:
        """The newest ``capacity`` records, from as many files as that takes."""
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._mend(path)
        except OSError as error:
            self.problem = f"{path}: {error.strerror}; the history is only in memory"
            self._on_problem(self.problem)
        found: list[list[Record]] = []
        count = 0
        for file in (path, *(_old(path, number) for number in range(1, KEPT_FILES + 1))):
            if count >= self._capacity:
                break
            try:
                found.append(self._read(file))
            except FileNotFoundError:
                continue
            except OSError as error:
                self.notes.append(f"{file}: {error.strerror}")
            else:
                count += len(found[-1])
        for records in reversed(found):
            for record in records:
                number = _number(record)
                if number > self._last:
                    self._records.append(record)
                    self._last = number

    def _mend(self, path: Path) -> None:
        """Cuts off a last line that a crash has left unfinished."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            size = end = os.fstat(fd).st_size
            while end:
                tail = os.pread(fd, min(end, WRITE_STEP), max(0, end - WRITE_STEP))
                end -= len(tail) - (tail.rfind(b"\n") + 1)
                if b"\n" in tail or not tail:
                    break
            torn = size - end
            if torn:
                os.ftruncate(fd, end)
                self.notes.append(f"{path}: an unfinished last line of {torn} bytes was cut off")
        finally:
            os.close(fd)

    def _read(self, path: Path) -> list[Record]:
        records: deque[Record] = deque(maxlen=self._capacity)
        bad = 0
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            for line in deque(file, maxlen=self._capacity):
                try:
                    record = json.loads(line)
                    if not isinstance(record["seq"], int) or not isinstance(record["kind"], str):
                        raise ValueError("not a record")
                except (ValueError, KeyError, TypeError):
                    bad += 1
                else:
                    records.append(record)
        if bad:
            self.notes.append(f"{path}: {bad} lines are no records and were left out")
        return list(records)


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _number(record: Record) -> int:
    number = record["seq"]
    return number if isinstance(number, int) else 0


def _line(record: Record) -> bytes:
    return json.dumps(record, default=str, separators=(",", ":")).encode() + b"\n"
