"""GPU time of each user in the last day, for ``queue_order = "fair-share"``: when a user had a client at work.

Counted in whole hours that are forgotten one by one, for a bounded number of users; durable, see `agent.saved`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core.rule import Decision
from mpsagent.core.view import View

HOUR = 3600.0
HOURS = 24
MOST_USERS = 1024
"""Of more, those who used the least are forgotten."""

Hours = Mapping[int, float]
"""Seconds by hour, which is a number of hours since the epoch."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``hours``: what has been counted, by user; ``since``: from when users at work are still to be counted;
    ``spent``: the sum of ``hours``; ``hour``: the present one."""

    hours: Mapping[int, Hours] = field(default_factory=dict)
    since: Mapping[int, float] = field(default_factory=dict)
    spent: Mapping[int, float] = field(default_factory=dict)
    hour: int = 0


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    working = {
        client.uid for client in view.state.clients.values() if client.detached is None and client.frozen is None
    }
    hour = int(now // HOUR)
    if working == memory.since.keys() and hour == memory.hour:
        return Decision(memory)
    over = memory.since if hour != memory.hour else {uid: memory.since[uid] for uid in memory.since.keys() - working}
    counted = [(uid, since) for uid, since in over.items()]
    since = {uid: now if uid in over else memory.since.get(uid, now) for uid in working}
    return Decision(replace(count(memory, counted, now), since=since, hour=hour))


def count(memory: Memory, spans: Iterable[tuple[int, float]], now: float) -> Memory:
    """With the time of these users from then until now; without what is older than a day, or of the future: the clock
    was ahead when that was counted."""
    newest = int(now // HOUR)
    oldest = newest - HOURS + 1
    hours = {
        uid: {at: spent for at, spent in one.items() if oldest <= at <= newest} for uid, one in memory.hours.items()
    }
    for uid, since in spans:
        mine = hours.setdefault(uid, {})
        begin = max(since, oldest * HOUR)
        while begin < now:
            at = int(begin // HOUR)
            end = min(now, (at + 1) * HOUR)
            mine[at] = mine.get(at, 0.0) + end - begin
            begin = end
    spent = {uid: sum(one.values()) for uid, one in hours.items() if one}
    kept = sorted(spent, key=spent.__getitem__, reverse=True)[:MOST_USERS]
    return replace(memory, hours={uid: hours[uid] for uid in kept}, spent={uid: spent[uid] for uid in kept})


def spent(memory: Memory, uid: int, now: float) -> float:
    """Of one user, with the time of clients at work."""
    working = [(uid, memory.since[uid])] if uid in memory.since else []
    return count(memory, working, now).spent.get(uid, 0.0)
