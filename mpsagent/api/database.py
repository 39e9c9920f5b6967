"""The history as an SQLite file: records by number, and what they tell as sessions. Every call blocks.

In write-ahead mode and without a flush for each commit: what was written outlives the death of the agent, and a crash
of the machine costs at most the last records, never the file.
"""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields
from datetime import date, datetime, timedelta
from datetime import time as midnight
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mpsagent.api.sums import SUMS, USED, add
from mpsagent.core.model import Use
from mpsagent.core.sessions import Session, Sessions, how, with_use
from mpsagent.core.transitions import START_AND_EXIT

NAME = "history.db"
VERSION, BEFORE = 4, 3
"""``PRAGMA user_version``, and that of a file without sessions, which are made from its records."""
SCHEMA = """
    CREATE TABLE records (
        seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, uid INTEGER, pid INTEGER, fields TEXT NOT NULL
    );
    CREATE INDEX records_uid ON records (uid) WHERE uid IS NOT NULL;
    CREATE INDEX records_pid ON records (pid) WHERE pid IS NOT NULL;
    CREATE TABLE sessions (
        number INTEGER PRIMARY KEY, kind TEXT NOT NULL, instance TEXT, uid INTEGER, pid INTEGER NOT NULL,
        came REAL NOT NULL, passed REAL, ended REAL, outcome TEXT, why TEXT, job TEXT, more TEXT NOT NULL
    );
    CREATE INDEX sessions_kind ON sessions (kind, uid, passed, ended);
    CREATE INDEX sessions_open ON sessions (number) WHERE ended IS NULL;
"""
BUSY = 5.0
"""Seconds that a write waits for another program that holds the file."""
TRIMMED = 2000
"""Records and sessions that are removed at a time."""
WAL = 16 << 20
"""Bytes; a longer write-ahead log is cut again."""
PATIENCE = 5.0
"""Seconds that a question may take."""
MOST_JOBS = 1000
"""Jobs in a report: those of the last days."""
_SAVE = f"INSERT OR REPLACE INTO sessions VALUES ({','.join('?' * len(fields(Session)))})"  # noqa: S608 - our own words
_PASSING = ("FULL", "IOERR", "BUSY", "LOCKED", "READONLY", "CANTOPEN", "PERM", "AUTH", "NOMEM", "INTERRUPT", "PROTOCOL")
"""SQLite's errors that say nothing against the file itself."""

Record = dict[str, object]


class Unusable(Exception):
    """The file is not one that this agent may use or understands. The text says why."""


class RecordRow(NamedTuple):
    """A record as it is stored; ``fields`` is JSON."""

    seq: int
    at: float
    kind: str
    uid: int | None
    pid: int | None
    fields: str


def row(record: Record) -> RecordRow:
    """Raises TypeError or ValueError for what cannot be written."""
    rest = dict(record)
    seq, at, kind = rest.pop("seq"), rest.pop("at"), rest.pop("kind")
    uid, pid = (rest.pop(name) if _whole(rest.get(name)) else None for name in ("uid", "pid"))
    text = json.dumps(rest, default=str, separators=(",", ":"))
    return RecordRow(seq, at, kind, uid, pid, text)  # type: ignore[arg-type]


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
    return day.isoformat(), _begins(day + timedelta(days=1))


def _begins(day: date) -> float:
    day = min(max(day, date(1970, 1, 1)), date(9999, 12, 30))  # what time stamps can say
    return datetime.combine(day, midnight()).timestamp()


def session_row(one: Session) -> tuple[Any, ...]:
    """As it is stored."""
    return (*(getattr(one, part.name) for part in fields(one)[:-1]), json.dumps(one.more, separators=(",", ":")))


def session(found: Sequence[Any]) -> Session:
    one = Session(*found)
    one.more = json.loads(found[-1])
    return one


