"""Which line of a TOML text each key is on: a TOML parser gives values, and people look for lines.

Only for texts that a TOML parser has accepted. Keys inside inline tables and arrays are not listed: ``line_of`` gives
the line of the nearest key around them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_PART = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'""")
# What a value is made of. The longest kinds of text come first; up to two quotes may stand before the closing three.
_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")'
    r"|'''.*?'{3,5}(?!')"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|[^\"'#\n\[\]{}]+"
    r"|.",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SHORT = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}

Path = tuple[str, ...]


def key_lines(text: str) -> dict[Path, int]:
    """Line (from 1) by key. A table counts as a key; of several tables in an array the first counts."""
    found: dict[Path, int] = {}
    for table, key, line in entries(text):
        for length in range(1, len(key) + 1):
            found.setdefault((*table, *key[:length]), line)
    return found


def entries(text: str) -> Iterator[tuple[Path, Path, int]]:
    """(table, key, line) for each key, and ((), table, line) for each table; until something is not TOML."""
    table: Path = ()
    at, line = 0, 1
    while True:
        to = _end(_BLANK, text, at)
        line += text.count("\n", at, to)
        at = to
        if at >= len(text):
            return
        if text[at] == "[":
            table, end = _key(text, at + (2 if text.startswith("[[", at) else 1))
            yield (), table, line
            newline = text.find("\n", end)
            to = newline if newline >= 0 else len(text)
        else:
            key, end = _key(text, at)
            if not key:
                return
            yield table, key, line
            to = _value(text, end)
        line += text.count("\n", at, to)
        at = to


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """The line of a key or of the nearest one around it; 0 when there is none."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return 0


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _key(text: str, at: int) -> tuple[Path, int]:
    """A dotted key from ``at``, and where it ends (after the spaces behind it)."""
    parts: list[str] = []
    while True:
        at = _end(_SPACE, text, at)
        match = _PART.match(text, at)
        if match is None:
            return tuple(parts), at
        parts.append(_plain(match[0]))
        at = _end(_SPACE, text, match.end())
        if not text.startswith(".", at):
            return tuple(parts), at
        at += 1


def _plain(part: str) -> str:
    if part[0] == "'":
        return part[1:-1]
    return _ESCAPE.sub(_unescape, part[1:-1]) if part[0] == '"' else part


def _unescape(match: re.Match[str]) -> str:
    number = match[1] or match[2] or match[3]
    return chr(int(number, 16)) if number else _SHORT.get(match[4], match[4])


def _value(text: str, at: int) -> int:
    """Where the line ends on which the value ends that follows ``at``."""
    depth = 0
    for piece in _PIECE.finditer(text, at):
        first = piece[0]
        if first == "\n" and depth == 0:
            return piece.end()
        if first in ("[", "{"):
            depth += 1
        elif first in ("]", "}"):
            depth -= 1
    return len(text)
