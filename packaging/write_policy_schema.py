"""Writes policies/policy.schema.json and the tables of docs/policy.md from the rows of the policy's keys.

`make schema` runs it; a test says when one of them is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

from mpsagent.policy import reference
from mpsagent.policy.schema import schema

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "policies" / "policy.schema.json"
PAGE = ROOT / "docs" / "policy.md"


def text() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def page() -> str:
    return reference.text(PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
