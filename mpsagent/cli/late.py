"""Verbs of the command line that are imported when they are asked for: a status needs none of the others."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any


class Late(UserDict[str, Any]):
    """The commands of a group by name; one that was not asked for yet is its module's name."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, str):
            found = self.data[name] = getattr(import_module(f"{__package__}.{found}"), name)
        return found
