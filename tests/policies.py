"""A policy from texts, for the tests of what it gives."""

from __future__ import annotations

import re

from mpsagent.policy.files import load
from mpsagent.policy.policy import Policy

WAYS = {
    "own": 'sharing = "turns"\nserver_scope = "user"\n',
    "shared": 'sharing = "turns"\nserver_scope = "all"\n',
    "together": 'sharing = "one-server"\n',
    "apart": 'sharing = "per-user"\n',
}
"""Lines for [instance.NAME] by the tests' short name of a way of sharing."""
SCOPES = {"own": "user", "shared": "all"}
"""`server_scope` by the tests' short name."""
SHARING = {"turns": "turns", "together": "one-server", "apart": "per-user"}
"""`sharing` by the tests' short name."""


def policy(*texts: str) -> Policy:
    """Of files 0.toml, 1.toml … without a mistake."""
    made, errors = load([(f"{number}.toml", text) for number, text in enumerate(texts)])
    assert made is not None, errors
    return made


def in_turns(text: str) -> str:
    """Return a second file for a policy: users take turns in each instance that does not say how they share."""
    found = re.split(r"^\[instance\.([\w-]+)\]$", text, flags=re.MULTILINE)
    sections = dict(zip(found[1::2], found[2::2], strict=True)) or {"default": ""}
    silent = [name for name, rest in sections.items() if not re.search(r"^sharing =", rest, re.MULTILINE)]
    return "".join(f'[instance.{name}]\nsharing = "turns"\n' for name in silent)
