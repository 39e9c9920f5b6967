"""Who waits at the gate, why, and until when at the latest. Pure.

One pass over the held connections: thousands may be there, and this is asked for often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpsagent.core.model import State, Status
from mpsagent.core.view import SHARED_UID, View

SHOWN_PIDS = 64


class Why(NamedTuple):
    """``reason``: one word for programs; ``text``: for people."""

    reason: str
    text: str


@dataclass(slots=True)
class Group:
    """A user's held connections. ``pids``: their processes, each once; ``further``: all are of processes that passed
    already."""

    uid: int
    since: float
    pids: dict[int, None] = field(default_factory=dict)
    handing: bool = False
    further: bool = True


def user_text(state: State, uid: int | None) -> str:
    """``alice``, or ``user 1001`` while the name is not known."""
    known = state.identities.get(uid) if uid is not None else None
    if known is not None and known.name is not None:
        return known.name
    return "an unknown user" if uid is None else f"user {uid}"


def groups(view: View) -> list[Group]:
    """Waiting users, next one first: whose turn it is, then those who wait for theirs, then those who are denied."""
    state = view.state
    present = state.queue()
    mine = [view.turn.uid] if view.turn is not None and view.turn.uid in present else []
    order = dict.fromkeys([*mine, *view.waiting(), *present])
    found: list[Group] = []
    for uid in order:
        line = state.held_of(uid)
        found.append(
            Group(
                uid,
                line[0].since,
                dict.fromkeys(one.peer.pid for one in line),
                any(one.handing is not None for one in line),
                all(one.of_client for one in line),
            )
        )
    return found


def reasons(view: View, waiting: Sequence[Group], now: float) -> Iterator[Why]:
    """For each of these, in their order, why it is held at this moment."""
    everybody = _everybody(view, now)
    counts: dict[int, int] = {}
    for client in view.state.clients.values():
        counts[client.peer.uid] = counts.get(client.peer.uid, 0) + 1
    for group in waiting:
        yield _reason(view, group, everybody, counts)


def _everybody(view: View, now: float) -> Why | None:
    """What holds all users alike."""
    state, control = view.state, view.state.control
    if state.gate is not None and not state.gate.synced:
        return Why("gate", "the gate is still telling what it holds")
    if view.given_up is not None:
        return Why("failed", f"is turned away: {view.given_up}")
    if state.drain is not None:
        return Why("drain", "maintenance (drain): nothing new is let in")
    if control is None or not control.proven:
        return Why("control", "the control daemon does not run")
    if control.quitting is not None:
        return Why("control", "the control daemon is quitting")
    if view.faulted(now)[0]:
        faulted = [str(one.pid) for one in state.servers.values() if one.status is Status.FAULT]
        what = f"server {faulted[0]} is in FAULT" if faulted else "a server is only just out of its FAULT"
        return Why("fault", what)
    if view.pause_until is not None and now < view.pause_until:
        failure = state.start_failure
        said = f": {failure.reason}" if failure is not None and failure.reason else ""
        return Why("starts", f"MPS's servers do not start{said}")
    return None


def _reason(view: View, group: Group, everybody: Why | None, counts: dict[int, int]) -> Why:
    state, turn, uid = view.state, view.turn, group.uid
    if group.handing:
        return Why("handover", "is being handed over to MPS")
    if view.denied(uid):
        return Why("denied", "is turned away: the policy denies this user MPS")
    if everybody is not None:
        return everybody
    if turn is None:
        if uid not in state.identities:
            return Why("name", "the name service has not said who this is")
        blocking = [s for s in state.servers.values() if s.uid not in (uid, SHARED_UID)]
        if blocking and not view.shared:
            return Why("server", f"the server of {user_text(state, blocking[0].uid)} is ending")
        return Why("next", "is let in next")
    if turn.uid != uid:
        return Why("turn", f"it is the turn of {user_text(state, turn.uid)}")
    if turn.ending is not None or view.closing:
        return Why("turn", "this user's own turn is over")
    if group.further:
        return Why("next", "a further context of a client is let in next")
    rules = view.rules(uid)
    if rules.max_clients is not None and rules.enforce_limits and counts.get(uid, 0) >= rules.max_clients:
        count = "1 process" if rules.max_clients == 1 else f"{rules.max_clients} processes"
        return Why("max_clients", f"this user may have {count} at a time")
    room = view.sent[1].room if view.sent is not None else None
    if room is not None and len(state.clients) >= room:
        return Why("full", f"the server is full ({len(state.clients)} clients)")
    return Why("next", "is let in next")


def expected_turns(view: View, waiting: Sequence[Group], now: float) -> dict[int, float]:
    """By waiting user, when the policy gives it the GPU at the latest; who may wait without end is left out.

    Each user ahead may keep its turn for as long as its own rules say, so a bound ends at the first who never has to
    leave. No bound is given while something else than a turn holds users.
    """
    turn, at = view.turn, now
    if _everybody(view, now) is not None:
        return {}
    if turn is not None:
        times = turn.deadlines(view.rules(turn.uid))
        if times is None or not has_to_leave(view, turn.uid):
            return {}
        at = max(now, times[1])
    found: dict[int, float] = {}
    for group in waiting:
        uid = group.uid
        if (turn is not None and uid == turn.uid) or view.denied(uid):
            continue
        found[uid] = at
        rules = view.rules(uid)
        if rules.switch_after is None or not has_to_leave(view, uid):
            break
        at += rules.switch_after + rules.switch_grace
    return found


def has_to_leave(view: View, uid: int) -> bool:
    """Whether the policy takes the GPU from this user at some time while others wait."""
    rules = view.rules(uid)
    enforced = rules.enforce_switch and rules.switch_action != "none" and not rules.switch_exempt
    return enforced and rules.switch_after is not None
