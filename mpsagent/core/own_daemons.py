"""The users' own control daemons, with ``sharing = "per-user"``: a held user gets one, removed when it has ended
and nothing waits for it.

Where the policy had another way of sharing before, users who work on the control daemon of all keep it until their last
client has ended, and all others get their own at once. These end before that of all starts again: a policy with another
way of sharing than this one takes effect when none of their clients is left. So no user works in both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mpsagent.core import actions as act
from mpsagent.core.rule import Decision
from mpsagent.core.view import View

MOST_NAMED = 5
"""Users that a reason names."""
AGAIN = 5.0
"""Seconds until a control daemon that could not be made is tried again."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``making``, ``going``: users whose control daemons are being made, or taken away; ``failed``: when one that could
    not be made is tried again, and why it could not."""

    making: frozenset[int] = frozenset()
    going: frozenset[int] = frozenset()
    failed: Mapping[int, tuple[float, str]] = field(default_factory=dict)


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    state, rule = view.state, view.instance_rule("sharing")
    todo: list[act.Action] = []
    failed = {uid: one for uid, one in memory.failed.items() if uid not in view.daemons and state.held.first(uid)}
    over = [uid for uid in view.daemons if uid is not None and _over(view, uid)]
    for uid in over:
        todo.append(act.CloseDaemon(uid=uid, reason=f"the control daemon of user {uid} has ended", rule=rule))
    memory = replace(memory, going=memory.going.union(over), failed=failed)
    if (view.elsewhere or view.outgoing) and view.synced and state.drain is None:
        for uid in _due(view):
            if full(view, memory.making):
                break
            if uid in memory.making | memory.going or (uid in failed and now < failed[uid][0]):
                continue
            todo.append(act.OpenDaemon(uid=uid, reason=f"user {uid} is held and has no control daemon", rule=rule))
            memory = replace(memory, making=memory.making | {uid})
    wakes = [at for uid, (at, _) in failed.items() if uid not in memory.making and now < at]
    return Decision(memory, tuple(todo), wake=min(wakes, default=None))


def full(view: View, more: frozenset[int] = frozenset()) -> str | None:
    """Why no further user gets a control daemon now."""
    policy = view.policy
    if policy.sharing != "per-user":
        return f'sharing = "{policy.sharing}" takes effect when the clients at work have ended'
    if len(view.users | more) >= policy.apart_users:
        key, _, place = policy.origin(view.instance_rule("max_users")).place.partition(", ")
        why = f"no more users may have a control daemon of their own ({key} = {policy.apart_users}, {place})"
        having = sorted(view.users | more)
        who = f", users: {', '.join(map(str, having))}" if len(having) <= MOST_NAMED else ""
        return f"{why}: wait until the programs of one of these have ended{who}"
    return None


def short(view: View) -> bool:
    """A user waits for a control daemon, and only the end of another one makes room."""
    if not (view.elsewhere or view.outgoing) or view.policy.sharing != "per-user" or full(view) is None:
        return False
    return any(True for _ in _due(view))


def _due(view: View) -> Iterator[int]:
    """Users who are held and have no control daemon, first come first."""
    state = view.state
    users = (uid for uid in state.held.users() if uid not in view.daemons and view.welcome([uid]))
    return (uid for uid in users if not (view.outgoing and view.keeps(uid)))


def _over(view: View, uid: int) -> bool:
    """It has no control daemon, and no user who needs one. One that does not start is tried again where it may."""
    state, control = view.state, view.daemons[uid].control
    if (control is not None and control.proven) or uid in view.starting or not view.synced:
        return False
    if view.daemons[uid].clients:
        return False
    if view.policy.sharing != "per-user":
        return True
    return state.held.first(uid) is None and (uid not in view.failing or view.short)


def note(memory: Memory, done: act.Done) -> Memory:
    match done.action:
        case act.OpenDaemon(uid=uid):
            failed = {one: why for one, why in memory.failed.items() if one != uid}
            failed |= {} if done.ok else {uid: (done.at + AGAIN, done.text)}
            return replace(memory, making=memory.making - {uid}, failed=failed)
        case act.CloseDaemon(uid=uid):
            return replace(memory, going=memory.going - {uid})
    return memory
