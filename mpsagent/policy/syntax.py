"""What a TOML parser complains about, in words for people: where, what, and what to write instead."""

from __future__ import annotations

import re
import unicodedata

import tomli

from mpsagent.policy import parse
from mpsagent.policy.check import shown_path
from mpsagent.policy.lines import entries
from mpsagent.policy.origins import Path, PolicyError, key_text

# How tomli begins a complaint -> what is wrong, and what a person can do about it.
_COMPLAINTS = (
    ("Invalid statement", "this is no key = value, no [section] and no comment", "begin a comment with #"),
    ("Invalid initial character", "a key begins with a sign that it may not have",
     "a key has letters, digits, - and _; put any other name in quotes"),
    ("Invalid value", "this is no value", 'a text needs quotes: "10m", "20G"'),
    ("Invalid date", "this is no value", 'a text needs quotes: "10m", "20G"'),
    ("Expected '='", 'there is no "=" behind the key',
     'write key = value; a name with a dot or a space needs quotes: [user."jane.doe"]'),
    ("Expected ']", "the name of the section does not end with ]",
     "close it with ]; a name with a space or other signs needs quotes"),
    ("Expected newline or end", "something follows the value on the same line",
     "one key = value on a line; a text needs quotes on both sides"),
    ("Expected ", "the file ends in the middle of a value", "a bracket or a quote is missing"),
    ("Unterminated", "a text has no end", "the closing quote is missing"),
    ("Unclosed", "a value has no end", "the closing bracket or quote is missing"),
    ("Unescaped", "a backslash stands alone in a text", r'write it twice: "C:\\x", or use single quotes'),
    ("Invalid hex", "TOML does not know a \\ sequence in a text", "write the character itself"),
    ("Escaped character", "a \\ sequence in a text is no character", "write the character itself"),
    ("Duplicate inline", "a key stands twice between { and }", "the key is there twice: remove one of them"),
    ("Illegal character", "a text has a line break or a control character in it",
     "a text ends on the line on which it begins, with a quote"),
    ("Found invalid", "there is a control character", "remove it"),
)  # fmt: skip
_WRITTEN = (
    (r"^\s*(?:mode|enforce)\s*=", 'write mode = "enforce" or mode = "report"'),
    (r"=\s*(?:no|yes|on|off|none|null|True|False)\s*(?:#.*)?$", "write true or false"),
    (r"=\s*\d+,\d+\s*(?:#.*)?$", "a number has a point and no comma: 33.3"),
    (r"=\s*\d+(?:\.\d+)?\s*%", 'a percentage needs quotes: "25%"'),
)
"""Patterns of lines that are not TOML, each with a better hint."""
_LONG_KEY = ("a key has too many parts", "a key of a policy has at most four parts, as in user.alice.turn.time_limit")
_DEEP = ("brackets within brackets without end", "no value of a policy needs that")
_NUMBER = ("a number is too long", "write numbers with a few digits")
_AT_THE_END = "the file ends in the middle of a value: a bracket or a quote is missing"


def syntax_error(file: str, text: str, error: Exception) -> PolicyError:
    """What is wrong with a text that ``tomli.loads`` refused with ``error``."""
    said = str(error)
    place = re.search(r" \(at line (\d+), column (\d+)\)$", said)
    line = int(place[1]) if place else text.rstrip().count("\n") + 1 if "at end of document" in said else 0
    if said.startswith("Cannot"):
        return _twice(file, text, line, overwritten="overwrite" in said)
    if not isinstance(error, tomli.TOMLDecodeError):
        problem, hint = _LONG_KEY if "parts" in said else _DEEP if "nested" in said else _NUMBER
    else:
        known = [(problem, hint) for begin, problem, hint in _COMPLAINTS if said.startswith(begin)]
        problem, hint = known[0] if known else ("a mistake", "see https://toml.io")
    if place is None and line:
        hint = _AT_THE_END
    strange = _strange(text, line, int(place[2])) if place else ""
    if strange:
        problem = f"{problem}: found {strange}"
        hint = "a name with such a sign needs quotes; one that was copied from elsewhere by mistake must be typed anew"
    written = text.split("\n")[line - 1] if place else ""
    hint = next((better for pattern, better in _WRITTEN if re.search(pattern, written)), hint)
    where = f" (column {place[2]})" if place else ""
    return PolicyError(file, line, "", f"is not TOML: {problem}{where}", hint)


def _strange(text: str, line: int, column: int) -> str:
    """The name of a sign outside ASCII at a place: a typographic quote, a space that cannot be seen."""
    written = text.split("\n")[line - 1]
    sign = written[column - 1 : column]
    if not sign or sign.isascii():
        return ""
    return f"U+{ord(sign):04X} ({unicodedata.name(sign, 'a sign without a name').lower()})"


def _twice(file: str, text: str, line: int, *, overwritten: bool) -> PolicyError:
    """A key or a section that was there before."""
    path, first = _first(text, line)
    # A section of which a part was there as a key, or the other way round, cannot simply be joined.
    name = key_text(shown_path(path)) if len(path) <= parse.SHOWN else "a key"
    before = f", first on line {first}" if 0 < first < line else ""
    if overwritten:
        return PolicyError(file, line, "", f"{name} is there twice{before}", "remove one of them")
    return PolicyError(file, line, "", f"the section [{name}] is there twice{before}", "join the two")


def _first(text: str, line: int) -> tuple[Path, int]:
    """What is written on a line or last before it, and on which line the same was written first."""
    places: dict[Path, int] = {}
    path: Path = ()
    for table, key, at in entries(text):
        if at > line:
            break
        path = (*table, *key)
        if len(path) > parse.SHOWN:
            continue
        for length in range(len(table) + 1, len(path) + 1):
            places.setdefault(path[:length], at)
    return path, places.get(path, 0)
