"""Actions of the engine as messages to the gate. Pure."""

from __future__ import annotations

from mpsagent.core import actions as act
from mpsagent.wire import link


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
