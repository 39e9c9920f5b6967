"""The next turn: whose it is, and what has to make way before."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Server, Status
from mpsagent.core.pause_room import misfit
from mpsagent.core.rule import Reason
from mpsagent.core.turn_memory import Asked, Moment

PROMISE = "promise 2: the GPU is never idle while a user waits"
SETTLE = 0.3
"""Seconds after the last process's end in which its server notices that (15 to 30 ms, measured); asked to shut down
before that, MPS refuses and backs off."""
SHUTDOWN_AGAIN = 1.0
SHUTDOWN_SELDOM = 5.0
SHUTDOWNS = 10
"""How often a server is asked once a second to make way, then every ``SHUTDOWN_SELDOM`` seconds."""


def following(m: Moment) -> float | None:
    """The first in the queue, once the way is free. Returns until when it waits for that."""
    view, state, waiting = m.view, m.view.state, m.view.waiting()
    asked, suspended = m.memory.shutdown, m.memory.suspended
    m.remember(shutdown=None, waits=None)
    if not waiting or view.outdated or not view.control_alive or view.given_up is not None:
        return None  # where the policy wants another form of server, the control daemon quits first
    if state.drain is not None or (state.control is not None and state.control.quitting is not None):
        return None
    if not view.settled:  # a client whom an earlier table let in may be on its way through the gate
        m.remember(shutdown=asked)
        return None
    asked_until = float("-inf") if state.gate is None else state.gate.since + view.policy.hang_control
    if m.now < asked_until and (view.unlisted or any(map(state.strangers, state.servers.values()))):
        m.remember(shutdown=asked, waits=Reason("control", "MPS is being asked who works there"))
        return asked_until
    # One who comes and has no room beside the paused ones is waited for with their next turn, which ends them.
    uid = next((one for one in waiting if not suspended or misfit(view, one) is None), waiting[0])
    ends = Status.SHUTTING_DOWN, Status.FAULT
    servers = state.servers.values()
    blocking = next((s for s in servers if s.uid != uid or s.status in ends), None) if not view.shared else None
    blocking = blocking or next((s for s in servers if _only_kept_open(m, s)), None)
    if blocking is not None:
        return _make_way(m, blocking, asked, uid)
    gap = None if m.memory.left is None else max(0.0, m.now - m.memory.left)
    m.told.append(tr.TurnBegan(m.now, uid, gap))
    if uid in suspended:
        m.told.append(tr.UserResumed(m.now, uid, m.now - suspended[uid]))
    m.begin(uid, m.now)
    return None


def _only_kept_open(m: Moment, server: Server) -> bool:
    """The clients that MPS lists there have ended: another process, which it has forked or given its descriptors, keeps
    it."""
    return bool(server.listed) and server.listed <= m.view.state.kept_open(server).keys()


def _make_way(m: Moment, server: Server, asked: Asked | None, uid: int) -> float | None:
    """The server of the user before has to exit first. It is told at once when its last client has left: MPS's own
    back-off grows to seconds (recording 02, R3). One that starts, stops or is in FAULT is waited for: other rules see
    to that, and to one that never makes way."""
    view, now, asked = m.view, m.now, asked if asked is not None and asked.server == server.pid else None
    m.remember(shutdown=asked, waits=Reason("server", f"{view.server_text(server)} is ending"))
    if server.status is not Status.ACTIVE:
        return None
    due = server.idle_since
    if due is None:
        due = now if m.memory.left is None else m.memory.left + SETTLE
    if asked is not None:
        due = max(due, asked.last + (SHUTDOWN_AGAIN if asked.times < SHUTDOWNS else SHUTDOWN_SELDOM))
    if now < due:
        return due
    reason = f"the last client of {view.server_text(server)} has gone and user {uid} waits"
    force = _only_kept_open(m, server)
    if force:
        reason += "; another process keeps that client's place there"
    m.actions.append(act.ShutdownServer(server=server.pid, force=force, reason=reason, rule=PROMISE))
    asked = Asked(server.pid, now, now, 1) if asked is None else asked._replace(last=now, times=asked.times + 1)
    m.remember(shutdown=asked)
    return None
