"""Who waits, next one first, and why: the reason of the rule that holds them, and how the table's bounds are used up.

One pass over the held connections: thousands may be there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from mpsagent.core import caps, pause_room
from mpsagent.core.admission import NEXT, hold, holds
from mpsagent.core.bounds import BoundUse, bound, use_of
from mpsagent.core.full_server import kept_out
from mpsagent.core.model import Held
from mpsagent.core.rule import Reason
from mpsagent.core.view import View

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


def waiting(view: View, now: float) -> tuple[Waiting, ...]:
    """Whose turn it is, then those who wait for theirs, then those who are denied."""
    state, found = view.state, list[Waiting]()
    present = state.held.users()
    mine = [view.turn.uid] if view.turn is not None and view.turn.uid in present else []
    users = dict.fromkeys([*mine, *view.waiting(), *present])
    never = _never(view)
    if not users and not never:  # a page is made each second
        return ()
    everybody, use = next(holds(view, now), None), use_of(view)
    at = None if everybody is not None else _free(view, now)
    out = None if everybody is not None else kept_out(view)
    for uid in users:
        line = state.held.line(uid)
        paused = [client.pid for client in state.clients_of_user(uid)] if uid in view.suspended else []
        pids = dict.fromkeys([*paused, *(one.peer.pid for one in line)])
        why, turn = _why(view, uid, line, everybody, use, now), None
        if at is not None and uid not in mine and not view.denied(uid) and view.identified(uid):
            span = pause_room.longest(view, uid)
            turn, at = at, None if span is None else at + span + pause_room.leaving(view, uid)
        if out is not None and uid == out.uid:
            if out.client is None or out.due is None:
                why = why._replace(text=f"{why.text}; no time limit bounds this wait (turn.time_limit)")
            else:
                turn = max(now, out.due) + pause_room.leaving(view, out.client.uid)
        lifted = ((pid, caps.lifted(view, pid)[1]) for pid in pids if pid in state.lifts) if state.lifts else ()
        words = next((f"; process {pid}: {words}" for pid, words in lifted if words), None)
        why = why if words is None else why._replace(text=why.text + words)
        for held in never.pop(uid, ()):
            pids.setdefault(held.peer.pid)
            why = why._replace(text=f"{why.text}; {_why_never(held).text}")
        since = view.suspended[uid] if uid in view.suspended else line[0].since
        shown = tuple(islice(pids, SHOWN_PIDS))
        found.append(Waiting(uid, since, len(pids), shown, why, turn))
    for uid, kept in never.items():
        pids = dict.fromkeys(one.peer.pid for one in kept)
        shown = tuple(islice(pids, SHOWN_PIDS))
        found.append(Waiting(uid, kept[0].since, len(pids), shown, _why_never(kept[0]), None))
    return tuple(found)


def _never(view: View) -> dict[int, list[Held]]:
    """Return the connections that are never handed over, by user."""
    found: dict[int, list[Held]] = {}
    for held in view.never():
        found.setdefault(held.uid, []).append(held)
    return found


def _why_never(held: Held) -> Reason:
    held_on, pid = "it is held until it exits; end it, and", held.peer.pid
    if held.never == "debugged":
        text = f"process {pid} is being debugged, and would run without MPS and without limits: {held_on}"
        return Reason("debugged", f"{text} debug on a GPU without mpsagent")
    text = f"process {pid} says that it is of a kind that mpsagent does not know: {held_on}"
    return Reason("unknown", f"{text} report this with the driver's version")


def _why(view: View, uid: int, line: Sequence[Held], everybody: Reason | None, use: BoundUse, now: float) -> Reason:
    if any(one.handing is not None for one in line):
        return Reason("handover", "is being handed over to MPS")
    own = hold(view, uid)
    if everybody is not None and not view.denied(uid):
        unmade = view.unmade.get(uid) if everybody.word == "daemon" else None
        return (
            everybody
            if unmade is None
            else Reason("daemon", f"this user's own control daemon cannot be started: {unmade}")
        )
    if own is not None:
        return own
    if view.ends_soon(uid) and not any(one.of_client for one in line):
        return Reason("turn", "this user's own turn is about to end: new processes wait for the next one")
    if (until := view.state.slowed.get(uid, now)) > now:
        text = (
            "slowed down, because this user's last processes delayed other users: they started slowly or died at work"
        )
        return Reason("slowed", text, until=until)
    return bound(view, uid, line, use) or NEXT


def _free(view: View, now: float) -> float | None:
    """When the policy takes the GPU from the present user; None: it says no time, or users may overtake others."""
    if view.together or view.ranked:
        return None
    if view.turn is None:
        return now
    return None if view.turn.over is None else max(now, view.turn.over)
