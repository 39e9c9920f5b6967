"""The parameters of a request: declared once, by their OpenAPI schema, and read by that schema."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, NamedTuple

from aiohttp import web

from mpsagent.snapshot.problem import Json, Problem


class Parameter(NamedTuple):
    about: str
    schema: Json


def _number(least: int, most: int) -> Json:
    return {"type": "integer", "minimum": least, "maximum": most}


def _text(least: int, most: int) -> Json:
    return {"type": "string", "minLength": least, "maxLength": most}


_TIME: Json = {"type": "string", "format": "date-time", "examples": ["2026-11-22T08:00:00Z"]}
_DAY: Json = {"type": "string", "format": "date", "examples": ["2026-11-22"]}
PARAMETERS = {
    "cursor": Parameter("what comes after this cursor; without it the newest", _number(0, 1 << 62)),
    "limit": Parameter("at most this many (100)", _number(1, 1000)),
    "follow": Parameter("1: go on with new events; not with the parameters below", _number(0, 1)),
    "user": Parameter("only of this user: name or uid", _text(1, 256)),
    "pid": Parameter("only of this process", _number(1, 1 << 31)),
    "kind": Parameter("only kinds that begin with this, as client.ended; several with commas", _text(0, 1000)),
    "since": Parameter("not before this time", _TIME),
    "until": Parameter("before this time", _TIME),
    "cgroup": Parameter("the path of a cgroup: also what applies to a process there", _text(0, 4096)),
    "by": Parameter("what each row is about (user)", {"type": "string", "enum": ["user", "group", "day", "job"]}),
    "job": Parameter("only of the job with this name; with by=job", _text(0, 100)),
    "first": Parameter("first day; 30 days in all", _DAY),
    "last": Parameter("last day (today)", _DAY),
}


def asked(request: web.Request, allowed: Sequence[str]) -> Json:
    """Each value that is given, read. ``allowed``: with ! those that there have to be. Raises Problem."""
    known = sorted(one.rstrip("!") for one in allowed)
    unknown = sorted(set(request.query) - set(known))
    if unknown:
        raise Problem(400, f"unknown parameter {unknown[0][:50]!r}", request.path, f"known: {', '.join(known)}")
    missing = [one for one in allowed if one.endswith("!") and not request.query.get(one[:-1])]
    if missing:
        raise Problem(400, f"which {missing[0][:-1]}?", missing[0][:-1], f"{request.path}?{missing[0][:-1]}=…")
    return {name: _read(name, text) for name, text in request.query.items()}


def _read(name: str, text: str) -> Any:
    """Times are seconds since the epoch; one without a zone is this machine's."""
    schema = PARAMETERS[name].schema
    try:
        match schema:
            case {"type": "integer", "minimum": least, "maximum": most}:
                what = f"a number from {least} to {most}"
                if text.isascii() and text.isdecimal() and len(text) < 20 and least <= int(text) <= most:
                    return int(text)
            case {"format": "date-time", "examples": [example]}:
                what = f"a time like {example}"
                return datetime.fromisoformat(text).timestamp()
            case {"format": "date", "examples": [example]}:
                what = f"a day like {example}"
                return date.fromisoformat(text)
            case {"enum": words}:
                what = f"one of {', '.join(words)}"
                if text in words:
                    return text
            case {"minLength": least, "maxLength": most}:
                what = f"a text of {least} to {most} letters"
                if least <= len(text) <= most:
                    return text
    except (ValueError, OverflowError, OSError):
        pass
    raise Problem(400, f"{name}={text[:40]!r} is not {what}", name)
