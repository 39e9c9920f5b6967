"""Who waits at the gate, why, and until when at the latest. Pure.

One pass over the held connections: thousands may be there, and this is asked for often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpsagent.core import caps, over, pause_room
from mpsagent.core.admission import Why, holds
from mpsagent.core.model import user_text
from mpsagent.core.view import SHARED_UID, View
from mpsagent.mps.limits import Limits, Total
from mpsagent.mps.units import limit_text

SHOWN_PIDS = 64


@dataclass(slots=True)
class Group:
    """A user's held connections. ``pids``: their processes, each once; ``further``: all are of processes that passed
    already; ``failed``: why the first one's hand-over did not come about; ``paused``: its processes that are frozen."""

    uid: int
    since: float
    pids: dict[int, None] = field(default_factory=dict)
    handing: bool = False
    further: bool = True
    failed: str | None = None
    paused: int = 0


class _Use(NamedTuple):
    """Of the server's places. ``processes``, ``contexts``: of each user; ``most``: contexts that a user may have;
    ``full``: there is no place left."""

    processes: dict[int, int]
    contexts: dict[int, int]
    most: dict[int, int | None]
    full: Why | None


_NEXT = Why("next", "is let in next")


def groups(view: View) -> list[Group]:
    """Waiting users, next one first: whose turn it is, then those who wait for theirs, then those who are denied."""
    state = view.state
    present = state.queue()
    mine = [view.turn.uid] if view.turn is not None and view.turn.uid in present else []
    order = dict.fromkeys([*mine, *view.waiting(), *present])
    found: list[Group] = []
    for uid in order:
        line = state.held_of(uid)
        paused = [client.pid for client in state.clients_of_user(uid)] if uid in view.suspended else []
        found.append(
            Group(
                uid,
                view.suspended[uid] if paused else line[0].since,
                dict.fromkeys([*paused, *(one.peer.pid for one in line)]),
                any(one.handing is not None for one in line),
                all(one.of_client for one in line),
                line[0].failed if line else None,
                len(paused),
            )
        )
    return found


def reasons(view: View, waiting: Sequence[Group], now: float) -> Iterator[Why]:
    """For each of these, in their order, why it is held at this moment."""
    everybody, use = next(holds(view, now), None), _use(view)
    for group in waiting:
        why = _reason(view, group, everybody, use)
        lifts = [(pid, caps.lifted(view, pid)[1]) for pid in group.pids if pid in view.state.lifts]
        words = next((f"; process {pid}: {words}" for pid, words in lifts if words), "")
        yield why._replace(text=why.text + words)


def _use(view: View) -> _Use:
    processes: dict[int, int] = {}
    for client in view.state.clients.values():
        processes[client.peer.uid] = processes.get(client.peer.uid, 0) + 1
    contexts, full = view.contexts(), None
    if view.full:
        most = sorted(contexts.items(), key=lambda one: -one[1])
        whose = [f"{count} context{'s' * (count > 1)} of {user_text(view.state, uid)}" for uid, count in most[:3]]
        others = [f"{sum(count for _, count in most[3:])} of others"] if most[3:] else []
        full = Why("full", f"the server is full: {', '.join([*whose, *others])}")
    users = () if view.sent is None else view.sent[1].users.values()
    return _Use(processes, contexts, {one.uid: one.max_contexts for one in users}, full)


