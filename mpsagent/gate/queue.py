"""Who is held, who is known, and which connection is handed over next under the admissions. Pure: time is given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mpsagent.gate.link import Admissions, User
from mpsagent.mps.limits import Limits

MOST_HELD = 8192
MOST_HELD_OF_A_USER = 1024
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
LOOK_BEHIND = 16
"""How many connections of one user are looked at behind one that pauses after a failure."""

Process = tuple[int, int]
"""(pid, start time): what a process is told by."""


@dataclass(slots=True)
class Held:
    """A CUDA connection that waits. ``connection`` grows with the time of arrival. ``not_before``: it pauses after a
    failed hand-over until then; ``pause`` is the last pause's length."""

    connection: int
    pid: int
    uid: int
    gid: int
    start: int
    since: float
    not_before: float = 0.0
    pause: float = 0.0

    @property
    def process(self) -> Process:
        return (self.pid, self.start)

    def failed(self, now: float) -> None:
        """It keeps its place and is tried again after a pause that doubles."""
        self.pause = min(LONGEST_PAUSE, self.pause * 2 or FIRST_PAUSE)
        self.not_before = now + self.pause


@dataclass(slots=True)
class KnownProcess:
    """A process that was handed over and lives, with the limits of its last hand-over."""

    pid: int
    uid: int
    gid: int
    start: int
    since: float
    limits: Limits | None
    connections: int = 0

    @property
    def process(self) -> Process:
        return (self.pid, self.start)


@dataclass(slots=True)
class _Line:
    """One user's connections in order of arrival: those of known processes apart, because they go first."""

    kin: dict[int, Held] = field(default_factory=dict)
    new: dict[int, Held] = field(default_factory=dict)


class Queue:
    """Order of arrival inside a user and among admitted users; known processes before new ones."""

    def __init__(self, most: int = MOST_HELD, most_of_a_user: int = MOST_HELD_OF_A_USER) -> None:
        self.most = most
        self.most_of_a_user = most_of_a_user
        self._held: dict[int, Held] = {}
        self._lines: dict[int, _Line] = {}
        self._of: dict[Process, set[int]] = {}
        self._known: dict[Process, KnownProcess] = {}
        self._known_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, connection: int) -> bool:
        return connection in self._held

    def held(self) -> Iterator[Held]:
        """In order of arrival."""
        return iter(sorted(self._held.values(), key=lambda one: one.connection))

    def get(self, connection: int) -> Held | None:
        return self._held.get(connection)

    def full_for(self, uid: int) -> str | None:
        """Why one more connection of this user cannot be held; None when it can."""
        if len(self._held) >= self.most:
            return f"{self.most} connections are held already"
        line = self._lines.get(uid)
        if line is not None and len(line.kin) + len(line.new) >= self.most_of_a_user:
            return f"{self.most_of_a_user} connections of user {uid} are held already"
        return None

    def add(self, held: Held) -> None:
        """Arrival order is by ``connection``; one from an earlier gate may be older than the last."""
        self._held[held.connection] = held
        line = self._lines.setdefault(held.uid, _Line())
        self._insert(line.kin if held.process in self._known else line.new, held)
        self._of.setdefault(held.process, set()).add(held.connection)

    def remove(self, connection: int) -> Held | None:
        held = self._held.pop(connection, None)
        if held is None:
            return None
        line = self._lines[held.uid]
        line.kin.pop(connection, None)
        line.new.pop(connection, None)
        if not line.kin and not line.new:
            del self._lines[held.uid]
        siblings = self._of[held.process]
        siblings.discard(connection)
        if not siblings:
            del self._of[held.process]
        return held

    # --- known processes ---

    def known(self) -> Iterator[KnownProcess]:
        return iter(list(self._known.values()))

    def known_process(self, process: Process) -> KnownProcess | None:
        return self._known.get(process)

    def know(self, known: KnownProcess) -> None:
        if known.process not in self._known:
            self._known_of[known.uid] = self._known_of.get(known.uid, 0) + 1
        self._known[known.process] = known
        self._move(known.process, known.uid)

    def forget(self, process: Process) -> KnownProcess | None:
        known = self._known.pop(process, None)
        if known is not None:
            self._known_of[known.uid] -= 1
            if not self._known_of[known.uid]:
                del self._known_of[known.uid]
            self._move(process, known.uid)
        return known

    def _move(self, process: Process, uid: int) -> None:
        """The other connections of a process that became known, or is not known any more."""
        for connection in self._of.get(process, ()):
            held = self._held[connection]
            line = self._lines[held.uid]
            line.kin.pop(connection, None)
            line.new.pop(connection, None)
            self._insert(line.kin if process in self._known else line.new, held)

    @staticmethod
    def _insert(line: dict[int, Held], held: Held) -> None:
        late = bool(line) and next(reversed(line)) > held.connection
        line[held.connection] = held
        if late:
            in_order = sorted(line.items())
            line.clear()
            line.update(in_order)

    # --- who is next ---

    def next(self, now: float, admissions: Admissions) -> Held | None:
        """The connection to hand over now."""
        return self._choose(now, admissions)[0]

    def wake(self, now: float, admissions: Admissions) -> float | None:
        """When a connection that only pauses may be tried again; None when none does."""
        chosen, wake = self._choose(now, admissions)
        return now if chosen is not None else wake

    def _choose(self, now: float, admissions: Admissions) -> tuple[Held | None, float | None]:
        if not admissions.open:
            return None, None
        wake: float | None = None
        best: Held | None = None
        for known in (True, False):
            if not known and len(self._known) >= admissions.room:
                break
            for uid, line in self._lines.items():
                user = admissions.user(uid)
                if user is None or not (known or self._admits(user, uid)):
                    continue
                found, later = _first(line.kin if known else line.new, now)
                if found is not None and (best is None or found.connection < best.connection):
                    best = found
                if later is not None and (wake is None or later < wake):
                    wake = later
            if best is not None:
                return best, None
        return None, wake

    def _admits(self, user: User, uid: int) -> bool:
        """Whether a new process of this user may pass."""
        return user.admit == "all" and (user.max_clients is None or self._known_of.get(uid, 0) < user.max_clients)


def _first(line: dict[int, Held], now: float) -> tuple[Held | None, float | None]:
    """The first one that does not pause, and when the first of those that do may be tried."""
    wake: float | None = None
    for count, held in enumerate(line.values()):
        if held.not_before <= now:
            return held, None
        if wake is None or held.not_before < wake:
            wake = held.not_before
        if count >= LOOK_BEHIND:
            break
    return None, wake
