"""The history as an SQLite file: records by number, and the sums of each user, job and day. Every call blocks.

In write-ahead mode and without a flush for each commit: what was written outlives the death of the agent, and a crash
of the machine costs at most the last records, never the file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, fields
from datetime import datetime, timedelta
from datetime import time as midnight
from pathlib import Path
from typing import Any, NamedTuple

from mpsagent.system.accounts import Accounts, Job, Sums, divide, job_of, user_of

NAME = "history.db"
VERSION = 3
"""``PRAGMA user_version``. No release had another one."""
SCHEMA = """
    CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
    CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
    CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
    CREATE TABLE days (
        day TEXT NOT NULL, uid INTEGER NOT NULL, gpu REAL NOT NULL, waited REAL NOT NULL, longest REAL NOT NULL,
        clients INTEGER NOT NULL, "left" INTEGER NOT NULL, refused INTEGER NOT NULL, faults INTEGER NOT NULL,
        forced INTEGER NOT NULL, turns INTEGER NOT NULL, paused REAL NOT NULL, PRIMARY KEY (day, uid)
    ) WITHOUT ROWID;
    CREATE TABLE working (pid INTEGER PRIMARY KEY, uid INTEGER NOT NULL, busy REAL NOT NULL);
    CREATE TABLE job_days (
        day TEXT NOT NULL, job TEXT NOT NULL, uid INTEGER NOT NULL, gpu REAL NOT NULL, waited REAL NOT NULL,
        longest REAL NOT NULL, clients INTEGER NOT NULL, "left" INTEGER NOT NULL, refused INTEGER NOT NULL,
        faults INTEGER NOT NULL, forced INTEGER NOT NULL, turns INTEGER NOT NULL, threads REAL NOT NULL,
        memory INTEGER NOT NULL, paused REAL NOT NULL, PRIMARY KEY (day, job, uid)
    ) WITHOUT ROWID;
    CREATE TABLE job_working (pid INTEGER PRIMARY KEY, job TEXT NOT NULL, uid INTEGER NOT NULL, busy REAL NOT NULL);
"""
BUSY = 5.0
"""Seconds that a write waits for another program that holds the file."""
TRIMMED = 2000
"""Records that are removed at a time."""
WAL = 16 << 20
"""Bytes; a longer write-ahead log is cut again."""
PATIENCE = 5.0
"""Seconds that a question may take."""
MOST_JOBS = 1000
"""Jobs in a report: those of the last days."""
_COLUMNS = [field.name for field in fields(Sums)]
_LARGEST = frozenset({"longest", "threads", "memory"})
"""Of several rows the largest counts; of the others the sum."""
_PASSING = ("FULL", "IOERR", "BUSY", "LOCKED", "READONLY", "CANTOPEN", "PERM", "AUTH", "NOMEM", "INTERRUPT", "PROTOCOL")
"""SQLite's errors that say nothing against the file itself."""

Record = dict[str, object]


class Unusable(Exception):
    """The file is not one that this agent may use or understands. The text says why."""


class Row(NamedTuple):
    """A record as it is stored; ``fields`` is JSON."""

    seq: int
    at: float
    kind: str
    uid: int | None
    pid: int | None
    fields: str


def row(record: Record) -> Row:
    """Raises TypeError or ValueError for what cannot be written."""
    rest = dict(record)
    seq, at, kind = rest.pop("seq"), rest.pop("at"), rest.pop("kind")
    uid, pid = (rest.pop(name) if _whole(rest.get(name)) else None for name in ("uid", "pid"))
    text = json.dumps(rest, default=str, separators=(",", ":"))
    return Row(seq, at, kind, uid, pid, text)  # type: ignore[arg-type]


def record(found: Sequence[Any]) -> Record:
    """Of the columns of a Row."""
    seq, at, kind, uid, pid, text = found
    who = {name: value for name, value in (("uid", uid), ("pid", pid)) if value is not None}
    return {"seq": seq, "at": at, "kind": kind, **who, **json.loads(text)}


