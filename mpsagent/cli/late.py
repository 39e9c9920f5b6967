"""Verbs of the command line that are imported when they are used, including the verbs of other packages."""

from __future__ import annotations

import sys
from collections import UserDict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


class Late(UserDict[str, Any]):
    """The commands of a group by name. The value of a command that is not imported yet is the name of its module."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, str):
            found = self.data[name] = getattr(import_module(found), name)
        return found


def beside(group: str = "") -> dict[str, str]:
    """Return the verbs that other packages add to a group, and the module of each.

    Such a package is named ``mpsagent_…`` and is in the same directory as mpsagent. Its ``VERBS`` has the module of
    each verb. The name of a verb includes its group: ``policy advise``.
    """
    verbs = _verbs()
    words = {name: name.rpartition(" ") for name in verbs}
    return {verb: verbs[name] for name, (of, _, verb) in words.items() if of == group}


@cache
def _verbs() -> dict[str, str]:
    verbs = dict[str, str]()
    for package in sorted(Path(__file__).parents[2].glob("mpsagent_*/__init__.py")):
        name = package.parent.name
        try:
            verbs |= getattr(import_module(name), "VERBS", {})
        except Exception as error:  # whatever is wrong with it, mpsagent's own verbs work
            print(f"mpsagent-cli: {name} adds no verbs, because it cannot be imported: {error}", file=sys.stderr)
    return verbs