class Query(NamedTuple):
    """Records or sessions that are asked for: ``after`` this number, of a user, of a process, of kinds that begin so
    (several, with commas), of a time in seconds since the epoch; the ``limit`` newest, or, with ``after``, the
    oldest."""

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
            newest = self._connection.execute("SELECT max(seq), min(seq) FROM records").fetchone()
            self.last, self.oldest = newest[0] or 0, newest[1] or 1
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def newest(self, count: int) -> list[Record]:
        """At most ``count`` records, oldest first."""
        found = self._connection.execute("SELECT * FROM records ORDER BY seq DESC LIMIT ?", (count,)).fetchall()
        return [record(one) for one in reversed(found)]

    def sessions(self) -> list[Session]:
        """Those that have not ended; and of each instance the last change of user and the last fault."""
        last = "SELECT max(number) FROM sessions WHERE kind"
        change = "json_type(more, '$.before') IS NOT NULL AND json_extract(more, '$.before') IS NOT uid"
        text = (
            f"SELECT * FROM sessions WHERE ended IS NULL OR number IN ({last} = 'fault' GROUP BY instance)"  # noqa: S608
            f" OR number IN ({last} = 'turn' AND {change} GROUP BY instance) ORDER BY number"
        )
        return list(map(session, self._connection.execute(text)))

    def write(self, records: Sequence[tuple[RecordRow, Sequence[tuple[Any, ...]]]]) -> None:
        """Each with the sessions that it changes. All or nothing; what is there already is passed over."""
        records = [one for one in records if one[0].seq > self.last]
        if not records:
            return
        with self._transaction():
            self._connection.executemany("INSERT INTO records VALUES (?,?,?,?,?,?)", [one for one, _ in records])
            self._connection.executemany(_SAVE, [row for _, changed in records for row in changed])
        if not self.last:
            self.oldest = records[0][0].seq
        self.last = records[-1][0].seq

    def save(self, sessions: Iterable[tuple[Any, ...]]) -> None:
        with self._transaction():
            self._connection.executemany(_SAVE, sessions)

    def trim(self, now: float, keep: float, size: int) -> bool:
        """Remove some of the oldest records and sessions that are older than ``keep`` seconds. If the file has more
        than ``size`` bytes, remove records, or sessions if there are more of these, of the user who has most: no user
        pushes out another user's. The last record stays, because of its number. Return whether there may be more to
        remove."""
        pages, free, page = (self._pragma(name) for name in ("page_count", "freelist_count", "page_size"))
        large = (pages - free) * page > size
        ask, cutoff = self._connection.execute, now - keep
        step = min(self.oldest + TRIMMED, self.last)
        with self._transaction():
            count = ask("DELETE FROM records WHERE seq < ? AND at < ?", (step, cutoff)).rowcount
            oldest = f"SELECT number FROM sessions{{}} ORDER BY number LIMIT {TRIMMED}"  # noqa: S608
            old = ask(f"DELETE FROM sessions WHERE ended < ? AND number IN ({oldest.format('')})", (cutoff,))  # noqa: S608
            count += old.rowcount
            if large:
                users = ask("SELECT count(*), uid FROM records WHERE uid IS NOT NULL GROUP BY uid").fetchall()
                if sum(one for one, _ in users) < ask("SELECT count(*) FROM sessions").fetchone()[0]:
                    most = " WHERE uid IS (SELECT uid FROM sessions GROUP BY uid ORDER BY count(*) DESC LIMIT 1)"
                    gone = ask(f"DELETE FROM sessions WHERE ended > 0 AND number IN ({oldest.format(most)})")  # noqa: S608
                    count += gone.rowcount
                else:
                    count += self._trim_records(*max(users, default=(0, None)))
            self.oldest = ask("SELECT coalesce(min(seq), ?) FROM records", (self.oldest,)).fetchone()[0]
        if large or pages * page > size:
            self._connection.executescript("PRAGMA incremental_vacuum(2000)")  # execute() would free one page
        return count > 0

    def _trim_records(self, count: int, uid: int | None) -> int:
        """Remove the oldest records of the user who has most, and return their number. Those of programs that started
        and exited go first. If no user has many, the oldest records of all go."""
        if count < TRIMMED:
            wheres, uid = ["true"], None
        else:
            kinds = ",".join(f"'{kind}'" for kind in sorted(START_AND_EXIT))
            ordinary = f"kind IN ({kinds}) AND coalesce(json_extract(fields, '$.outcome'), 'ok') = 'ok'"
            wheres = [f"uid = :uid AND {ordinary}", "uid = :uid"]
        for where in wheres:
            oldest = f"SELECT seq FROM records WHERE seq < :last AND {where} ORDER BY seq LIMIT {TRIMMED}"  # noqa: S608
            values = {"last": self.last, "uid": uid}
            gone = self._connection.execute(f"DELETE FROM records WHERE seq IN ({oldest})", values).rowcount  # noqa: S608
            if gone:
                return gone
        return 0

    def _prepare(self) -> None:
        """Settings, and the schema of today."""
        version = self._pragma("user_version")
        if version not in (0, BEFORE, VERSION):
            raise Unusable(f"it has version {version}, this agent knows {VERSION}")
        if version == 0:
            self._connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for setting in ("journal_mode=WAL", "synchronous=NORMAL", f"journal_size_limit={WAL}"):
            self._connection.execute(f"PRAGMA {setting}").fetchall()
        if version != VERSION:
            with self._transaction():
                for statement in filter(str.strip, SCHEMA.split(";")):
                    if version == 0 or "sessions" in statement:
                        self._connection.execute(statement)
                if version == BEFORE:
                    self._rebuild()
                self._connection.execute(f"PRAGMA user_version={VERSION}")

    def _rebuild(self) -> None:
        for table in ("days", "working", "job_days", "job_working"):
            self._connection.execute(f"DROP TABLE {table}")
        found = Sessions()
        for one in self._connection.execute("SELECT * FROM records ORDER BY seq"):
            self._connection.executemany(_SAVE, list(map(session_row, found.take(record(one)))))

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