def _whole(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def local_day(at: float) -> tuple[str, float]:
    """The day on this machine, and when it ends."""
    day = datetime.fromtimestamp(at).date()
    return day.isoformat(), datetime.combine(day + timedelta(days=1), midnight()).timestamp()


class Query(NamedTuple):
    """Records that are asked for: ``after`` this number, of a user, of a process, of kinds that begin so, of a time in
    seconds since the epoch; the ``limit`` newest, or, with ``after``, the oldest."""

    after: int | None = None
    limit: int = 1000
    uid: int | None = None
    pid: int | None = None
    kind: str | None = None
    since: float | None = None
    until: float | None = None


class Database:
    """An open file. Raises OSError, sqlite3.Error, or Unusable where it must not be used as it is."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        _judge(path)
        self._connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
            self.oldest, self.last = 1, 0
            self._accounts: tuple[Accounts[int], Accounts[Job]] | None = None
            self._load()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def newest(self, count: int) -> list[Record]:
        """At most ``count`` records, oldest first."""
        found = self._connection.execute("SELECT * FROM records ORDER BY seq DESC LIMIT ?", (count,)).fetchall()
        return [record(one) for one in reversed(found)]

    def write(self, records: Sequence[tuple[Row, Record]]) -> None:
        """All or nothing; what is there already is passed over."""
        users, jobs = self._accounts or self._load()
        records = [one for one in records if one[0].seq > self.last]
        if not records:
            return
        try:
            with self._transaction():
                self._connection.executemany("INSERT INTO records VALUES (?,?,?,?,?,?)", [one for one, _ in records])
                for _, one in records:
                    users.take(one)
                    jobs.take(one)
                self._put_away(users, jobs)
        except BaseException:
            self._accounts = None  # what it has counted may not be on disk: all is read again
            raise
        if not self.last:
            self.oldest = records[0][0].seq
        self.last = records[-1][0].seq

    def trim(self, now: float, keep: float, size: int) -> bool:
        """Removes some of the oldest records if they are older than ``keep`` seconds, or if the file has more than
        ``size`` bytes; the last one stays, because of its number. Sums of jobs go with the records, those of users with
        their time. True when there may be more to remove."""
        pages, free, page = (self._pragma(name) for name in ("page_count", "freelist_count", "page_size"))
        large = (pages - free) * page > size
        step = min(self.oldest + TRIMMED, self.last)
        cutoff = now - keep
        with self._transaction():
            removed = self._connection.execute(
                "DELETE FROM records WHERE seq < ? AND (? OR at < ?)", (step, large, cutoff)
            ).rowcount
            self._connection.execute("DELETE FROM days WHERE day < ?", (local_day(max(0.0, cutoff))[0],))
            if removed:
                self.oldest, at = self._connection.execute(
                    "SELECT seq, at FROM records ORDER BY seq LIMIT 1"
                ).fetchone()
                self._connection.execute("DELETE FROM job_days WHERE day < ?", (local_day(at)[0],))
        if large or pages * page > size:
            self._connection.executescript("PRAGMA incremental_vacuum(2000)")  # execute() would free one page
        return removed > 0

    def _prepare(self) -> None:
        """Settings, and the schema of today."""
        version = self._pragma("user_version")
        if version not in (0, VERSION):
            raise Unusable(f"it has version {version}, this agent knows {VERSION}")
        if version == 0:
            self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", f"journal_size_limit={WAL}"):
            self._connection.execute(f"PRAGMA {setting}").fetchall()
        if version == 0:
            with self._transaction():
                for statement in filter(str.strip, SCHEMA.split(";")):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version={VERSION}")

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _load(self) -> tuple[Accounts[int], Accounts[Job]]:
        """What the file says."""
        ask = self._connection.execute
        newest = ask("SELECT at, seq FROM records ORDER BY seq DESC LIMIT 1").fetchone()
        at, self.last = newest or (0.0, 0)
        self.oldest = ask("SELECT min(seq) FROM records").fetchone()[0] or 1
        users = [(pid, uid, busy) for pid, uid, busy in ask("SELECT pid, uid, busy FROM working")]
        jobs = [
            (pid, Job(job, uid), busy) for pid, job, uid, busy in ask("SELECT pid, job, uid, busy FROM job_working")
        ]
        self._accounts = (
            Accounts(
                local_day, user_of, {pid: uid for pid, uid, _ in users}, {uid: busy for _, uid, busy in users}, at
            ),
            Accounts(local_day, job_of, {pid: job for pid, job, _ in jobs}, {job: busy for _, job, busy in jobs}, at),
        )
        return self._accounts

    def _put_away(self, users: Accounts[int], jobs: Accounts[Job]) -> None:
        self._add("days", ["uid"], [((day, uid), astuple(sums)) for (day, uid), sums in users.sums.items()])
        none = (0.0, 0)
        rows = [((day, *job), (*astuple(sums), *jobs.limits.get((day, job), none)))
                for (day, job), sums in jobs.sums.items()]  # fmt: skip
        self._add("job_days", ["job", "uid"], rows, "threads", "memory")
        for accounts in (users, jobs):
            accounts.sums.clear()
            accounts.limits.clear()
        if users.changed:
            self._connection.execute("DELETE FROM working")
            working = [(pid, uid, users.busy[uid]) for pid, uid in users.working.items()]
            self._connection.executemany("INSERT INTO working VALUES (?,?,?)", working)
        if jobs.changed:
            self._connection.execute("DELETE FROM job_working")
            of_jobs = [(pid, *job, jobs.busy[job]) for pid, job in jobs.working.items()]
            self._connection.executemany("INSERT INTO job_working VALUES (?,?,?,?)", of_jobs)
        users.changed = jobs.changed = False

    def _add(
        self, table: str, key: Sequence[str], rows: Sequence[tuple[tuple[Any, ...], tuple[Any, ...]]], *more: str
    ) -> None:
        """Sums of a day and ``key`` to those that there are."""
        sums = [*_COLUMNS, *more]
        names = ", ".join(f'"{name}"' for name in ("day", *key, *sums))
        added = ", ".join(
            f'"{name}"=max("{name}", excluded."{name}")' if name in _LARGEST else f'"{name}"="{name}"+excluded."{name}"'
            for name in sums
        )
        marks = ",".join("?" * (1 + len(key) + len(sums)))
        text = f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT DO UPDATE SET {added}"  # noqa: S608 - our own words
        self._connection.executemany(text, [(*whose, *values) for whose, values in rows])


def _judge(path: Path) -> None:
    """Makes an empty file where there is none, for the agent alone to write."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640))
    except FileExistsError:
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise Unusable("it is not a plain file") from None
        if status.st_uid != os.geteuid() or mode & 0o022:
            raise Unusable(f"others could have written it (owner {status.st_uid}, mode {mode:04o})") from None


def is_broken(error: Exception) -> bool:
    """Whether the file itself is of no use, and not only a disk or another program in the way."""
    name = str(getattr(error, "sqlite_errorname", "")).removeprefix("SQLITE_")
    return not name.startswith(_PASSING)


def set_aside(path: Path) -> Path:
    """Gives a file that cannot be used another name; the new one. Raises OSError."""
    aside = path.with_name(f"{path.name}.broken-{time.time_ns() // 1_000_000}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        beside = path.with_name(path.name + suffix)
        if beside.exists():
            beside.rename(aside.with_name(aside.name + suffix))
    return aside


def salvage(path: Path, count: int) -> list[Record]:
    """What can still be read of the newest records, without touching the file."""
    found: list[Record] = []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?immutable=1", uri=True)) as connection:
            for one in connection.execute("SELECT * FROM records ORDER BY seq DESC LIMIT ?", (count,)):
                found.append(record(one))
    except (sqlite3.Error, ValueError, TypeError):
        pass
    return found[::-1]


# --- questions: each on a connection of its own, while another thread may write ---------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Raises TimeoutError when an answer takes longer than PATIENCE, OSError when there is none."""
    end = time.monotonic() + PATIENCE
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=PATIENCE)) as connection:
            connection.set_progress_handler(lambda: time.monotonic() > end, 20_000)
            yield connection
    except sqlite3.Error as error:
        if time.monotonic() > end:
            raise TimeoutError(f"{path}: the question takes longer than {PATIENCE:g} s") from None
        raise OSError(0, str(error), str(path)) from error


