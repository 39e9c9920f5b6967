"""A policy from texts, for the tests of what it gives."""

from __future__ import annotations

from mpsagent.policy.files import load
from mpsagent.policy.policy import Policy


def policy(*texts: str) -> Policy:
    """Of files 0.toml, 1.toml … without a mistake."""
    made, errors = load([(f"{number}.toml", text) for number, text in enumerate(texts)])
    assert made is not None, errors
    return made
