"""The history in rows: a session for each process from its coming to its end, and for each turn, pause and fault. Pure.

They are made of records in the order of time; only what has not ended is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpsagent.core.rule import of_turns
from mpsagent.core.sentences import sentence
from mpsagent.policy import apart

Record = Mapping[str, Any]
Key = tuple[str, str | None, int]
"""Kind, instance, and the process, user or server. No two sessions of the same are open at a time."""


@dataclass(slots=True)
class Session:
    """``number``: of the record with which it began. ``kind``: client, turn, pause or fault. ``instance`` None: there
    is one. ``pid``: of a fault, the server's; 0 for users. ``passed``: let in, or begun; None: it waited and no more.
    ``outcome``: of a client :class:`mpsagent.core.model.Outcome`, left or refused; of a turn forced or left; of a fault
    recovered or ended; unknown: the end was not seen. ``more``: limits, lease, the most memory seen and the use of a
    client, and the rule by which it is ended; gap and user before of a turn; number of clients of a pause."""

    number: int
    kind: str
    instance: str | None
    uid: int | None
    pid: int
    came: float
    passed: float | None = None
    ended: float | None = None
    outcome: str | None = None
    why: str | None = None
    job: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        who = self.pid if self.kind in ("client", "fault") else self.uid
        return self.kind, self.instance, -1 if who is None else who

    def end(self, at: float, outcome: str, why: str | None = None) -> None:
        self.ended, self.outcome, self.why = max(at, self.passed or self.came), outcome, why or self.why


def how(outcome: str | None, rule: str | None) -> str:
    """How a client ended, in one word. ``rule``: by which mpsagent has ended it; the policy's key is said of it."""
    if outcome != "ended":
        return {None: "running", "ok": "finished", "faulted": "fault"}.get(outcome, str(outcome))
    words = (rule or "ended").split(".")
    return "turn" if of_turns(rule or "") else "fault" if words[0] == "timeouts" else words[-1]


MOST_GONE = 1000


def with_use(more: Mapping[str, Any], seconds: float, busy: float, energy: float, shared: bool) -> dict[str, Any]:
    """A client's use, and what it has used since: the GPU was ``busy`` of the seconds ``counted``."""
    sums = {"counted": seconds, "busy": busy, "energy": energy}
    return {
        **more, **{name: round(more.get(name, 0.0) + value, 3) for name, value in sums.items()},
        "shared": bool(shared or more.get("shared")),
    }  # fmt: skip


