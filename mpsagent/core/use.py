"""What clients make of the GPUs: those at work between two looks at NVML's counters get what these have counted.

Utilisation is the GPU's: in turns that of one user, together and apart that of all users at work there, and it is
marked so. NVML does not say it of each server: of two servers beside each other it charged one with nearly all
(an H200, 2026-11-23). Energy is divided among the processes at work, by time, apart first evenly among the users.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mpsagent.core import transitions as tr
from mpsagent.core.inputs import Worked
from mpsagent.core.model import Client, Key, Parted, State, Use

IDLE = 0.01
"""A utilisation below that counts as none: NVML counts in percent."""
TOLD_EVERY = 3600.0
"""Seconds after which the use of a client that goes on is put on record: an agent that is killed loses no more."""
MOST_PARTED, PARTED_FOR = 256, 60.0
"""Clients that have ended whose last use is still to be counted, and for how long that may take."""


def parted(state: State, client: Client, at: float) -> tuple[Parted, ...]:
    """With one more that has ended: what it used since the last look is not known yet."""
    if state.worked is None:
        return ()
    kept = [one for one in state.parted if at < one.at + PARTED_FOR]
    return (*kept, Parted(client, at))[-MOST_PARTED:]


def counted(state: State, event: Worked, out: list[tr.Transition]) -> State:
    """The state after a look."""
    before = state.worked
    if before is None or not event.work or event.at <= before.at:
        return replace(state, worked=event) if before is None and event.work else state
    there = [(one, *_span(one, before.at, event.at)) for one in state.clients.values()]
    there += [(one.client, *_span(one.client, before.at, min(one.at, event.at))) for one in state.parted]
    uses = _divided(state, before, event, [one for one in there if one[2] > one[1]])
    clients, waits = {}, []
    for pid, client in state.clients.items():
        use = uses.get((pid, client.peer.start), client.use._replace(utilization=None, idle_since=None))
        if event.at >= client.since + TOLD_EVERY * (1 + use.told):
            out += _told(client, use, event.at)
            use = Use(use.utilization, use.idle_since, told=int((event.at - client.since) // TOLD_EVERY))
        clients[pid] = replace(client, use=use)
    for client, at in state.parted:
        use = uses.get((client.pid, client.peer.start), client.use)
        if at > event.at:  # it ended after that
            waits.append(Parted(replace(client, use=use), at))
        else:
            out += _told(client, use, event.at, over=True)
    return replace(state, worked=event, parted=tuple(waits), clients=clients)


def owed(state: State, at: float) -> list[tr.Transition]:
    """What is not on record yet: for the end of an agent."""
    told = [one for client in state.clients.values() for one in _told(client, client.use, at)]
    return told + [found for one in state.parted for found in _told(one.client, one.client.use, at, over=True)]


def _told(client: Client, use: Use, at: float, *, over: bool = False) -> list[tr.Transition]:
    if not (use.seconds or use.energy):
        return []
    sums = round(use.seconds, 3), round(use.busy, 3), round(use.energy, 1)
    # its control daemon may have been closed since then
    return [tr.ClientUsed(at, client.pid, client.uid, *sums, use.shared, over, client.job, daemon=client.daemon)]


def _span(client: Client, begin: float, end: float) -> tuple[float, float]:
    """From when to when it was at work."""
    return max(begin, client.since), min(one for one in (end, client.frozen, client.detached) if one is not None)


Span = tuple[Client, float, float]


def _divided(state: State, before: Worked, event: Worked, there: list[Span]) -> dict[tuple[int, int], Use]:
    """The use of those who were at work, by pid and start."""
    if not there:
        return {}
    seconds, busy, energy = _done(state, before, event)
    first, last = _union(there)
    span = event.at - before.at
    energy *= (last - first) / span  # a GPU that is free uses some, too; a look may come a second after an end
    if first > before.at:  # the GPU was free at first
        busy *= (last - first) / span
    ratio = None if not seconds else min(1.0, busy / seconds * span / (last - first))
    daemons: dict[Key, list[Span]] = {}
    for one in there:
        daemons.setdefault(one[0].daemon, []).append(one)
    lengths = {key: end - begin for key, (begin, end) in ((key, _union(mine)) for key, mine in daemons.items())}
    joules = {
        key: energy * lengths[key] / sum(lengths.values()) / sum(end - begin for _, begin, end in mine)
        for key, mine in daemons.items()
    }  # fmt: skip
    users: dict[int, list[Span]] = {}
    for one in there:
        users.setdefault(one[0].uid, []).append(one)
    unions = {uid: _union(mine) for uid, mine in users.items()}
    found = {}
    for uid, mine in users.items():
        since, until = unions[uid]
        shared = any(other != uid and since < them[1] and them[0] < until for other, them in unions.items())
        of_user = sum(end - begin for _, begin, end in mine)
        for client, begin, end in mine:
            use, part = client.use, end - begin
            counts = 0.0 if ratio is None else (until - since) * part / of_user
            idle = None if ratio is None or ratio >= IDLE else begin if use.idle_since is None else use.idle_since
            found[client.pid, client.peer.start] = Use(
                ratio, idle, use.seconds + counts, use.busy + counts * (ratio or 0.0),
                use.energy + joules[client.daemon] * part, use.shared or shared, use.told,
            )  # fmt: skip
    return found


def _union(spans: Iterable[Span]) -> tuple[float, float]:
    """Between two looks users do not come and go again: they are looked for when that changes."""
    spans = list(spans)
    return min(begin for _, begin, _ in spans), max(end for _, _, end in spans)


def _done(state: State, before: Worked, event: Worked) -> tuple[float, float, float]:
    """What our GPUs did: seconds that were counted, busy ones, joules. Of several GPUs the sum."""
    seconds = busy = energy = 0.0
    for uuid in (device.uuid for device in state.devices):
        old, new = before.work.get(uuid), event.work.get(uuid)
        if old is not None and new is not None:
            seconds += new.seconds - old.seconds
            busy += new.busy - old.busy
            energy += max(0.0, new.energy - old.energy)
    return seconds, busy, energy
