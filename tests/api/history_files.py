"""What a history and its file hold, for tests."""

from __future__ import annotations

from pathlib import Path

from mpsagent.api import database
from mpsagent.api.database import Query
from mpsagent.api.history import History
from mpsagent.core.sessions import Sessions


def numbers(history: History, cursor: int = 0, limit: int = 100_000) -> list[object]:
    return [record["seq"] for record in history.since(cursor, limit)]


def lines(path: Path, **query: object) -> list[dict[str, object]]:
    """What is in the file."""
    return database.find(path, Query(**{"after": 0, "limit": 1_000_000, **query}))  # type: ignore[arg-type]


def write(file: database.Database, *records: tuple[int, float, str, dict[str, object]]) -> None:
    """With the sessions that they tell of, as the history writes them."""
    sessions = Sessions(file.sessions())
    written = []
    for number, at, kind, fields in records:
        one: database.Record = {"seq": number, "at": at, "kind": kind, **fields}
        written.append((database.row(one), list(map(database.session_row, sessions.take(one)))))
    file.write(written)


def row(number: int, at: float = 0.0, kind: str = "a", **fields: object) -> tuple[int, float, str, dict[str, object]]:
    return number, at, kind, fields
