"""The JSON Schema of a policy file, for editors, made of the rows of `keys`."""

from __future__ import annotations

from typing import Any

from mpsagent.policy.keys import NAMED, Key
from mpsagent.policy.tables import ROOT, Table

Json = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> Json:
    parts: dict[str, Json] = {}
    whole = _object(ROOT, parts)
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
