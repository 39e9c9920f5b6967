"""The instances of MPS behind one gate: a control daemon each, with its lane, its hand-overs and its admissions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mpsagent.gate import link
from mpsagent.gate.connection import Connection
from mpsagent.gate.handovers import HandOvers
from mpsagent.gate.lane import Lane
from mpsagent.gate.link import Admissions

PIPE = "pipe"
"""The pipe directory of an instance, in the directory that has its name."""


class Instance:
    """``lane`` leads to its daemon. ``tell`` is the agent's ear."""

    def __init__(self, name: str, lane: Lane, hand_overs: HandOvers, tell: Callable[[link.FromGate], None]) -> None:
        self.name = name
        self.lane = lane
        self.hand_overs = hand_overs
        self.greeting: link.HandshakeSeen | None = None
        self._tell = tell
        self._unapplied: int | None = None

    @property
    def admissions(self) -> Admissions:
        return self.hand_overs.admissions

    def admit(self, table: Admissions) -> None:
        """These admissions are in force from now on."""
        self.hand_overs.admit(replace(table, instance=self.name))
        self._unapplied = table.number
        self.applied()

    def applied(self) -> None:
        """Tells the agent that its admissions are in force, once no hand-over that they do not allow is under way."""
        number, table = self._unapplied, self.admissions
        if number is None:
            return
        if all(table.open and table.user(one.peer.uid) is not None for one in self.hand_overs.under_way()):
            self._unapplied = None
            self._tell(link.Applied(number, self.name))


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
        return next((one for one in self if connection in one.hand_overs.under_way()), None)
