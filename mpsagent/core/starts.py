"""A server that starts with other limits than its user's is killed before it is Ready.

The defaults are handed over when a server becomes Ready, 60 to 600 ms after its start, so until then nobody has got
anything, and nobody has begun to work. Who waits for it is served by the next server, 0.3 s later, with the defaults
that are asked for meanwhile; behind other waiting users, if there are any (conformance scenarios X22 to X26; 224 of 224
clients on an H200). A fault of the control daemon's can make that cost somebody his connection (X28): that is looked at
before, and then the server is left alone.

It is needed when arming came too late or for somebody else: who waits for a leaving server's own user goes first (X20),
so somebody who knocks in the last moment of his server's exit is served with what was armed for another.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.limits import PROMISE, LimitsMemory
from mpsagent.core.model import Status
from mpsagent.core.world import World, exceeds, limits_text, same_limits
from mpsagent.mps.limits import Limits

IN_TIME = 0.05
"""Seconds after its start until which a server may be killed: it is not Ready before 60 ms."""
HEARD = 0.015
"""Seconds that a setting which was on its way when the server started gets to be confirmed. The daemon blocks from the
server's first word on, 1 to 3 ms after its start, so what is confirmed before Ready is what the server gets."""
TRIES_MORE, TRIES_LESS = 5, 1
"""Servers killed in a row at most: for one that would get more than its policy, for one that would get less."""


@dataclass(frozen=True, slots=True)
class StartsMemory:
    """``killed``: pids of the servers killed in a row; none was Ready in between. ``spared``: one that could not be."""

    killed: tuple[int, ...] = ()
    spared: int = 0


def decide(
    world: World, memory: StartsMemory, limits: LimitsMemory, now: float
) -> tuple[StartsMemory, list[act.Action], float | None]:
    state, control = world.state, world.state.control
    server = state.holder()
    if not state.waiting or (server is not None and server.status is not Status.INITIALIZING):
        return (StartsMemory(spared=memory.spared) if memory.killed else memory), [], None
    if (
        server is None
        or server.uid is None
        or server.pid in (*memory.killed, memory.spared)
        or not world.limits_enforced
    ):
        return memory, [], None
    if control is None or control.quitting is not None or not world.control_alive:
        return memory, [], None
    uid, until = server.uid, server.started + IN_TIME
    if now >= until or not any(w.uid == uid and not w.gone for w in state.waiting):
        return memory, [], None
    if uid in world.identities and not world.rules(uid).enforce_limits:
        return memory, [], None
    wanted, tries = world.limits(uid), len(memory.killed)
    ours = limits.daemon == control.pid
    asked, known = (limits.asked, limits.known) if ours else (None, None)
    if asked is None and known is not None and same_limits(known, wanted):
        return memory, [], None
    heard_by = server.started + HEARD
    if asked is not None and same_limits(asked, wanted) and now < heard_by:
        return memory, [], heard_by
    if tries >= (TRIES_LESS if asked is None and known is not None and not exceeds(known, wanted) else TRIES_MORE):
        return memory, [], None
    what = _what(asked, known)
    reason = f"server {server.pid} of user {uid} is starting with {what} instead of {limits_text(wanted)}"
    reason = f"{reason}: the next one gets its user's"
    kill = act.KillServer(server=server.pid, before_ready=True, reason=reason, rule=PROMISE)
    return StartsMemory((*memory.killed, server.pid), memory.spared), [kill], None


def note(memory: StartsMemory, outcome: act.Outcome) -> StartsMemory:
    """One that was not killed starts as it is; its limits are verified when it is Ready."""
    action = outcome.action
    if outcome.ok or not isinstance(action, act.KillServer) or action.server not in memory.killed:
        return memory
    return StartsMemory(tuple(pid for pid in memory.killed if pid != action.server), action.server)


def _what(asked: Limits | None, known: Limits | None) -> str:
    if asked is not None:
        return f"limits that were being set ({limits_text(asked)})"
    return "limits that nobody knows" if known is None else limits_text(known)
