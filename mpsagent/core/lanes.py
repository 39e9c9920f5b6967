"""Which users have a control daemon of their own, with ``sharing = "apart"``: who is held gets one, and it goes when it
has ended and nothing waits for it.

That of all users ends before the first of these starts, and these end before it starts again: a policy with another way
of sharing takes hold when no client of the old way is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.rule import Decision
from mpsagent.core.view import View

AGAIN = 5.0
"""Seconds until a lane that could not be made is tried again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``making``, ``going``: users whose lanes are being made, or taken away; ``failed``: when one that could not be
    made is tried again."""

    making: frozenset[int] = frozenset()
    going: frozenset[int] = frozenset()
    failed: Mapping[int, float] = field(default_factory=dict)


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    state, rule = view.state, view.instance_rule("sharing")
    todo: list[act.Action] = []
    failed = {uid: at for uid, at in memory.failed.items() if now < at}
    over = [uid for uid in state.lanes if uid is not None and _over(view, uid)]
    for uid in over:
        todo.append(act.CloseLane(uid=uid, reason=f"the control daemon of user {uid} has ended", rule=rule))
    memory = replace(memory, going=memory.going.union(over), failed=failed)
    if view.elsewhere and view.synced and state.drain is None:
        for uid in state.held.users():
            if uid in state.lanes or uid in (memory.making | memory.going | failed.keys()):
                continue
            if view.denied(uid) or not view.identified(uid) or full(view, memory.making):
                continue
            todo.append(act.OpenLane(uid=uid, reason=f"user {uid} is held and has no control daemon", rule=rule))
            memory = replace(memory, making=memory.making | {uid})
    return Decision(memory, tuple(todo), wake=min(failed.values(), default=None))


def full(view: View, more: frozenset[int] = frozenset()) -> str | None:
    """Why no further user gets a control daemon now."""
    policy = view.policy
    if policy.sharing != "apart":
        return f'sharing = "{policy.sharing}" takes hold when the clients at work have ended'
    if len(view.users | more) >= policy.apart_users:
        return f"no more users may have a control daemon of their own (apart_users = {policy.apart_users})"
    return None


def _over(view: View, uid: int) -> bool:
    """It has no control daemon, and no user who needs one."""
    state, control = view.state, view.state.lanes[uid].control
    if (control is not None and control.proven) or uid in view.starting or not view.synced:
        return False
    if any(client.lane == uid for client in state.clients.values()):
        return False
    return view.policy.sharing != "apart" or state.held.first(uid) is None


def note(memory: Memory, done: act.Done) -> Memory:
    match done.action:
        case act.OpenLane(uid=uid):
            failed = memory.failed if done.ok else {**memory.failed, uid: done.at + AGAIN}
            return replace(memory, making=memory.making - {uid}, failed=failed)
        case act.CloseLane(uid=uid):
            return replace(memory, going=memory.going - {uid})
    return memory