_WANTED = {"after": "{} > :after", "uid": "uid = :uid", "pid": "pid = :pid"}
_IN_TIME = {
    "records": {"since": "at >= :since", "until": "at < :until"},
    "sessions": {"since": "(ended IS NULL OR ended >= :since)", "until": "came < :until"},
}


def find(path: Path, query: Query) -> list[Record]:
    """Oldest first."""
    return list(map(record, _found(path, "records", "seq", query)))


def sessions(path: Path, query: Query) -> list[Session]:
    """Those of which a part lies in the time, in the order of their beginning."""
    return list(map(session, _found(path, "sessions", "number", query)))


def _found(path: Path, table: str, number: str, query: Query) -> list[tuple[Any, ...]]:
    values = {name: value for name, value in query._asdict().items() if value is not None}
    where = [text.format(number) for name, text in {**_WANTED, **_IN_TIME[table]}.items() if name in values]
    kinds = {f"kind{at}": kind for at, kind in enumerate((query.kind or "").split(","))}
    where.append(f"({' OR '.join(f'substr(kind, 1, length(:{name})) = :{name}' for name in kinds)})")
    order = "DESC" if query.after is None else "ASC"
    text = f"SELECT * FROM {table} WHERE {' AND '.join(where)} ORDER BY {number} {order} LIMIT :limit"  # noqa: S608 - our own words
    with _reading(path) as connection:
        found = connection.execute(text, {**values, **kinds}).fetchall()
    return found if order == "ASC" else found[::-1]


