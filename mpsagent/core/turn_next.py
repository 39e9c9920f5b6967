"""The next turn: whose it is, and what has to make way before."""

from __future__ import annotations

from dataclasses import replace

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Server, Status
from mpsagent.core.room import misfit
from mpsagent.core.turn_ends import AGAIN
from mpsagent.core.turn_memory import Asked, Memory, begin
from mpsagent.core.view import View

PROMISE = "promise 2: the GPU is never idle while a user waits"
SETTLE = 0.3
"""Seconds after the last process's end in which its server notices that (15 to 30 ms, measured); asked to shut down
before that, MPS refuses and backs off."""
SHUTDOWN_AGAIN = 1.0
SHUTDOWN_SELDOM = 5.0
SHUTDOWNS = 10
"""How often a server is asked once a second to make way, then every ``SHUTDOWN_SELDOM`` seconds."""
QUIT_TIMEOUT = 2
"""Seconds that MPS is given to quit when no client is left."""


def following(
    view: View, memory: Memory, now: float
) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """The first in the queue, once the way is free."""
    state, waiting, asked = view.state, view.waiting(), memory.shutdown
    memory = replace(memory, shutdown=None)
    if not (waiting or view.outdated) or not view.control_alive or view.given_up is not None:
        return memory, [], [], []
    if state.drain is not None or (state.control is not None and state.control.quitting is not None):
        return memory, [], [], []
    if not view.settled:  # a client whom an earlier table let in may be on its way through the gate
        return replace(memory, shutdown=asked), [], [], []
    if view.outdated:
        return _renew(view, memory, now)
    # One who comes and has no room beside the paused ones is waited for with their next turn, which ends them.
    uid = next((one for one in waiting if not memory.suspended or misfit(view, one) is None), waiting[0])
    told: list[tr.Transition] = []
    if uid in memory.suspended:
        told = [tr.UserResumed(now, uid, now - memory.suspended[uid])]
    if not view.shared:
        blocking = [
            s for s in state.servers.values() if s.uid != uid or s.status in (Status.SHUTTING_DOWN, Status.FAULT)
        ]
        if blocking:
            return _make_way(view, replace(memory, shutdown=asked), blocking, uid, now)
    gap = None if memory.left is None else max(0.0, now - memory.left)
    return begin(memory, uid, now), [], [tr.TurnBegan(now, uid, gap), *told], []


def _renew(view: View, memory: Memory, now: float) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """Nothing works, so the control daemon makes way for one with the policy's form of server."""
    control = view.state.control
    if control is None or view.state.held.handing or view.passed_untouched:
        return memory, [], [], []
    due = now if memory.quit is None or memory.quit[0] != control.pid else memory.quit[1] + QUIT_TIMEOUT + AGAIN
    if now < due:
        return memory, [], [], [due]
    form = "one server for all users" if view.policy.multiuser else "a server for each turn"
    then = f"{form}: a new control daemon is started"
    then = "a control daemon for each user" if view.template else then
    reason = f"nothing works, and the policy wants {then}"
    action = act.QuitControl(timeout=QUIT_TIMEOUT, reason=reason, rule=view.instance_rule("sharing"))
    return replace(memory, quit=(control.pid, now)), [action], [], []


def _make_way(
    view: View, memory: Memory, blocking: list[Server], uid: int, now: float
) -> tuple[Memory, list[act.Action], list[tr.Transition], list[float]]:
    """The server of the user before has to exit first. It is told at once when its last client has left: MPS's own
    back-off grows to seconds (recording 02, R3). One that starts, stops, is in FAULT or ordered to end is waited for:
    other rules see to that, and to one that never makes way."""
    server = blocking[0]
    if server.status is not Status.ACTIVE or server.shutdown is not None:
        return memory, [], [], []
    due = server.idle_since
    if due is None:
        due = now if memory.left is None else memory.left + SETTLE
    asked = memory.shutdown if memory.shutdown is not None and memory.shutdown.server == server.pid else None
    if asked is not None:
        due = max(due, asked.last + (SHUTDOWN_AGAIN if asked.times < SHUTDOWNS else SHUTDOWN_SELDOM))
    if now < due:
        return memory, [], [], [due]
    reason = f"the last client of {view.server_text(server)} has gone and user {uid} waits"
    force = bool(server.listed) and server.listed <= view.state.kept_open(server).keys()
    if force:
        reason += "; another process keeps its place there"
    action = act.ShutdownServer(server=server.pid, force=force, reason=reason, rule=PROMISE)
    asked = Asked(server.pid, now, now, 1) if asked is None else asked._replace(last=now, times=asked.times + 1)
    return replace(memory, shutdown=asked), [action], [], []
