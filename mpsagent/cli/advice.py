"""What the history says for another way of sharing and other limits, with the figures that it rests on. Pure.

Seconds are of the clock on the wall: a user who waits with ten processes waits once, and two users who wait at the same
time wait twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mpsagent.cli.wording import many
from mpsagent.mps.units import duration_text, limit_text

Json = dict[str, Any]
CLIENTS, HOURS = 20, 12.0
"""Fewer clients, or less time between the first and the last event, say nothing about a policy."""
MUCH, LONG = 0.05, 600.0
"""Waiting is worth a change from this part of the time in use, and these seconds, on."""
ALONE, HANDED = 0.9, 70.0
"""A user is nearly always alone from this part of the time in use on; less than this share in percent is little."""
MEMORY = 0.5
"""Whoever uses less than this part of a memory limit could do with half of it."""


@dataclass(slots=True)
class Seen:
    """``busy``: seconds with a client at work; ``at_once``: those by how many users were at work; ``wanted``: by how
    many were at work or waited. ``waited``: users' seconds at the gate, ``behind``: of these while another user was at
    work, ``longest``: one process's. ``overlap``: users' seconds that turns would have made them wait. ``handed``: the
    mean share of threads that was in use, percent, at most 100 at a time. ``faulted``, ``forced``: clients that ended
    so. ``policies``: how often one was loaded. ``memory``: the most that a client used, and its limit, where
    both are known."""

    begin: float
    end: float
    clients: int = 0
    users: set[int] = field(default_factory=set)
    busy: float = 0.0
    at_once: dict[int, float] = field(default_factory=dict)
    wanted: dict[int, float] = field(default_factory=dict)
    waited: float = 0.0
    behind: float = 0.0
    longest: float = 0.0
    overlap: float = 0.0
    handed: float = 0.0
    faults: int = 0
    faulted: int = 0
    forced: int = 0
    policies: int = 0
    memory: list[tuple[int, int]] = field(default_factory=list)

    @property
    def hours(self) -> float:
        return (self.end - self.begin) / 3600.0

    @property
    def usual(self) -> int:
        """At most so many users wanted the GPU at once in 95 % of the time in use."""
        left = 0.95 * sum(self.wanted.values())
        for count in sorted(self.wanted):
            left -= self.wanted[count]
            if left <= 0:
                return count
        return max(self.wanted, default=0)


def seen(sessions: Iterable[Mapping[str, Any]], policies: int = 0) -> Seen:
    """Of one instance, as the API gives them."""
    found = Seen(0.0, 0.0, policies=policies)
    steps: list[tuple[float, int, int, float, int]] = []  # at, uid, clients more, percent more, waiting more
    for one in sessions:
        found.faults += one["kind"] == "fault"
        if one["kind"] != "client" or one["outcome"] == "refused":
            continue
        came, uid, waited = datetime.fromisoformat(one["came"]).timestamp(), one["uid"], one["waited"]
        passed = came + waited
        end = passed + one["worked"]
        found.begin, found.end = min(found.begin or came, came), max(found.end, end)
        found.longest = max(found.longest, waited)
        steps += [(came, uid, 0, 0.0, 1), (passed, uid, 0, 0.0, -1)]
        if one["began"] is not None:
            threads = float((one.get("limits") or {}).get("threads", 100.0))
            steps += [(passed, uid, 1, threads, 0), (end, uid, -1, -threads, 0)]
            found.clients += 1
            found.users.add(uid)
            found.faulted += one["outcome"] == "faulted"
            found.forced += one["outcome"] == "ended"
            sizes = list(((one.get("limits") or {}).get("memory") or {}).values())
            if sizes and one.get("memory"):
                found.memory.append((one["memory"], max(sizes)))
    _sweep(found, sorted(steps))
    return found


def _sweep(found: Seen, steps: list[tuple[float, int, int, float, int]]) -> None:
    at_work, waiting = Counter[int](), Counter[int]()
    threads = handed = 0.0
    before = steps[0][0] if steps else 0.0
    for at, uid, clients, percent, waits in steps:
        seconds, before = at - before, at
        if seconds > 0:
            busy, queue = len(at_work), len(waiting)
            found.waited += seconds * queue
            if busy:
                found.busy += seconds
                wanted = len(at_work.keys() | waiting.keys())
                found.at_once[busy] = found.at_once.get(busy, 0.0) + seconds
                found.wanted[wanted] = found.wanted.get(wanted, 0.0) + seconds
                found.overlap += seconds * (busy - 1)
                found.behind += seconds * sum(busy > (one in at_work) for one in waiting)
                handed += seconds * min(100.0, threads)
        threads += percent
        for counter, more in ((at_work, clients), (waiting, waits)):
            counter[uid] += more
            if not counter[uid]:
                del counter[uid]
    found.handed = handed / found.busy if found.busy else 0.0


def facts(one: Seen) -> Json:
    return {
        "hours": round(one.hours, 1), "clients": one.clients, "users": len(one.users), "busy_seconds": round(one.busy),
        "users_at_once_usual": one.usual, "users_at_once_most": max(one.at_once, default=0),
        "alone_seconds": round(one.at_once.get(1, 0.0)), "threads_in_use_percent": round(one.handed, 1),
        "waited_seconds": round(one.waited), "waited_behind_others_seconds": round(one.behind),
        "longest_wait_seconds": round(one.longest), "turns_would_cost_seconds": round(one.overlap),
        "faults": one.faults, "faulted": one.faulted, "forced": one.forced,
        "policies_loaded": one.policies,
    }  # fmt: skip


def advise(one: Seen, sharing: str) -> Json:
    """``sharing``: the way that was in force. ``advice``: each with ``what``, ``why`` and what it costs; none where
    nothing better is to be seen."""
    enough = one.clients >= CLIENTS and one.hours >= HOURS
    found = [*(_turns(one) if sharing == "turns" else _at_once(one, sharing)), *_memory(one)] if enough else []
    return {"sharing": sharing, "enough": enough, "facts": facts(one), "advice": found}


def _much(seconds: float, one: Seen) -> bool:
    return seconds >= LONG and seconds >= MUCH * one.busy


def _turns(one: Seen) -> list[Json]:
    if not _much(one.behind, one):
        return []
    each = _each(one.usual)
    why = (
        f"users waited {duration_text(one.behind)} in all while another had the GPU, in {duration_text(one.busy)} of "
        f"use; the longest wait was {duration_text(one.longest)}, and for 95 % of the time at most {one.usual} "
        f"wanted it at once"
    )
    cost = f"each client has {each} % of the threads, and a fault hits all users: there were {one.faults}"
    return [_advice(f'sharing = "together", threads = {each} in [limits]', why, cost)]


def _at_once(one: Seen, sharing: str) -> list[Json]:
    found = []
    alone = one.at_once.get(1, 0.0) / one.busy if one.busy else 0.0
    if alone >= ALONE and one.handed < HANDED:
        why = (
            f"one user alone was at work in {alone:.0%} of {duration_text(one.busy)} of use, and only "
            f"{one.handed:.0f} % of the threads were in use"
        )
        each = min(100, 2 * _each(one.usual))
        cost = (
            f'two at once share more often; with sharing = "turns" they would have waited {duration_text(one.overlap)}'
        )
        found.append(_advice(f"threads = {each} in [limits]", why, cost))
    days = max(one.hours / 24.0, 1.0)
    if one.faults >= days and len(one.users) > 1 and sharing != "apart":  # apart they are their users' alone
        span = many(round(days), "day")
        why = f"{one.faults} faults in {span} ended {one.faulted} clients, of all users who were at work"
        cost = (
            f"users would have waited {duration_text(one.overlap)} for each other in {duration_text(one.busy)} of use"
        )
        found.append(_advice('sharing = "turns"', why, cost))
    if _much(one.waited, one):
        why = (
            f"users waited {duration_text(one.waited)} although all may be at work at once, the longest "
            f"{duration_text(one.longest)}: for totals, max_clients, 48 contexts, a fault or a drain"
        )
        found.append(_advice("look at who waits and why, then at total_threads, total_memory and max_clients", why,
                             "more at once on one GPU"))  # fmt: skip
    return found


def _each(users: int) -> int:
    """Percent of the threads, divided evenly."""
    return max(1, round(100 / max(1, users)))


def _memory(one: Seen) -> list[Json]:
    part, used, limit = max(((used / limit, used, limit) for used, limit in one.memory), default=(1.0, 0, 0))
    if part >= MEMORY:
        return []
    why = (
        f"of {many(len(one.memory), 'client')} the fullest used {limit_text(used)} of {limit_text(limit)} ({part:.0%})"
    )
    return [_advice("lower memory in [limits]", why, "who needs more then cannot have it")]


def _advice(what: str, why: str, cost: str) -> Json:
    return {"what": what, "why": why, "cost": cost}
