"""Who waits, next one first, and why: the reason of the rule that holds them, and how the table's bounds are used up.

One pass over the held connections: thousands may be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mpsagent.core import caps, memory_use, pause_room
from mpsagent.core.admission import NEXT, hold, holds
from mpsagent.core.model import Held
from mpsagent.core.rule import Reason
from mpsagent.core.view import View
from mpsagent.mps.limits import Limits, Total
from mpsagent.mps.units import limit_text
from mpsagent.policy.policy import Rules
from mpsagent.wire.link import User

SHOWN_PIDS = 64


class Waiting(NamedTuple):
    """A user with held connections or paused processes. ``pids``: of the first of these ``processes``; ``turn``: when
    the policy gives this user the GPU at the latest, None: it says no time."""

    uid: int
    since: float
    processes: int
    pids: tuple[int, ...]
    why: Reason
    turn: float | None


class _Use(NamedTuple):
    """Of the server's places. ``contexts``: of each user; ``full``: there is no place left."""

    table: Mapping[int, User]
    contexts: dict[int, int]
    full: Reason | None


def waiting(view: View, now: float) -> tuple[Waiting, ...]:
    """Whose turn it is, then those who wait for theirs, then those who are denied."""
    state, found = view.state, list[Waiting]()
    present = state.held.users()
    mine = [view.turn.uid] if view.turn is not None and view.turn.uid in present else []
    users = dict.fromkeys([*mine, *view.waiting(), *present])
    if not users:  # a page is made each second
        return ()
    everybody, use = next(holds(view, now), None), _use(view)
    at = None if everybody is not None else _free(view, now)
    for uid in users:
        line = state.held.line(uid)
        paused = [client.pid for client in state.clients_of_user(uid)] if uid in view.suspended else []
        pids = dict.fromkeys([*paused, *(one.peer.pid for one in line)])
        why, turn = _why(view, uid, line, everybody, use, now), None
        if at is not None and uid not in mine and not view.denied(uid) and view.identified(uid):
            span = pause_room.longest(view, uid)
            turn, at = at, None if span is None else at + span
        lifted = ((pid, caps.lifted(view, pid)[1]) for pid in pids if pid in state.lifts) if state.lifts else ()
        words = next((f"; process {pid}: {words}" for pid, words in lifted if words), None)
        why = why if words is None else why._replace(text=why.text + words)
        since = view.suspended[uid] if uid in view.suspended else line[0].since
        shown = tuple(islice(pids, SHOWN_PIDS))
        found.append(Waiting(uid, since, len(pids), shown, why, turn))
    return tuple(found)


def _why(view: View, uid: int, line: Sequence[Held], everybody: Reason | None, use: _Use, now: float) -> Reason:
    if any(one.handing is not None for one in line):
        return Reason("handover", "is being handed over to MPS")
    own = hold(view, uid)
    if everybody is not None and not view.denied(uid):
        unmade = view.unmade.get(uid) if everybody.word == "apart" else None
        return (
            everybody
            if unmade is None
            else Reason("apart", f"this user's own control daemon cannot be started: {unmade}")
        )
    if own is not None:
        return own
    if (until := view.state.slowed.get(uid, now)) > now:
        text = "other users come first, because this user's last processes took long to meet their server, or never did"
        return Reason("slowed", text, until=until)
    return _bound(view, uid, line, use) or NEXT


def _free(view: View, now: float) -> float | None:
    """When the policy takes the GPU from the present user; None: it says no time, or users may overtake others."""
    if view.together or view.ranked:
        return None
    if view.turn is None:
        return now
    return None if view.turn.ends is None else max(now, view.turn.ends)


# --- bounds of the table, which the gate keeps ------------------------------------------------------------------------


def _use(view: View) -> _Use:
    contexts, full = view.contexts(), None
    if view.full:
        most = sorted(contexts.items(), key=lambda one: -one[1])
        whose = [f"{count} context{'s' * (count > 1)} of user {uid}" for uid, count in most[:3]]
        others = [f"{sum(count for _, count in most[3:])} of others"] if most[3:] else []
        full = Reason("full", f"the server is full: {', '.join([*whose, *others])}")
    table = {} if view.sent is None else view.sent[1].users
    return _Use(table, contexts, full)


def _bound(view: View, uid: int, line: Sequence[Held], use: _Use) -> Reason | None:
    """What keeps the gate from handing over the next connection of a user whom the table names."""
    user = use.table.get(uid)
    if user is not None and user.max_contexts is not None and use.contexts.get(uid, 0) >= (most := user.max_contexts):
        return Reason("max_contexts", f"this user may have {most} context{'s' * (most > 1)} on a server at a time")
    new = next((one for one in line if not one.of_client), None)
    if new is None:
        return use.full or Reason("next", "a further context of a client is let in next")
    for name, whose, clients in view.bounds(new.peer) if view.rules(uid).enforce_limits else ():
        who, limit = "this user" if isinstance(whose, Rules) else name, whose.max_clients
        if limit is not None and len(clients) >= limit:
            count = "1 process" if limit == 1 else f"{limit} processes"
            return Reason("max_clients", f"{who} may have {count} at a time")
        total, more = whose.total(view.state.devices) or Total(), view.limits_of(new.peer)
        used = [memory_use.counted(view.state, client) or view.limits_of(client.peer) for client in clients]
        if not total.fits((), more):
            return Reason("total", f"no process of {who} ever fits in its total (mpsagent-cli policy check)")
        if not total.fits(used, more):
            return Reason("total", f"{who}'s total is in use: {_total_text(total, used, more)}")
    if use.full is None and line[0].failed is not None:
        return Reason("handover_failed", f"could not be handed over to MPS, and is tried again: {line[0].failed}")
    return use.full


def _total_text(total: Total, used: Sequence[Limits], more: Limits) -> str:
    parts = []
    if total.threads is not None:
        needs = total.used([more])
        parts.append(f"{total.used(used):g} of {total.threads:g} % of threads, the next process needs {needs:g}")
        if needs > more.threads:
            parts[-1] += f" (its limit is {more.threads:g}, but MPS gives no process less)"
    for device, most in sorted(total.memory.items()):
        has_bytes = sum(one.memory.get(device, 0) for one in used)
        has_text, its = (limit_text(size) if size else "0" for size in (has_bytes, more.memory.get(device, 0)))
        parts.append(f"{has_text} of {limit_text(most)} on device {device}, the next process needs {its}")
    return "; ".join(parts)
