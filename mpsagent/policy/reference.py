"""The tables of docs/policy.md, made of the rows of `keys`; the manual page is made of that page."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpsagent.policy.keys import Key, keys_of

HEAD = ["| key | value | default |", "|---|---|---|"]


def rows(section: str) -> list[str]:
    """The table of one section, in Markdown. A key with several forms has a line for each."""
    return [*HEAD, *(line for key in keys_of(section) for line in _row(key))]


def _row(key: Key) -> Iterator[str]:
    forms = key.kind.forms
    if len(forms) == 1:
        join = ", " if forms[0].startswith("or ") else "; "
        yield _line(f"`{key.name}`", key.words + join + forms[0], key.default_text())
        return
    yield _line(f"`{key.name}`", key.words + (":" if forms else ""), key.default_text())
    for form in forms:
        yield _line("", form, "")


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def text(present: str) -> str:
    """A page with the table below each heading ``## [section]`` written anew."""
    parts = re.split(r"^(?=## )", present, flags=re.MULTILINE)
    return "".join(_renewed(part) for part in parts)


def _renewed(part: str) -> str:
    heading = re.match(r"## \[(\w+)(?:\.NAME)?\]\n", part)
    if heading is None:
        return part
    table = "\n".join(rows(heading[1])) + "\n"
    return re.sub(r"(?:^\|[^\n]*\n)+", lambda _: table, part, count=1, flags=re.MULTILINE)