_LEFT = "passed IS NULL AND outcome = 'left'"
_HAPPENED: dict[str, dict[str, str]] = {
    "passed": {
        "waited": "sum(passed - came)", "longest": "max(passed - came)",
        "clients": "sum(kind = 'client')", "turns": "sum(kind = 'turn')",
    },
    "ended": {
        "waited": f"sum(iif({_LEFT}, ended - came, 0))", "longest": f"max(iif({_LEFT}, ended - came, 0))",
        "left": f"sum({_LEFT})", "refused": "sum(outcome = 'refused')",
        "faults": "sum(outcome = 'faulted')", "forced": "sum(kind = 'client' AND outcome = 'ended')",
    },
}  # fmt: skip
"""What is counted at the time when a session got the GPU, or ended."""
_LIMITS = {
    "threads": "max(json_extract(more, '$.limits.threads'))",
    "memory": "max((SELECT max(value) FROM json_each(more, '$.limits.memory')))",
}
_AT_WORK = """
    SELECT json_array({key}), max(passed, :begin), min(coalesce(ended, :now), :end) FROM sessions
    WHERE kind = '{kind}' AND passed < :end AND coalesce(ended, :now) > :begin AND {whose} ORDER BY 1, passed
"""
_USE = """
    SELECT number, uid, job, passed, coalesce(ended, :now), more FROM sessions
    WHERE kind = 'client' AND passed < :end AND coalesce(ended, :now) > :begin AND {whose}
"""
_LAST = """
    SELECT uid, job, outcome, json_extract(more, '$.rule'), max(coalesce(ended, :now + 1)) FROM sessions
    WHERE kind = 'client' AND came < :end AND coalesce(ended, :now) >= :begin AND {whose} GROUP BY uid, job
"""
"""Of each job the client that ended last, or has not (SQLite takes the other columns from the row with the maximum)."""
_JOBS = """
    CREATE TEMP TABLE jobs AS SELECT uid, job FROM sessions
    WHERE kind = 'client' AND job IS NOT NULL AND came < :end AND coalesce(ended, :now) >= :begin
    GROUP BY uid, job ORDER BY max(coalesce(ended, :now + 1)) DESC LIMIT :most
"""
"""Those that the report is about: of a year with 670,000 jobs it took 791 MB, and the api has 256."""


def report(
    path: Path, first: str, last: str, by: str, now: float, job: str | None = None,
    live: Mapping[int, Use] = MappingProxyType({}),
) -> list[Record]:  # fmt: skip
    """Sums of the days from ``first`` to ``last`` (YYYY-MM-DD), ``by`` "uid", "day" or "job" (of one name, or at most
    MOST_JOBS, the last ones first). Time with the GPU is that with a client at work, however many, without pauses.
    ``threads``, ``memory``: the most that one of a job's clients had: percent, and bytes on a device, 0: no limit.
    ``ended``: how the last of a job's clients did (:func:`mpsagent.core.sessions.how`). ``live``: by session, what it
    has used and is not on record yet. What a client used on several days is divided by time."""
    whose = "true" if by != "job" else "(uid, job) IN jobs" if job is None else "job = :job"
    begins, ends = _begins(date.fromisoformat(first)), local_day(_begins(date.fromisoformat(last)))[1]
    values = {"begin": begins, "end": ends, "now": now, "job": job, "most": MOST_JOBS}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}

    def of(*key: Any) -> dict[str, Any]:
        if key not in found:
            found[key] = {**dict.fromkeys((*SUMS, *USED), 0), "at": 0.0, "threads": 0.0, "memory": 0}
        return found[key]

    owner = "uid, job" if by == "job" else "uid"
    with _reading(path) as connection:
        if by == "job" and job is None:
            connection.execute(_JOBS, values)
        for at, counted in _HAPPENED.items():
            wanted = {**counted, "at": f"max({at})"}
            if by == "job" and at == "passed":
                wanted |= _LIMITS
            key = f"date({at}, 'unixepoch', 'localtime')" if by == "day" else owner
            text = (
                f"SELECT {', '.join(wanted.values())}, {key} FROM sessions"  # noqa: S608 - our own words
                f" WHERE +kind IN ('client', 'turn') AND {at} >= :begin AND {at} < :end AND {whose} GROUP BY {key}"
            )
            for row in connection.execute(text, values):
                happened = {name: value or 0 for name, value in zip(wanted, row, strict=False)}
                add(of(*row[len(wanted) :]), happened, wanted)
        pauses: dict[str, list[tuple[float, float]]] = {}
        for where, begin, end in _stretches(
            connection.execute(_AT_WORK.format(key="uid, instance", kind="pause", whose="true"), values)
        ):
            pauses.setdefault(where, []).append((begin, end))
        users = {json.loads(where)[0] for where in pauses}
        key, every = ("uid, job", "uid, instance, job") if by == "job" else ("uid", "uid, instance")
        present = _stretches(connection.execute(_AT_WORK.format(key=key, kind="client", whose=whose), values))
        for who, day, begin, end in _by_day(present) if by == "day" else ((*one[:1], "", *one[1:]) for one in present):
            row = of(day) if by == "day" else of(*json.loads(who))
            row["paused" if json.loads(who)[0] in users else "gpu"] += end - begin
        there = _stretches(connection.execute(_AT_WORK.format(key=every, kind="client", whose=whose), values))
        parts = sorted(part for one in there if json.loads(one[0])[0] in users for part in _working(one, pauses))
        busy = _stretches(parts)
        for who, day, begin, end in _by_day(busy) if by == "day" else ((*one[:1], "", *one[1:]) for one in busy):
            row = of(day) if by == "day" else of(*json.loads(who))
            row["gpu"] += end - begin
            row["paused"] -= end - begin
        for number, uid, name, since, until, text in connection.execute(_USE.format(whose=whose), values):
            more = _with_live(json.loads(text), live.get(number))
            spans: Iterable[tuple[Any, str, float, float]] = [(uid, "", max(since, begins), min(until, ends))]
            for _, day, begin, end in _by_day([(uid, *one[2:]) for one in spans]) if by == "day" else spans:
                row = of(day) if by == "day" else of(uid, name) if by == "job" else of(uid)
                for column in ("counted", "busy", "energy"):
                    row[column] += more.get(column, 0) * ((end - begin) / (until - since) if until > since else 1)
                row["memory_used"] = max(row["memory_used"], more.get("memory", 0))
                row["shared"] = max(row["shared"], more.get("shared", False))
        lasts = connection.execute(_LAST.format(whose=whose), values) if by == "job" else ()
        ended = {(uid, name): how(outcome, rule) for uid, name, outcome, rule, _ in lasts}
    if by != "job":
        return [{by: one, **{name: found[one,][name] for name in (*SUMS, *USED)}} for (one,) in sorted(found)]
    jobs = sorted(found, key=lambda one: (found[one]["at"], one[1]), reverse=True)
    columns = (*SUMS, *USED, "threads", "memory", "ended")
    for who in jobs:
        found[who]["ended"] = ended.get(who, "unknown")
    return [{"job": one[1], "uid": one[0], **{name: found[one][name] for name in columns}} for one in jobs]


