"""The kinds of values that a key may have: how each is parsed, what an editor is told, and its words for people.

One row of `keys.KEYS` names one of these; nothing else in the package knows how a value is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mpsagent.mps import units
from mpsagent.policy import parse, values

_DURATION = {"type": "string", "pattern": r"^\s*(\d+(\.\d+)?\s*(ms|s|min|m|h|d)\s*)+$"}
_PERCENT = {"type": "string", "pattern": r"^\s*(100|\d{1,2}(\.\d{1,6})?)\s*%\s*$"}
_AMOUNT = {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGT](i?B)?|%)\s*$"}


@dataclass(frozen=True, slots=True)
class Kind:
    """``parse`` takes what TOML gave and raises parse.Wrong; ``schema`` is a fragment of JSON Schema; ``forms`` say in
    Markdown how a value is written, one form each; ``written`` writes a parsed value back."""

    parse: Callable[[object], Any]
    schema: Mapping[str, Any]
    forms: tuple[str, ...] = ()
    written: Callable[[Any], str] = str


def quoted(value: object) -> str:
    return f'"{value}"'


def duration(low: float, high: float, *, never: bool = False) -> Kind:
    forms = (f'or `"{parse.NEVER}"`',) if never else ()
    schema = {"anyOf": [{"const": parse.NEVER}, _DURATION]} if never else _DURATION

    def written(seconds: float | None) -> str:
        return quoted(parse.NEVER if seconds is None else parse.span(seconds))

    return Kind(parse.duration(low, high, never=never), schema, forms, written)


def choice(words: Mapping[str, str]) -> Kind:
    """One of some words, each with what it means (all of them, or none)."""
    forms = tuple(f"`{quoted(word)}`: {meaning}" for word, meaning in words.items() if meaning)
    forms = forms or (" or ".join(f"`{quoted(word)}`" for word in words),)
    return Kind(parse.choice(*words), {"enum": list(words)}, forms, quoted)


def path(longest: int) -> Kind:
    return Kind(parse.path(longest), {"type": "string", "pattern": "^/"}, ("absolute path",), quoted)


def directory(longest: int, form: str = "absolute path") -> Kind:
    return Kind(parse.directory(longest), {"type": "string", "pattern": "^/."}, (form,), quoted)


def whole(low: int, high: int) -> Kind:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(parse.whole(low, high), schema, (f"{low} to {high}",))


def text(parser: Callable[[object], str], form: str = "") -> Kind:
    return Kind(parser, {"type": "string", "minLength": 1}, (form,) if form else (), quoted)


def _table(required: str, **properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}


FLAG = Kind(parse.flag, {"type": "boolean"}, (), lambda value: "true" if value else "false")
DEVICES = Kind(
    parse.device_list,
    {"type": "array", "items": {"type": "string"}},
    (
        'list of UUIDs as `nvidia-smi -L` prints them: `["GPU-…"]`',
        '`["each"]`: an instance NAME0, NAME1 … for each GPU that no other instance names',
    ),
    lambda value: "[" + ", ".join(map(quoted, value)) + "]",
)
NAMES = Kind(
    parse.names,
    {"type": "array", "items": {"type": "string"}},
    ("list of names",),
    lambda value: "[" + ", ".join(map(quoted, value)) + "]",
)
THREADS = Kind(
    parse.threads,
    {
        "anyOf": [
            _PERCENT,
            {"type": "integer", "minimum": 2},
            _table(
                "clients",
                clients={"type": "integer", "minimum": 1, "maximum": 1000},
                rule={"enum": ["even", "double"]},
            ),
            _table("weight", weight={"type": "number", "exclusiveMinimum": 0}),
        ]
    },
    (
        '`"25%"`: from 0.1% to 100% of the multiprocessors',
        "`26`: this many multiprocessors, at least 2 (MPS gives no process fewer than 8 of an H200)",
        '`{ clients = 4, rule = "even" }`: 100/4; `"double"`: 100/(0.5 · 4), at most 100',
        "`{ weight = 3 }`: 3 divided by the sum of all weights in the policy",
    ),
    lambda value: quoted(values.text(value)),
)
TOTAL_THREADS = Kind(
    parse.total_threads,
    {
        "anyOf": [
            _PERCENT,
            {"type": "integer", "minimum": 2},
        ]
    },
    ('`"50%"`, or a number of multiprocessors: `52`',),
)
TOTAL_MEMORY = Kind(parse.amount, _AMOUNT, ('`"40G"`, or `"50%"` of each device',))
MEMORY = Kind(
    parse.memory,
    {"anyOf": [_AMOUNT, {"type": "object", "minProperties": 1, "additionalProperties": _AMOUNT}]},
    (
        '`"20G"`, `"512M"`, or `"25%"` of each device; `"100%"` is no limit',
        '`{ 0 = "20G", "GPU-…" = "10%" }`: by device',
    ),
)
SIZE = Kind(
    parse.size,
    {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*[KMGT](i?B)?\s*$"},
    ('`"512M"`, `"2G"`; at least `"16M"`',),
    lambda value: quoted(units.limit_text(value)),
)