def _reason(view: View, group: Group, everybody: Why | None, use: _Use) -> Why:
    state, turn, uid = view.state, view.turn, group.uid
    if group.handing:
        return Why("handover", "is being handed over to MPS")
    if view.denied(uid):
        return Why("denied", "is turned away: the policy denies this user MPS")
    if everybody is not None:
        return everybody
    if not view.identified(uid):
        return Why("name", "the name service has not said who this is")
    if view.together:
        return _own(view, group, use)
    if turn is None:
        blocking = [s for s in state.servers.values() if s.uid not in (uid, SHARED_UID)]
        if blocking and not view.shared:
            return Why("server", f"the server of {user_text(state, blocking[0].uid)} is ending")
        return _NEXT
    if turn.uid != uid:
        whose = f"it is the turn of {user_text(state, turn.uid)}"
        if group.paused:
            what = "its process is" if group.paused == 1 else f"its {group.paused} processes are"
            return Why("paused", f"{what} paused (stopped, with their memory): {whose}")
        why = pause_room.misfit(view, uid) if view.may_pause(turn.uid) and uid == view.waiting()[0] else None
        return Why("turn", whose if why is None else f"{whose}, who cannot be paused for it: {why}")
    if not turn.let_in:
        return Why("turn", "this user's own turn is over")
    return _own(view, group, use)


def _own(view: View, group: Group, use: _Use) -> Why:
    """For a user who is let in."""
    state, uid = view.state, group.uid
    most = use.most.get(uid)
    if most is not None and use.contexts.get(uid, 0) >= most:
        return Why("max_contexts", f"this user may have {most} context{'s' * (most > 1)} on a server at a time")
    if group.further:
        return use.full or Why("next", "a further context of a client is let in next")
    rules = view.rules(uid)
    if rules.max_clients is not None and rules.enforce_limits and use.processes.get(uid, 0) >= rules.max_clients:
        count = "1 process" if rules.max_clients == 1 else f"{rules.max_clients} processes"
        return Why("max_clients", f"this user may have {count} at a time")
    total = rules.total(state.devices) if rules.enforce_limits else None
    if total is not None:
        used = [over.counted(state, client) for client in state.clients_of_user(uid)]
        more = next((view.limits_of(one.peer) for one in state.held_of(uid) if not one.of_client), view.limits(uid))
        if not total.fits((), more):
            return Why("total", "no process of this user ever fits in its total (mpsagent-cli policy check)")
        if not total.fits(used, more):
            return Why("total", f"this user's total is in use: {_total_text(total, used, more)}")
    if use.full is not None:
        return use.full
    if group.failed is not None:
        return Why("handover_failed", f"could not be handed over to MPS, and is tried again: {group.failed}")
    return _NEXT


def _total_text(total: Total, used: Sequence[Limits], more: Limits) -> str:
    parts = []
    if total.threads is not None:
        has = sum(one.threads for one in used)
        parts.append(f"{has:g} of {total.threads:g} % of threads, the next process needs {more.threads:g}")
    for device, most in sorted(total.memory.items()):
        has_bytes = sum(one.memory.get(device, 0) for one in used)
        has_text, needs = (limit_text(size) if size else "0" for size in (has_bytes, more.memory.get(device, 0)))
        parts.append(f"{has_text} of {limit_text(most)} on device {device}, the next process needs {needs}")
    return "; ".join(parts)


def expected_turns(view: View, waiting: Sequence[Group], now: float) -> dict[int, float]:
    """By waiting user, when the policy gives it the GPU at the latest; who may wait without end is left out.

    Each user ahead may keep its turn for as long as its own rules say, so a bound ends at the first who never has to
    leave. No bound is given while something else than a turn holds users, nor where users may overtake others.
    """
    turn, at = view.turn, now
    if view.together or view.ranked or next(holds(view, now), None) is not None:
        return {}
    if turn is not None:
        end = pause_room.ends(view, turn)
        if end is None:
            return {}
        at = max(now, end)
    found: dict[int, float] = {}
    for group in waiting:
        uid = group.uid
        if (turn is not None and uid == turn.uid) or view.denied(uid) or not view.identified(uid):
            continue
        found[uid] = at
        rules = view.rules(uid)
        if not has_to_leave(view, uid):
            break
        at += rules.switch_slice if view.may_pause(uid) else (rules.switch_after or 0.0) + rules.switch_grace
    return found


def has_to_leave(view: View, uid: int) -> bool:
    """Whether the policy takes the GPU from this user at some time while others wait. In a drain it does not."""
    return view.state.drain is None and (view.may_pause(uid) or view.rules(uid).has_to_leave)
