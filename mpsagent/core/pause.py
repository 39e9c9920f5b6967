"""Users who are paused: their processes are frozen, keep their memory, and go on when it is their turn again.

The rule of turns says which users are paused; this rule freezes and thaws their processes. A process is frozen only
when its user is shut out at the gate and none of the user's processes is being handed over: one that stops in its
hand-over holds up all users (X1). A client that is asked to end is thawed at once (a stopped client cannot answer, and
its unanswered end is a fault for its neighbours: X13), and so is one that has left its server. All are thawed when the
user for whom they were frozen works no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mpsagent.core import actions as act
from mpsagent.core.model import Client
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View

AGAIN = 1.0
"""Seconds until a process is frozen, or thawed, again: that did not work, or another one has resumed it."""
TIMES = 5
"""How often a process is frozen in one pause; one that does not stay frozen then is ended, unless
`turn.time_limit` is "never"."""

Process = tuple[int, int]
"""pid and start time."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``under_way``: processes that are just being frozen (True) or thawed; ``times``: how often each was frozen in the
    present pause; ``not_before``: when to try again."""

    under_way: Mapping[Process, bool] = field(default_factory=dict)
    times: Mapping[Process, int] = field(default_factory=dict)
    not_before: Mapping[Process, float] = field(default_factory=dict)
    reported: frozenset[Process] = frozenset()


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    clients = {(c.pid, c.peer.start): c for c in view.state.clients.values()}
    under_way = {key: freezes for key, freezes in memory.under_way.items() if key in clients}
    times = {key: count for key, count in memory.times.items() if key in clients and clients[key].uid in view.suspended}
    not_before = {key: at for key, at in memory.not_before.items() if key in clients and now < at}
    reported = memory.reported & times.keys()
    todo: list[act.Action] = []
    requests: list[EndClient] = []
    for_another, holder = _another_works(view), None if view.turn is None else view.turn.uid
    for key, client in clients.items():
        stands = client.frozen is not None
        wanted = for_another and client.uid in view.suspended and client.pid not in view.ending
        wanted = wanted and client.detached is None
        if wanted is stands or key in under_way or key in not_before or (wanted and not may_freeze(view, client.uid)):
            continue
        if wanted and times.get(key, 0) >= TIMES and client.uid != holder:  # its turn sees to that by itself
            ended, said = _give_up(view, client)
            requests += ended
            if key not in reported:
                todo.append(said)
                reported |= {key}
            continue
        under_way[key] = wanted
        if wanted:
            times[key] = times.get(key, 0) + 1
        todo.append(_freeze(view, client) if wanted else _thaw(view, client))
    fresh = Memory(under_way, times, not_before, reported)
    wake = min(not_before.values(), default=None)
    return Decision(fresh, tuple(todo), tuple(requests), wake=wake)


def may_freeze(view: View, uid: int) -> bool:
    """None of the user's processes is on its way through the gate, and none can be."""
    return view.shut_out(uid) and not view.state.held.hands_over(uid)


def _another_works(view: View) -> bool:
    """There is a user for whom the others are frozen, or will be in a moment. Not while the gate is away and the user
    whose turn it was has gone: it is not known then who comes next."""
    return view.synced or any(client.uid not in view.suspended for client in view.state.clients.values())


def _rule(view: View, client: Client) -> str:
    return view.rules(client.uid).origin("turn.on_expiry").key


def _freeze(view: View, client: Client) -> act.Freeze:
    reason = f"user {client.uid} is paused: client {client.pid} is frozen"
    return act.Freeze(pid=client.pid, start=client.peer.start, uid=client.uid, reason=reason, rule=_rule(view, client))


def _thaw(view: View, client: Client) -> act.Thaw:
    why = "is asked to end" if client.pid in view.ending else "goes on"
    reason = f"client {client.pid} of user {client.uid} {why}"
    return act.Thaw(pid=client.pid, start=client.peer.start, uid=client.uid, reason=reason, rule=_rule(view, client))


def _give_up(view: View, client: Client) -> tuple[list[EndClient], act.Report]:
    rules = view.rules(client.uid)
    what = (
        f"client {client.pid} of user {client.uid} does not stay frozen: it was resumed, or did not stop, {TIMES} times"
    )
    ends = rules.switch_after is not None
    reason = f"{what}; {'it is ended' if ends else 'it goes on'}"
    report = act.Report(
        kind="client.not_frozen", reason=reason, rule=_rule(view, client), uid=client.uid, pid=client.pid
    )
    if not ends:
        return [], report
    return [EndClient.of(client, what, _rule(view, client), "turn")], report


def note(memory: Memory, done: act.Done) -> Memory:
    action = done.action
    if not isinstance(action, act.Freeze | act.Thaw):
        return memory
    key = action.pid, action.start
    under_way = {one: freezes for one, freezes in memory.under_way.items() if one != key}
    times, not_before = memory.times, memory.not_before
    if not done.ok or (isinstance(action, act.Freeze) and times.get(key, 0) > 1):
        not_before = {**not_before, key: done.at + AGAIN}
    return Memory(under_way, times, not_before, memory.reported)