def _with_live(more: dict[str, Any], use: Use | None) -> dict[str, Any]:
    return more if use is None else with_use(more, use.seconds, use.busy, use.energy, use.shared)


def _stretches(rows: Iterable[tuple[Any, float, float]]) -> Iterator[tuple[Any, float, float]]:
    """Those of one owner that overlap are one. ``rows``: whose, begin, end, in this order."""
    whose, begin, end = None, 0.0, -1.0
    for owner, start, until in rows:
        if start > end or owner != whose:
            if whose is not None:
                yield whose, begin, end
            whose, begin, end = owner, start, until
        elif until > end:
            end = until
    if whose is not None:
        yield whose, begin, end


def _working(
    stretch: tuple[str, float, float], pauses: Mapping[str, Sequence[tuple[float, float]]]
) -> Iterator[tuple[str, float, float]]:
    """Yield the parts of a stretch at one instance in which its user was not paused there, without the instance."""
    (uid, instance, *job), begin, end = json.loads(stretch[0]), *stretch[1:]
    who = json.dumps([uid, *job])
    spans = pauses.get(json.dumps([uid, instance], separators=(",", ":"), ensure_ascii=False), ())
    for since, until in spans[bisect_right(spans, begin, key=lambda one: one[1]) :]:
        if since >= end:
            break
        if since > begin:
            yield who, begin, since
        begin = until
    if begin < end:
        yield who, begin, end


def _by_day(stretches: Iterable[tuple[Any, float, float]]) -> Iterator[tuple[Any, str, float, float]]:
    day, since, over = "", 0.0, 0.0
    for uid, begin, end in stretches:
        while begin < end:
            if not since <= begin < over:
                since, (day, over) = begin, local_day(begin)
            until = min(end, max(over, begin + 1.0))
            yield uid, day, begin, until
            begin = until