class Sessions:
    """``open``: what has not ended. ``changes``, ``faults``: by instance, the last turn of another user than before,
    and the last fault. ``last``: time of the last record. ``seen``: when the agent before was last heard of, while it
    is looked what happened since: who ended while no agent saw it is counted until then."""

    def __init__(self, rows: Iterable[Session] = ()) -> None:
        self.open: dict[Key, Session] = {}
        self._gone: dict[Key, Session] = {}
        """The clients that ended last, until it is known what they have used."""
        self.changes: dict[str | None, Session] = {}
        self.faults: dict[str | None, Session] = {}
        self.last = 0.0
        self.seen: float | None = None
        self._asked: set[int] = set()
        """Numbers of the clients that MPS is asked to terminate and that have got no signal."""
        self._ordered: dict[str | None, tuple[float, str]] = {}
        """The last order that ends servers: a client that loses its server by it has had no fault."""
        for one in rows:
            self._put(one)

    def take(self, record: Record) -> list[Session]:
        """What a record changes. One of another kind, or one that lacks something, changes nothing."""
        rule = _RULES.get(record["kind"])
        try:
            self.last = float(record["at"])
            found = [] if rule is None else rule(self, record, self.last)
        except (KeyError, TypeError, ValueError):
            return []
        for one in found:
            self._put(one)
        return found

    def settle(self, there: Collection[Key], at: float) -> list[Session]:
        """Ends what is not there any more although no record says so."""
        gone = [one for key, one in self.open.items() if key not in there]
        for one in gone:
            one.end(at, "left" if one.passed is None else "unknown")
            self._put(one)
        return gone

    def place(self, first: str | None) -> None:
        """There is one instance (None) now, or several, of which the first has what no instance had."""
        for one in [*self.open.values()]:
            del self.open[one.key]
            one.instance = first and (one.instance or first)
            self.open[one.key] = one
        if first is not None and None in self._ordered:
            self._ordered.setdefault(first, self._ordered.pop(None))

    def _put(self, one: Session) -> None:
        if one.ended is None:
            self.open[one.key] = one
        elif self.open.get(one.key) is one:
            del self.open[one.key]
            self._asked.discard(one.number)
            if one.kind == "client" and one.passed is not None:
                self._gone[one.key] = one
                if len(self._gone) > MOST_GONE:
                    del self._gone[next(iter(self._gone))]
        if one.kind == "fault":
            self.faults[one.instance] = one
        elif one.kind == "turn" and one.more.get("before", one.uid) != one.uid:  # of whose beginning there is a record
            self.changes[one.instance] = one

    def _new(self, kind: str, record: Record, began: float) -> Session:
        uid = None if kind == "fault" and record.get("uid") is None else int(record["uid"])
        pid = int(record["server"]) if kind == "fault" else int(record["pid"]) if kind == "client" else 0
        passed = None if kind == "client" else began
        return Session(record["seq"], kind, record.get("instance"), uid, pid, began, passed)

    def _of(self, kind: str, record: Record, began: float) -> Session:
        """Return the open session of the record, or a new session that began then. It may have begun when no instance
        was named, because there was only one."""
        new = self._new(kind, record, began)
        kind, instance, who = new.key
        if instance is not None and new.key not in self.open and (known := self.open.pop((kind, None, who), None)):
            known.instance = instance
            self.open[known.key] = known
        return self.open.get(new.key, new)

    # --- clients

    def _waiting(self, record: Record, at: float) -> list[Session]:
        one = self._of("client", record, at)
        if one.passed is None and one.came == at:
            return [one]
        one.end(at, "left" if one.passed is None else "unknown")  # its number is used again
        return [one, self._new("client", record, at)]

    def _connected(self, record: Record, at: float) -> list[Session]:
        waited = float(record.get("waited", 0.0))
        one, found = self._of("client", record, at), []
        if one.passed is not None:  # as above
            one.end(at, "unknown")
            found, one = [one], self._new("client", record, at)
        one.came, one.passed, one.job = at - waited if waited else one.came, at, record.get("job")
        one.more = {name: record[name] for name in ("limits", "lease") if record.get(name) is not None}
        return [*found, one]

    def _ended(self, record: Record, at: float) -> list[Session]:
        outcome, began = str(record["outcome"]), at - float(record.get("seconds", 0.0))
        one = self._of("client", record, began - float(record.get("waited", 0.0)))
        if one.passed is None:
            one.passed, one.job = began, record.get("job")
        # a user's own instance: orders are on record for its section
        section = None if one.instance is None else apart.section_of(one.instance, one.uid)
        ordered, why = self._ordered.get(one.instance) or self._ordered.get(section, (-1.0, ""))
        until = at if outcome != "unknown" or self.seen is None else min(at, self.seen)
        one.end(until, outcome, why if outcome == "lost" and ordered >= one.passed else None)
        return [one]

    def _used(self, record: Record, at: float) -> list[Session]:
        key = "client", record.get("instance"), int(record["pid"])
        one = self._gone.pop(key, None) if record["over"] else self.open.get(key)
        if one is None:
            return []
        seconds, busy, energy = (float(record[name]) for name in ("seconds", "busy", "energy"))
        one.more = with_use(one.more, seconds, busy, energy, bool(record["shared"]))
        return [one]

    def _turned_away(self, record: Record, at: float) -> list[Session]:
        came, outcome = at - float(record.get("waited", 0.0)), record["kind"].removeprefix("client.")
        one = self._of("client", record, came)
        if one.passed is not None:  # another connection of a client
            one = self._new("client", record, came)
        one.job = record.get("job")
        one.end(at, outcome, record.get("why"))
        return [one]

    def _lost(self, record: Record, at: float) -> list[Session]:
        """It went away in its hand-over; one that lives has been let in before."""
        one = self.open.get(("client", record.get("instance"), int(record["pid"])))
        if one is None or one.passed is not None or not record.get("lost"):
            return []
        one.end(at, "left", record.get("why"))
        return [one]

    def _ending(self, record: Record, at: float) -> list[Session]:
        """Why a client is ended: known when MPS is asked, because its answer may come after the client's end."""
        one = self.open.get(("client", record.get("instance"), int(record.get("pid", 0))))
        if one is None:
            return []
        match record["kind"], record["action"]:
            case ("action", "TerminateClient") | ("action.done", "TerminateClient" | "SignalClient"):
                one.why = str(record.get("reason") or "") or None
                one.more["rule"] = str(record.get("rule") or "")
                if record["kind"] == "action":
                    self._asked.add(one.number)
                else:
                    self._asked.discard(one.number)
            case "action.failed", "TerminateClient" if one.number in self._asked:
                one.why = None
                one.more.pop("rule", None)
            case _:
                return []
        return [one]

    def _order(self, record: Record, at: float) -> list[Session]:
        self._ordered[record.get("instance")] = at, sentence(record)
        return []

    def _order_over(self, record: Record, at: float) -> list[Session]:
        """A drain that has been resumed ends no server."""
        self._ordered.pop(record.get("instance"), None)
        return []

    def _moved(self, record: Record, at: float) -> list[Session]:
        """What waits is at another instance, or at another control daemon of the only one."""
        what, there = ("client", record["uid"], None), (record["before"], None)
        mine = [one for one in self.open.values() if one.instance in there]
        found = [one for one in mine if (one.kind, one.uid, one.passed) == what]
        for one in found:
            del self.open[one.key]
            one.instance = record["instance"]
        return found

    # --- turns, pauses, faults

    def _began(self, record: Record, at: float) -> list[Session]:
        new, before = self._new("turn", record, at), self.changes.get(record.get("instance"))
        found = [one for one in self.open.values() if (one.kind, one.instance) == ("turn", new.instance)]
        for one in found:
            one.end(at, "unknown")
        new.more = {"gap": record.get("gap"), "before": None if before is None else before.uid}
        return [*found, new]

    def _over(self, record: Record, at: float) -> list[Session]:
        kind = {"turn.ended": "turn", "user.resumed": "pause"}.get(record["kind"], "fault")
        one = self._of(kind, record, at - float(record["seconds"]))
        outcome = {"turn": "forced" if record.get("forced") else "left", "pause": "resumed"}.get(kind)
        one.end(at, outcome or ("recovered" if record.get("recovered") else "ended"))
        return [one]

    def _opened(self, record: Record, at: float) -> list[Session]:
        one = self._of("fault" if record["kind"] == "server.fault" else "pause", record, at)
        if one.kind == "pause":
            one.more = {"clients": record["clients"]}
        return [one]


_RULES: dict[str, Callable[[Sessions, Record, float], list[Session]]] = {
    "client.waiting": Sessions._waiting,
    "client.connected": Sessions._connected,
    "client.ended": Sessions._ended,
    "client.used": Sessions._used,
    "client.left": Sessions._turned_away,
    "client.refused": Sessions._turned_away,
    "client.handover_failed": Sessions._lost,
    "user.moved": Sessions._moved,
    "action": Sessions._ending,
    "action.done": Sessions._ending,
    "action.failed": Sessions._ending,
    "control.restart_ordered": Sessions._order,
    "drain.ordered": Sessions._order,
    "drain.resumed": Sessions._order_over,
    "turn.began": Sessions._began,
    "turn.ended": Sessions._over,
    "user.paused": Sessions._opened,
    "user.resumed": Sessions._over,
    "server.fault": Sessions._opened,
    "server.fault_over": Sessions._over,
}
