"""Who is held at the gate: by connection, by user in order of arrival, and by process. Frozen, as all of the state.

A change copies three dicts (10 microseconds each at 2,000 connections) and sorts nothing, unless a user's first
connection leaves or is told of out of order: with thousands held, each further one must cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpsagent.core.inputs import Peer


@dataclass(frozen=True, slots=True)
class Held:
    """A connection held at the gate. ``handing``: since when it is being handed over; ``of_client``: the process passed
    already and wants a further context; ``failed``: why its last hand-over did not come about; ``never``: see
    :class:`mpsagent.wire.link.Knock`."""

    connection: int
    peer: Peer
    since: float
    handing: float | None = None
    of_client: bool = False
    failed: str | None = None
    never: str = ""

    @property
    def uid(self) -> int:
        return self.peer.uid

    @property
    def process(self) -> tuple[int, int]:
        """(pid, start time): what a process is told by."""
        return self.peer.pid, self.peer.start


def _key(held: Held) -> tuple[float, int]:
    return held.since, held.connection


Lines = dict[int, dict[int, Held]]
_NO_LINE: dict[int, Held] = {}


class Queue(Mapping[int, Held]):
    """Connection -> :class:`Held`. ``handing``: the connections that are being handed over."""

    __slots__ = ("_all", "_lines", "_of", "_only", "_order", "handing")

    def __init__(
        self,
        everyone: dict[int, Held] | None = None,
        lines: Lines | None = None,
        of: dict[int, tuple[int, ...]] | None = None,
        handing: frozenset[int] = frozenset(),
    ) -> None:
        self._all: dict[int, Held] = {} if everyone is None else everyone
        self._lines: Lines = {} if lines is None else lines
        self._of: dict[int, tuple[int, ...]] = {} if of is None else of
        self._order: tuple[tuple[float, int, int], ...] | None = None
        self._only: dict[int, tuple[dict[int, Held], Queue]] = {}
        """By user: the line of which a queue was made, and that."""
        self.handing = handing

    def __getitem__(self, connection: int) -> Held:
        return self._all[connection]

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Queue) and self._all == other._all

    def __reduce__(self) -> tuple[Any, ...]:
        return Queue, (self._all, self._lines, self._of, self.handing)

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def order(self) -> tuple[tuple[float, int, int], ...]:
        """Since when each user waits, by which connection, and the user: in the order in which these came."""
        if self._order is None:
            firsts = ((uid, next(iter(line.values()))) for uid, line in self._lines.items())
            self._order = tuple(sorted((*_key(first), uid) for uid, first in firsts))
        return self._order

    def users(self) -> tuple[int, ...]:
        """In the order in which the first connection of each came."""
        return tuple(uid for _, _, uid in self.order)

    def line(self, uid: int) -> tuple[Held, ...]:
        """A user's connections in order of arrival."""
        return tuple(self._lines.get(uid, {}).values())

    def first(self, uid: int) -> Held | None:
        line = self._lines.get(uid)
        return None if line is None else next(iter(line.values()))

    def hands_over(self, uid: int) -> bool:
        """Whether a connection of this user is being handed over."""
        return any(self._all[connection].uid == uid for connection in self.handing)

    def of(self, process: tuple[int, int]) -> tuple[Held, ...]:
        """The connections of one process."""
        return tuple(held for held in self.of_pid(process[0]) if held.process == process)

    def has(self, process: tuple[int, int]) -> bool:
        """Whether a connection of this process is held; one process may have thousands, for many uids of its own."""
        return any(self._all[one].process == process for one in self._of.get(process[0], ()))

    def of_pid(self, pid: int) -> tuple[Held, ...]:
        return tuple(self._all[connection] for connection in self._of.get(pid, ()))

    # --- of some users ------------------------------------------------------------------------------------------------

    def only(self, uid: int) -> Queue:
        """The connections of one user."""
        line = self._lines.get(uid, _NO_LINE)
        known = self._only.get(uid)
        if known is None or known[0] is not line:
            known = self._only[uid] = line, _queue_of({uid: line} if line else {})
        return known[1]

    def without_users(self, uids: Collection[int | None]) -> Queue:
        """The connections of all others."""
        if not any(uid in self._lines for uid in uids):
            return self
        return _queue_of({uid: line for uid, line in self._lines.items() if uid not in uids})

    def merged(self, before: Queue, after: Queue) -> Queue:
        """With what has become of a part of it that was ``before``."""
        if before is self:
            return after
        merged = self
        for connection in before._all.keys() - after._all.keys():
            merged = merged.without(connection)
        for held in [one for number, one in after._all.items() if self._all.get(number) is not one]:
            merged = merged.put(held)
        return merged

    # --- changes ------------------------------------------------------------------------------------------------------

    def put(self, held: Held) -> Queue:
        """With this connection, new or changed."""
        known = self._all.get(held.connection)
        if known is not None and (known.peer, known.since) != (held.peer, held.since):
            return self.without(held.connection).put(held)
        everyone, lines = {**self._all, held.connection: held}, dict(self._lines)
        line = dict(lines.get(held.uid, {}))
        late = known is None and bool(line) and _key(next(reversed(line.values()))) > _key(held)
        line[held.connection] = held
        lines[held.uid] = {one.connection: one for one in sorted(line.values(), key=_key)} if late else line
        of = self._of
        if known is None:
            of = {**of, held.peer.pid: (*of.get(held.peer.pid, ()), held.connection)}
        handing = self.handing - {held.connection} if held.handing is None else self.handing | {held.connection}
        fresh = self._with(everyone, lines, of, handing)
        if known is not None or (len(line) > 1 and not late):
            fresh._order = self._order
        elif len(line) == 1 and self._order and self._order[-1] < (last := (*_key(held), held.uid)):
            fresh._order = (*self._order, last)
        return fresh

    def _with(self, *of: Any) -> Queue:
        fresh = Queue(*of)
        fresh._only = self._only
        return fresh

    def without(self, connection: int) -> Queue:
        known = self._all.get(connection)
        if known is None:
            return self
        everyone, lines, of = dict(self._all), dict(self._lines), dict(self._of)
        del everyone[connection]
        line = dict(lines[known.uid])
        first = next(iter(line)) == connection
        del line[connection]
        if line:
            lines[known.uid] = line
        else:
            del lines[known.uid]
        others = tuple(one for one in of[known.peer.pid] if one != connection)
        if others:
            of[known.peer.pid] = others
        else:
            del of[known.peer.pid]
        fresh = self._with(everyone, lines, of, self.handing - {connection})
        if not first:
            fresh._order = self._order
        elif self._order is not None and not line:
            fresh._order = tuple(one for one in self._order if one[2] != known.uid)
        return fresh


def _queue_of(lines: Lines) -> Queue:
    everyone = {number: held for line in lines.values() for number, held in line.items()}
    of: dict[int, tuple[int, ...]] = {}
    for number, held in everyone.items():
        of[held.peer.pid] = (*of.get(held.peer.pid, ()), number)
    handing = frozenset(number for number, held in everyone.items() if held.handing is not None)
    return Queue(everyone, lines, of, handing)