_WANTED = {
    "after": "seq > {}",
    "uid": "uid = {}",
    "pid": "pid = {}",
    "kind": "substr(kind, 1, length({0})) = {0}",
    "since": "at >= {}",
    "until": "at < {}",
}


def find(path: Path, query: Query) -> list[Record]:
    """Oldest first."""
    values = {name: value for name, value in query._asdict().items() if value is not None}
    where = " AND ".join(_WANTED[name].format(f":{name}") for name in values if name in _WANTED)
    order = "DESC" if query.after is None else "ASC"
    text = f"SELECT * FROM records WHERE {where or 'true'} ORDER BY seq {order} LIMIT :limit"  # noqa: S608 - our own words
    with _reading(path) as connection:
        found = [record(one) for one in connection.execute(text, values)]
    return found if order == "ASC" else found[::-1]


def report(path: Path, first: str, last: str, by: str, now: float) -> list[Record]:
    """Sums of the days from ``first`` to ``last`` (YYYY-MM-DD), ``by`` "uid" or "day", and of what is under way."""
    assert by in ("uid", "day")
    with _reading(path) as connection:
        text = f"SELECT {by}, {_sums(_COLUMNS)} FROM days WHERE day BETWEEN ? AND ? GROUP BY {by}"  # noqa: S608 - as above
        found: dict[Any, Sums] = {key: Sums(*sums) for key, *sums in connection.execute(text, (first, last))}
        busy = connection.execute("SELECT DISTINCT uid, busy FROM working").fetchall()
    for uid, since in busy:
        for day, seconds in divide(since, now, local_day):
            if first <= day <= last:
                found.setdefault(uid if by == "uid" else day, Sums()).gpu += seconds
    return [{by: key, **dict(zip(_COLUMNS, astuple(sums), strict=True))} for key, sums in sorted(found.items())]


