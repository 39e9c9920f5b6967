"""Writes policies/policy.schema.json, for editors, and the tables of docs/policy.md from the rows of the policy's keys.
The manual page is made of that page.

`make schema` runs it; a test says when one of them is out of date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpsagent.policy.keys import NAMED, Key, keys_of
from mpsagent.policy.tables import ROOT as WHOLE
from mpsagent.policy.tables import Table

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "policies" / "policy.schema.json"
PAGE = ROOT / "docs" / "policy.md"
Json = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> Json:
    parts: dict[str, Json] = {}
    whole = _object(WHOLE, parts)
    return {"$schema": DIALECT, **whole, "$defs": parts}


def _object(table: Table, parts: dict[str, Json]) -> Json:
    properties = {name: _key(key) for name, key in table.keys.items()}
    for name, below in table.tables.items():
        if name in NAMED and below.each is not None:
            each = {"$ref": _part(below.each, parts)}
            properties[name] = {"type": "object", "description": below.words, "additionalProperties": each}
        else:
            properties[name] = {"$ref": _part(below, parts), "description": below.words}
    return {
        "type": "object",
        "description": table.words,
        "properties": properties,
        "additionalProperties": False,
    }


def _part(table: Table, parts: dict[str, Json]) -> str:
    name = "who" if table.title == "user.NAME" else table.title.partition(".")[0]
    if name not in parts:
        parts[name] = _object(table, parts)
    return f"#/$defs/{name}"


def _key(key: Key) -> Json:
    words = key.words
    if key.kind.forms:
        words += (", " if key.kind.forms[0].startswith("or ") else ": ") + "; ".join(key.kind.forms)
    return {**key.kind.schema, "description": f"{words} (default: {key.default_text()})".replace("`", "")}


# --- the page


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


def renewed(present: str) -> str:
    """A page with the table below each heading ``## [section]`` written anew."""
    parts = re.split(r"^(?=## )", present, flags=re.MULTILINE)
    return "".join(_renewed(part) for part in parts)


def _renewed(part: str) -> str:
    heading = re.match(r"## \[(\w+)(?:\.NAME)?\]\n", part)
    if heading is None:
        return part
    table = "\n".join(rows(heading[1])) + "\n"
    return re.sub(r"(?:^\|[^\n]*\n)+", lambda _: table, part, count=1, flags=re.MULTILINE)


# --- what is written


def text() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def page() -> str:
    return renewed(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
