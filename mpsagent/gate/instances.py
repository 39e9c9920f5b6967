"""The instances of MPS behind one gate, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from mpsagent.gate.connection import Connection
from mpsagent.gate.handovers import Instance

PIPE = "pipe"
"""The pipe directory of an instance, in the directory that has its name."""


class Instances:
    """By name. The first is the one that the gate was started for, with its control daemon in ``directory``; those of
    the others lie beside it, and ``make`` makes one when the agent first speaks of it."""

    def __init__(self, directory: Path, make: Callable[[str, Path], Instance]) -> None:
        self._directory = directory
        self._make = make
        self.first = make(directory.parent.name if directory.name == PIPE else "", directory)
        self._by_name = {self.first.name: self.first}

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._by_name.values()))

    def find(self, name: str) -> Instance | None:
        return self._by_name.get(name) if name else self.first

    def get(self, name: str) -> Instance:
        """Makes it when it is not there yet. The name is one by :func:`link.instance_name`, or empty."""
        found = self.find(name)
        if found is None:
            found = self._by_name[name] = self._make(name, self._directory.parent.parent / name / PIPE)
        return found

    def drop(self, name: str) -> None:
        """It is not there any more. The first one stays: its daemon may come back."""
        if name != self.first.name:
            self._by_name.pop(name).lane.close()

    def of_user(self, uid: int) -> Instance | None:
        """The one whose admissions name this user, or say that they are for others too."""
        named = next((one for one in self if uid in one.admissions.users), None)
        return named or next((one for one in self if one.admissions.others is not None), None)

    def of_connection(self, connection: Connection) -> Instance | None:
        """Where it is being handed over."""
        return next((one for one in self if connection in one.under_way()), None)
