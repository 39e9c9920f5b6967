"""What stands behind the ? of a request: each value checked, or a Problem that says what is wrong with it."""

from __future__ import annotations

from datetime import date, datetime, timedelta

from aiohttp import web

from mpsagent.agent.problem import Problem
from mpsagent.api.database import Query

FILTERS = ("user", "pid", "kind", "since", "until")
"""What narrows down which events are asked for."""


def parameters(request: web.Request, allowed: set[str]) -> dict[str, str]:
    unknown = sorted(set(request.query) - allowed)
    if unknown:
        known = ", ".join(sorted(allowed))
        raise Problem(400, f"unknown parameter {unknown[0][:50]!r}", request.path, f"known: {known}")
    return dict(request.query)


def number(query: dict[str, str], key: str, least: int, most: int) -> int | None:
    text = query.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most):
        raise Problem(400, f"{key}={text[:30]!r} is not a number from {least} to {most}", key)
    return int(text)


def moment(query: dict[str, str], key: str) -> float | None:
    """Seconds since the epoch. A time without a zone is this machine's."""
    text = query.get(key)
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise Problem(400, f"{key}={text[:40]!r} is not a time", key, "like 2026-11-22T08:00:00Z") from None


def day(query: dict[str, str], key: str) -> date | None:
    text = query.get(key)
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise Problem(400, f"{key}={text[:40]!r} is not a day", key, "like 2026-11-22") from None


def wanted_records(query: dict[str, str], cursor: int | None, limit: int) -> Query:
    """But for the user, whose name is the backend's to know."""
    pid, since, until = number(query, "pid", 1, 1 << 31), moment(query, "since"), moment(query, "until")
    return Query(cursor, limit, None, pid, query.get("kind"), since, until)


def wanted_days(query: dict[str, str]) -> tuple[str, str, str, str | None]:
    """By what a report is, its first and last day (the last 30 where none are named), and of which job alone it is."""
    by, job = query.get("by", "user"), query.get("job")
    if by not in ("user", "group", "day", "job"):
        raise Problem(400, f"by={by[:20]!r}", "by", "user, group, day or job")
    if job is not None and by != "job":
        raise Problem(400, "job= is for by=job", "job")
    last = day(query, "last") or date.today()
    first = day(query, "first") or max(last, date.min + timedelta(days=29)) - timedelta(days=29)
    return by, first.isoformat(), last.isoformat(), job