def report_jobs(path: Path, first: str, last: str, job: str | None, now: float) -> list[Record]:
    """The same for each job, or those of one name, of the last days first, at most MOST_JOBS. ``threads``, ``memory``:
    the most that one of its clients had: percent, and bytes on a device (0: no limit, or none was let in)."""
    columns = [*_COLUMNS, "threads", "memory"]
    one, values = ("", [first, last]) if job is None else (" AND job = ?", [first, last, job])
    with _reading(path) as connection:
        text = (
            f"SELECT job, uid, {_sums(columns)} FROM job_days WHERE day BETWEEN ? AND ?{one}"  # noqa: S608 - as above
            f" GROUP BY job, uid ORDER BY max(day) DESC, job DESC LIMIT {MOST_JOBS}"
        )
        found = [{"job": row[0], "uid": row[1], **dict(zip(columns, row[2:], strict=True))}
                 for row in connection.execute(text, values)]  # fmt: skip
        busy = connection.execute("SELECT DISTINCT job, uid, busy FROM job_working").fetchall()
    spent = {(name, uid): sum(seconds for day, seconds in divide(since, now, local_day) if first <= day <= last)
             for name, uid, since in busy}  # fmt: skip
    for row in found:
        row["gpu"] += spent.get((row["job"], row["uid"]), 0.0)
    return found


def _sums(columns: Sequence[str]) -> str:
    return ", ".join(f'{"max" if name in _LARGEST else "sum"}("{name}")' for name in columns)
