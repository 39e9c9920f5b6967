"""Writes policies/policy.schema.json from the policy's sections (`make schema`); a test says when it is out of date."""

from __future__ import annotations

import json
from pathlib import Path

from mpsagent.policy.sections import schema

TARGET = Path(__file__).resolve().parent.parent / "policies" / "policy.schema.json"


def text() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
