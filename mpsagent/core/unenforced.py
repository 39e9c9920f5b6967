"""Requests to end a client that the policy does not enforce: each is reported once, and nothing is done."""

from __future__ import annotations

from dataclasses import dataclass

from mpsagent.core import actions as act
from mpsagent.core.rule import EndClient, Section
from mpsagent.core.view import View

Request = tuple[int, int, str]
"""pid and start time of the client, and the key of the rule."""


@dataclass(frozen=True, slots=True)
class Memory:
    """``reported``: the requests that are on record, of clients that are still there."""

    reported: frozenset[Request] = frozenset()


def enforced(view: View, uid: int, section: Section) -> bool:
    """Return whether the policy ends clients of this user by rules of that section."""
    if section == "order":
        return True
    return view.policy.enforce if section == "timeouts" else view.rules(uid).enforce


def take(view: View, memory: Memory, request: EndClient) -> tuple[Memory, tuple[act.Report, ...]]:
    """Return the report of a request that is not enforced, unless it is on record."""
    one = request.pid, request.start, request.rule
    if one in memory.reported or not view.is_alive(request.pid, request.start):
        return memory, ()
    there = {known for known in memory.reported if view.is_alive(known[0], known[1])}
    client = f"client {request.pid} of user {request.uid}"
    reason = f"{client} would be ended: {request.reason}; the policy does not enforce this"
    report = act.Report(kind="client.over", reason=reason, rule=request.rule, uid=request.uid, pid=request.pid)
    return Memory(frozenset(there | {one})), (report,)
