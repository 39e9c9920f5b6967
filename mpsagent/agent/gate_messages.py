"""Between the words of the link (:mod:`mpsagent.wire.link`) and those of the engine. Pure."""

from __future__ import annotations

from collections.abc import Callable

from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.mps.limits import Limits
from mpsagent.wire import link


def to_input(message: link.FromGate, now: float, at: Callable[[float], float]) -> inp.GateInput:
    """What a message of the gate means to the engine. ``at``: a time of the gate's in the clock of ``now``."""
    match message:
        case link.Hello():
            return inp.GateConnected(now, message.gate)
        case link.Synced():
            return inp.GateSynced(now)
        case link.Knock():
            peer = inp.Peer(
                message.pid, message.uid, message.gid, message.start, message.cgroup, message.pid_namespace,
                message.command,
            )  # fmt: skip
            return inp.Knocked(now, message.connection, peer, min(at(message.since), now))
        case link.Known():
            peer = inp.Peer(message.pid, message.uid, message.gid, message.start, message.cgroup)
            limits = message.limits or Limits()
            return inp.Known(now, peer, min(at(message.since), now), limits, message.connections)
        case link.Left():
            return inp.Left(now, message.connection)
        case link.Handing():
            return inp.HandingOver(now, message.connection)
        case link.Passed():
            return inp.Passed(
                now, message.connection, inp.Peer(message.pid, message.uid, 0, message.start), message.limits,
                message.fail_safe, message.seconds, message.status,
            )  # fmt: skip
        case link.Failed():
            return inp.HandoverFailed(
                now, message.connection, message.pid, message.uid, message.stage, message.why, message.lost
            )
        case link.Unconfirmed():
            return inp.Unconfirmed(now, message.uid, message.why)
        case link.Applied():
            return inp.Applied(now, message.number)
        case link.FrontEnd():
            return inp.FrontEndUsed(now, message.pid, message.uid, message.command, message.refused)
        case link.HandshakeSeen():
            return inp.HandshakeSeen(now, message.known, message.greeting)
        case link.Refused():
            return inp.GateRefused(now, message.connection, message.pid, message.uid, message.why)


def to_gate(action: act.ToGate, instance: str) -> link.FromAgent:
    """The message that carries an action of this instance to the gate."""
    match action:
        case act.SetAdmissions():
            table = action.admissions
            users = {
                one.uid: link.User(
                    one.uid,
                    "known" if one.known_only else "all",
                    one.limits,
                    one.max_clients,
                    one.total,
                    one.named,
                    one.max_contexts,
                )
                for one in table.users
            }
            return link.Admissions(
                number=action.number, open=table.open, room=table.room, fail_safe=table.fail_safe,
                devices=table.devices, set_limits=table.set_limits, users=users, instance=instance,
                processes={(pid, start): link.Named(pid, start, limits) for pid, start, limits in table.processes},
            )  # fmt: skip
        case act.RefuseConnection():
            return link.Refuse(action.connection, action.reason)
        case act.ReleaseClient():
            return link.Release(action.pid, action.start)
        case act.CountClient():
            return link.Found(action.pid, action.uid, action.start, action.limits, instance)
