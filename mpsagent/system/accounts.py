"""What each user and each job had on each day: time with the GPU, waiting, clients and how they ended. Pure.

Time with the GPU is the time in which a user or job had a client at work, however many; it is counted when the last of
them ends, and divided at midnight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

PAUSED = float("inf")
Calendar = Callable[[float], tuple[str, float]]
"""For a time in seconds since the epoch: the name of its day (YYYY-MM-DD), and when that day ends."""


@dataclass(slots=True)
class Sums:
    """``gpu``, ``waited``, ``longest`` (the longest wait) in seconds. ``waited`` is that of all processes together.
    ``paused``: in which the user's processes stood, so that others could work; no time with the GPU.
    ``left``: processes that went away while they waited. ``forced``: clients that the agent has ended."""

    gpu: float = 0.0
    waited: float = 0.0
    longest: float = 0.0
    clients: int = 0
    left: int = 0
    refused: int = 0
    faults: int = 0
    forced: int = 0
    turns: int = 0
    paused: float = 0.0

    def wait(self, seconds: float) -> None:
        self.waited += seconds
        self.longest = max(self.longest, seconds)


class Job(NamedTuple):
    """By the name of its lease; two users' may have the same."""

    name: str
    uid: int


Owner = TypeVar("Owner", bound=Hashable)


def user_of(record: Mapping[str, Any]) -> int:
    return int(record["uid"])


def job_of(record: Mapping[str, Any]) -> Job | None:
    """None for what was no named job's."""
    return Job(str(record["job"]), int(record["uid"])) if record.get("job") is not None else None


def divide(begin: float, end: float, calendar: Calendar) -> Iterable[tuple[str, float]]:
    """A span of time by days: each day with its seconds."""
    while begin < end:
        day, midnight = calendar(begin)
        until = min(end, max(midnight, begin + 1.0))
        yield day, until - begin
        begin = until


class Accounts(Generic[Owner]):
    """``owner``: whose a record is, None: of nobody who is counted here. ``working``: whose each client at work is, by
    pid; ``busy``: for each owner of one, from when on time is to be counted. ``seen``: when the records before ended.
    ``PAUSED``: from when they go on.
    The end of a client that no agent has seen (``unknown``) counts until then: nothing is known of the time between."""

    def __init__(
        self,
        calendar: Calendar,
        owner: Callable[[Mapping[str, Any]], Owner | None],
        working: Mapping[int, Owner],
        busy: Mapping[Owner, float],
        seen: float = 0.0,
    ) -> None:
        self._calendar, self._owner, self._seen = calendar, owner, seen
        self.working, self.busy = dict(working), dict(busy)
        self.sums: dict[tuple[str, Owner], Sums] = {}
        """What has come together, by day and owner. Whoever has put it away empties it."""
        self.limits: dict[tuple[str, Owner], tuple[float, int]] = {}
        """The most that a client let in on that day had: percent of threads, and bytes on a device (0: no limit)."""
        self.changed = False
        """Whether ``working`` has changed since it was set to False."""

    def take(self, record: Mapping[str, Any]) -> None:
        """A record of another kind, or one that lacks something, changes nothing."""
        rule = _RULES.get(record["kind"])
        if rule is None:
            return
        try:
            rule(self, record, float(record["at"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError):
            return

    def _of(self, owner: Owner | None, at: float) -> Sums:
        if owner is None:
            return Sums()  # nobody looks at it
        return self.sums.setdefault((self._calendar(at)[0], owner), Sums())

    def _connected(self, record: Mapping[str, Any], at: float) -> None:
        pid, waited, owner = int(record["pid"]), float(record.get("waited", 0.0)), self._owner(record)
        sums = self._of(owner, at)
        sums.clients += 1
        sums.wait(waited)
        if pid in self.working:
            self._gone(pid, at)
        if owner is None:
            return
        self.working[pid] = owner
        self.busy.setdefault(owner, at)
        self.changed = True
        self._let_in(owner, at, record.get("limits") or {})

    def _let_in(self, owner: Owner, at: float, limits: Mapping[str, Any]) -> None:
        key = (self._calendar(at)[0], owner)
        threads, memory = self.limits.get(key, (0.0, 0))
        most = max((int(size) for size in limits.get("memory", {}).values()), default=0)
        self.limits[key] = max(threads, float(limits.get("threads", 0.0))), max(memory, most)

    def _ended(self, record: Mapping[str, Any], at: float) -> None:
        """The lease may be over by now, and another agent not know of it: a client stays whose it was."""
        outcome, pid = record["outcome"], int(record["pid"])
        sums = self._of(self.working[pid] if pid in self.working else self._owner(record), at)
        sums.faults += outcome == "faulted"
        sums.forced += outcome == "ended"
        if pid in self.working:
            self._gone(pid, self._seen if outcome == "unknown" else at)

    def _gone(self, pid: int, at: float) -> None:
        owner = self.working.pop(pid)
        self.changed = True
        if owner not in self.working.values():
            for day, seconds in divide(self.busy.pop(owner), at, self._calendar):
                self.sums.setdefault((day, owner), Sums()).gpu += seconds

    def _left(self, record: Mapping[str, Any], at: float) -> None:
        sums, waited = self._of(self._owner(record), at), float(record["waited"])
        sums.left += 1
        sums.wait(waited)

    def _refused(self, record: Mapping[str, Any], at: float) -> None:
        self._of(self._owner(record), at).refused += 1

    def _turn(self, record: Mapping[str, Any], at: float) -> None:
        self._of(self._owner(record), at).turns += 1

    def _paused(self, record: Mapping[str, Any], at: float) -> None:
        """No time is counted until the user goes on."""
        for owner in self._owners_of(int(record["uid"])):
            for day, seconds in divide(self.busy[owner], at, self._calendar):
                self.sums.setdefault((day, owner), Sums()).gpu += seconds
            self.busy[owner] = PAUSED
            self.changed = True

    def _resumed(self, record: Mapping[str, Any], at: float) -> None:
        for owner in self._owners_of(int(record["uid"])):
            self.busy[owner] = at
            self.changed = True
            for day, seconds in divide(at - float(record["seconds"]), at, self._calendar):
                self.sums.setdefault((day, owner), Sums()).paused += seconds

    def _owners_of(self, uid: int) -> list[Owner]:
        """The user, and the user's jobs, as far as they have clients."""
        return [owner for owner in self.busy if uid in (owner, getattr(owner, "uid", None))]


_RULES: dict[str, Callable[[Accounts[Any], Mapping[str, Any], float], None]] = {
    "client.connected": Accounts._connected,
    "client.ended": Accounts._ended,
    "client.left": Accounts._left,
    "client.refused": Accounts._refused,
    "turn.began": Accounts._turn,
    "user.paused": Accounts._paused,
    "user.resumed": Accounts._resumed,
}
