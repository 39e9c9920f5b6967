"""The control daemon is told to quit when nothing works there and it is not wanted: in a drain, when its user apart has
had no client for ``daemon_idle_timeout`` or others wait for its place, and when the policy wants another server.

A drain is a closed gate: who comes is held, and ``resume`` lets them in at once. Running work ends by itself or at a
time; the next daemon is started when the drain ends. A restart that waits for the clients is a drain that ends with the
control daemon.

It is told when the gate has said that no new client can be handed over: who comes meanwhile is held for the next one,
and loses a fraction of a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpsagent.core import actions as act
from mpsagent.core.pause_room import longest
from mpsagent.core.rule import Decision, EndClient
from mpsagent.core.view import View
from mpsagent.mps.units import duration_text

RULE, IDLE = "drain", "daemon_idle_timeout"
AGAIN = 5.0
"""Seconds until a ``quit`` that did not get through is sent again."""
LOST = 20.0
"""Seconds until a ``quit`` that was not heard of again is taken for lost: more than any deadline of the front-end."""
QUIT_TIMEOUT = 2
"""Seconds that MPS is given; no client is left."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``drain``: when the one began that has been reported, ``done``: so has the end of all work; ``idle``: since when
    a user apart has had no client; ``asked``: when the control daemon was told to quit."""

    drain: float | None = None
    done: bool = False
    idle: float | None = None
    asked: float | None = None
    again_at: float = float("-inf")


def decide(view: View, memory: Memory, now: float) -> Decision[Memory]:
    memory, todo = _reported(view, memory, now)
    state, control = view.state, view.state.control
    if control is None or not view.control_alive:
        return Decision(replace(memory, idle=None, asked=None), todo)
    if memory.asked is not None and now >= memory.asked + LOST and control.quitting is None:
        memory = replace(memory, asked=None)
    if state.clients or state.held.handing or view.passed_untouched:
        memory, until = replace(memory, idle=None), None if state.drain is None else state.drain.until
        if until is None or now < until:
            lost = None if memory.asked is None else memory.asked + LOST
            return Decision(memory, todo, wake=min((at for at in (until, lost) if at is not None), default=None))
        clients = (one for one in state.clients.values() if one.detached is None)
        ends = (EndClient.of(one, "the time of the drain is over", RULE, "order") for one in clients)
        return Decision(memory, todo, tuple(ends))
    apart = view.user is not None and state.drain is None and not state.held and view.synced
    memory = replace(memory, idle=(now if memory.idle is None else memory.idle) if apart else None)
    if memory.asked is not None or control.quitting is not None:
        return Decision(memory, todo, wake=None if memory.asked is None else memory.asked + LOST)
    if state.drain is not None:
        due, reason, rule = now, "drain: the last client has ended", RULE
    elif view.outdated and view.turn is None:
        then = ": a new control daemon is started" if view.wanted else ""
        due, rule = now, view.instance_rule("sharing")
        reason = f"no client works, and the policy wants {view.form}{then}"
    elif memory.idle is not None:
        due, rule = memory.idle + view.policy.apart_idle_timeout, view.instance_rule(IDLE)
        reason = f"user {view.user} has had no client for {duration_text(now - memory.idle)}"
        if view.short:
            due, rule, reason = now, view.instance_rule("max_users"), f"{reason}, and other users wait for its place"
    else:
        return Decision(memory, todo)
    if now < (due := max(due, memory.again_at)) or not view.closed:  # what the gate says comes by itself
        return Decision(memory, todo, wake=due if now < due else None)
    quit_it = act.QuitControl(timeout=QUIT_TIMEOUT, reason=reason, rule=rule)
    return Decision(replace(memory, asked=now), (*todo, quit_it), wake=now + LOST)


def old_way(view: View) -> str | None:
    """Why the policy's way of sharing does not hold yet: those at work keep the one before."""
    users, apart = [uid for uid in view.state.users() if uid not in view.suspended], len(view.daemons.keys() - {None})
    wanted, count = f'sharing = "{view.policy.sharing}"', len(view.state.clients)
    if apart and view.policy.sharing != "per-user":
        whose, rest = f"{apart} user{'s' * (apart != 1)} with per-user", "new clients are held until then"
    elif view.outgoing:
        left = [client for client in view.state.clients.values() if client.daemon is None]
        whose = f"{len(left)} process{'es' * (len(left) != 1)} from before it"
        return f"{wanted}: {whose} still on the control daemon of all users; no user waits for them" if left else None
    elif view.together or view.elsewhere or not users or not (view.outdated or len(users) > 1):
        return None
    else:
        wanted += f" with {view.form}" if view.outdated else ""
        whose, rest = f"{len(users)} user{'s' * (len(users) != 1)}", "the policy sets no latest time"
        spans = [span for uid in users if (span := longest(view, uid)) is not None]
        if len(spans) == len(users):
            rest = f"at most {duration_text(sum(spans))} once another user waits"
    until = f"{count} process{'es' * (count != 1)} of {whose} {'has' if count == 1 else 'have'} ended"
    return f"{wanted} takes effect later: the old way holds until {until}; {rest}"


def _reported(view: View, memory: Memory, now: float) -> tuple[Memory, tuple[act.Action, ...]]:
    """What people are told of a drain."""
    todo: list[act.Action] = []
    drain = view.state.drain
    if memory.drain is not None and (drain is None or drain.since != memory.drain):
        todo.append(act.Report(kind="drain.ended", reason="new clients are admitted again", rule=RULE))
        memory = Memory()
    if drain is not None and memory.drain is None:
        memory = replace(memory, drain=drain.since)
        until = "as long as it takes" if drain.until is None else f"for {duration_text(max(0.0, drain.until - now))}"
        until += ", then the control daemon is started again" if drain.restart else ""
        todo.append(
            act.Report(
                kind="drain.begun", reason=f"no new client is admitted; clients at work continue {until}", rule=RULE
            )
        )
    done = drain is not None and not view.control_alive
    if done and not memory.done:
        reason = "the last client has ended; the control daemon is down until the drain ends"
        todo.append(act.Report(kind="drain.done", reason=reason, rule=RULE))
    return replace(memory, done=done), tuple(todo)


def note(memory: Memory, done: act.Done) -> Memory:
    action = done.action
    if not isinstance(action, act.QuitControl) or done.ok or memory.asked is None:
        return memory
    return replace(memory, asked=None, idle=None, again_at=done.at + AGAIN)
